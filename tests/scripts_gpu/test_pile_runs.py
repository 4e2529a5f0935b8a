"""NVIDIA's scripts pretrain on a tiny Pile, in one process and in two, and finetune afterwards."""

from __future__ import annotations

import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import numpy as np
import pyarrow
import pytest
from inline_executor import InlineExecutor
from prepared_text import prepared_gin

from rosetta_t5.checkpoints import all_steps
from rosetta_t5.data.prepared import prepare

_ROOT = pathlib.Path(__file__).parents[2]
_SCRIPTS = _ROOT / "scripts_gpu"
_VOCABULARY = "gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"
_STEP = re.compile(r"^step (\d+)/\d+  loss ([\d.]+)", re.MULTILINE)
_SMALL = (
  "--gin.network.T5Config.vocab_size=384",
  "--gin.RANDOM_SEED=0",
  "--gin.DROPOUT_RATE=0.0",
  "--gin.train/utils.DatasetConfig.seed=0",
  "--gin.train.stats_period=1",
  "--gin.train.eval_steps=1",
)
_LENGTHS = "--gin.TASK_FEATURE_LENGTHS={'inputs':32,'targets':16}"
_STEPS = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Returns a folder with SQuAD in the format of TFDS, and the Pile as its original files."""
  folder = tmp_path_factory.mktemp("data")
  write = [sys.executable, _ROOT / "tests/finetune/write_data.py", folder, "70"]
  subprocess.run(write, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, check=True)
  random, words = np.random.default_rng(0), ("cat", "dog", "boat", "harp", "Oslo", "Rome", "has")
  pile = folder / "files/the_pile"
  (pile / "train").mkdir(parents=True)
  for name in ("train/00", "train/01", "val"):
    texts = (" ".join(random.choice(words, 40)) for _ in range(100))
    lines = [{"text": text, "meta": {"pile_set_name": "Books3"}} for text in texts]
    text = "\n".join(map(json.dumps, lines)).encode()
    (pile / f"{name}.jsonl.zst").write_bytes(pyarrow.compress(text, codec="zstd", asbytes=True))
  return folder


class Scripts:
  """Runs the scripts in a folder, as a user without a GPU would."""

  def __init__(self, folder: pathlib.Path, data: pathlib.Path):
    self._folder, self._data = folder, data

  def start(self, script: str, *arguments: str, flags: tuple[str, ...] = (), **environment: str):
    own = {
      "PATH": os.environ["PATH"],
      "PYTHON": sys.executable,
      "PYTHONPATH": str(_ROOT),
      "JAX_PLATFORMS": "cpu",
      "ROSETTA_T5_ASSETS": f"{_VOCABULARY}={self._data}/vocabulary.model",
      "TFDS_DATA_DIR": str(self._data),
      "TRAIN_STEPS": str(_STEPS),
      "TRAIN_ARGS": " ".join((*_SMALL, *flags)),
    }
    return subprocess.Popen(
      ["bash", str(_SCRIPTS / script), *arguments],
      cwd=self._folder,
      env=own | environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )

  def one(self, script: str, *arguments: str, **more) -> dict[int, float]:
    """Returns {step: loss} of a single-node script's run."""
    return _losses(self.start(script, *arguments, **more))

  def two(self, script: str, **more) -> dict[int, float]:
    """Returns {step: loss} of two processes, started as srun starts them."""
    with socket.socket() as free:
      free.bind(("127.0.0.1", 0))
      port = str(free.getsockname()[1])
    job = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "COORDINATOR_PORT": port}
    job |= {"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "WITH_MP": "1", "STAT_PERIOD": "1"}
    job |= {"T5_SIZE": "tiny", "PREC": "float32", "ENABLE_FP8": "0", "BSIZE_PER_GPU": "4"}
    job |= {"ENC_SL": "32", "DEC_SL": "16"}
    both = [self.start(script, SLURM_PROCID=str(n), **job, **more) for n in (0, 1)]
    losses = [_losses(process) for process in both]
    assert not losses[1], "process 0 speaks for both"
    return losses[0]


def _losses(process: subprocess.Popen) -> dict[int, float]:
  output, _ = process.communicate(timeout=600)
  assert process.returncode == 0, output[-3000:]
  return {int(step): float(loss) for step, loss in _STEP.findall(output)}


@pytest.fixture
def scripts(tmp_path: pathlib.Path, data: pathlib.Path) -> Scripts:
  return Scripts(tmp_path, data)


@pytest.mark.slow
def test_a_model_pretrained_by_two_processes_is_finetuned_in_a_new_folder(scripts, tmp_path, data):
  losses = scripts.two(
    "multiprocess_pretrain_pile.sh", MODEL_DIR="pretrained", TFDS_DATA_DIR=f"{data}/files"
  )
  assert list(losses) == [1, 2, 3, 4]
  assert all_steps(tmp_path / "pretrained") == [0, 4]
  arguments = ("squad1", "tiny", "float32", "1", "8", "logs", "pretrained", "0", "true", "0")
  losses = scripts.one("singlenode_ft_frompile.sh", *arguments, flags=(_LENGTHS,), TRAIN_STEPS="6")
  assert list(losses) == [5, 6]
  (finetuned,) = tmp_path.glob("ft_pretrained_*")
  assert all_steps(finetuned) == [4, 6]
  assert all_steps(tmp_path / "pretrained") == [0, 4]
  losses = scripts.two(
    "multiprocess_ft_frompile.sh", FT_TASK="squad1", MODEL_DIR="pretrained", TRAIN_STEPS="6"
  )
  assert list(losses) == [5, 6]


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one_on_prepared_text(scripts, tmp_path, data):
  tokens, files = tmp_path / "tokens", f"{data}/files/the_pile/train/*.jsonl.zst"
  prepare(files, str(data / "vocabulary.model"), tokens, executor=InlineExecutor())
  (tmp_path / "prepared.gin").write_text(prepared_gin(tokens))
  flags = (f"--gin_file={tmp_path}/prepared.gin", _LENGTHS)
  arguments = ("tiny", "float32", "1", "8", "logs", "one", "0", "0")
  one = scripts.one("singlenode_pretrain_pile.sh", *arguments, flags=flags)
  two = scripts.two("multiprocess_pretrain_pile.sh", MODEL_DIR="two", flags=flags)
  assert list(one) == [1, 2, 3, 4]
  # Two processes sum in another order, so the last printed digit may differ.
  assert two == pytest.approx(one, rel=1e-3)
