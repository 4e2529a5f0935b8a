"""Finetuning end to end: pretrain, memorize 64 examples of SQuAD and MNLI, evaluate, infer.

The recipes and tasks are those that are shipped, the data is in TFDS's folders, and the package t5,
which usually defines these tasks, cannot be imported. The examples are real ones if the data is
available, else synthetic; the variants always memorize synthetic ones, which takes less time.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from rosetta_t5.data.task_metrics import squad

_HERE = pathlib.Path(__file__).parent / "finetune"
_PRETRAINED, _FINETUNED = 100, 500  # steps
_VOCABULARY = "gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"
_RUN = {"RANDOM_SEED": 0, "train.stats_period": 50, "DROPOUT_RATE": 0.0}
# The model of the smallest recipe is too small to learn anything and has the full vocabulary.
_MODEL = {
  "network.T5Config.vocab_size": 384,
  "network.T5Config.emb_dim": 64,
  "network.T5Config.num_heads": 4,
  "network.T5Config.head_dim": 16,
  "network.T5Config.mlp_dim": 128,
  "network.T5Config.dtype": "'float32'",
}
_PRETRAIN = {
  "TASK_FEATURE_LENGTHS": "{'inputs': 32, 'targets': 16}",
  "TRAIN_STEPS": _PRETRAINED,
  "BATCH_SIZE": 32,
  "train.eval_period": 100,
  "train.eval_steps": 1,
  "train/utils.DatasetConfig.pack": False,
  "train_eval/utils.DatasetConfig.pack": False,
  "optax.adamw.learning_rate": 0.003,
}
_FINETUNE = {
  "TASK_FEATURE_LENGTHS": "{'inputs': 64, 'targets': 16}",
  "TRAIN_STEPS": _FINETUNED,
  "BATCH_SIZE": 16,
  "EVAL_PERIOD": 400,
  "EVAL_STEPS": 2,
  # As in the recipe: batch size times target length of the pretraining.
  "LOSS_NORMALIZING_FACTOR": 32 * 16,
  "train/utils.DatasetConfig.pack": False,
  "train_eval/utils.DatasetConfig.pack": False,
}
_ADAMW = {"optax.adamw.learning_rate": 0.005}
_REAL_DATA = _HERE.parents[2] / "shared/data"
# Real passages are longer and have more distinct words.
_REAL_MODEL = _MODEL | {"network.T5Config.vocab_size": 1152}
_REAL_ROWS = {"TASK_FEATURE_LENGTHS": "{'inputs': 208, 'targets': 24}", "TRAIN_STEPS": 700}
_SQUAD, _MNLI = ("squad1", "squad_v010_allanswers", "em"), ("mnli2", "glue_mnli_v2", "accuracy")


def _starter(folder, real=None):
  """Writes data to a folder; returns a function that runs a T5X command as a user does."""
  environment = {
    **os.environ,
    "ROSETTA_T5_ASSETS": f"{_VOCABULARY}={folder}/data/vocabulary.model",
    "PYTHONPATH": os.pathsep.join([str(_HERE / "without_t5"), str(_HERE.parents[1])]),
    "JAX_PLATFORMS": "cpu",
  }

  def run(*command, devices=1):
    flags = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
      [sys.executable, *command],
      env={**environment, "XLA_FLAGS": flags},
      capture_output=True,
      text=True,
      cwd=folder,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout

  def start(module, *files, devices=1, **bindings):
    flags = [f"--gin.{name}={value}" for name, value in bindings.items()]
    recipes = [f"--gin_file={file}" for file in files]
    data = f"--tfds_data_dir={folder}/data"
    return run("-m", f"t5x.{module}", *recipes, data, *flags, devices=devices)

  (folder / "data").mkdir()
  run(_HERE / "write_data.py", folder / "data", *(["1000", real] if real else ["70"]))
  start.folder = folder
  start.model = _REAL_MODEL if real else _MODEL
  start.finetuning = _FINETUNE | (_REAL_ROWS if real else {})
  return start


@pytest.fixture(scope="module")
def start(tmp_path_factory):
  return _starter(tmp_path_factory.mktemp("finetune"))


@pytest.fixture(scope="module")
def start_with_real_data(tmp_path_factory):
  """Runs commands on real rows of SQuAD and MNLI if they are available."""
  real = _REAL_DATA if _REAL_DATA.is_dir() else None
  return _starter(tmp_path_factory.mktemp("finetune_on_real_rows"), real)


def copy_pretrained(start, folder, optimizer="AdamW", **bindings):
  """Copies a pretraining run, which is made once per optimizer, to a folder."""
  model_dir = start.folder / f"pretrained {optimizer}"
  if not model_dir.exists():
    recipe = "gin/examples/tiny_pile_pretrain.gin"
    settings = {**_RUN, **start.model, **_PRETRAIN, **bindings}
    start("train", recipe, MODEL_DIR=f"'{model_dir}'", **settings)
  shutil.copytree(model_dir, folder)


def finetune(start, folder, task, devices=1, **bindings):
  """Finetunes with a shipped recipe in the folder of a pretraining; returns the rows of metrics."""
  recipe, name, _ = task
  start(
    "train",
    f"gin/examples/tiny_{recipe}_finetune_adam.gin",
    devices=devices,
    MODEL_DIR=f"'{folder}'",
    **{**_RUN, **start.model, **start.finetuning, **bindings},
  )
  return metrics(folder / f"inference_eval/{name}-metrics.jsonl")


def metrics(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("task", [_SQUAD, _MNLI], ids=["squad1", "mnli2"])
def test_64_examples_are_memorized_and_train_eval_and_infer_agree(start_with_real_data, task):
  start = start_with_real_data
  folder, (_, name, metric) = start.folder / task[0], task
  copy_pretrained(start, folder)
  rows = finetune(start, folder, task, **_ADAMW)
  steps = start.finetuning["TRAIN_STEPS"]
  assert [row["step"] for row in rows] == [*range(400, steps, 400), steps]
  assert rows[-1][metric] >= 95
  assert (folder / f"inference_eval/{name}-{steps:06}.jsonl").exists()

  trained = {
    "MIXTURE_OR_TASK_NAME": f"'{name}'",
    "CHECKPOINT_PATH": f"'{folder}/checkpoint_{steps}'",
    "USE_CACHED_TASKS": False,
    "DROPOUT_RATE": 0.0,
    **start.model,
  }
  model = ("gin/models/t5_1_1/tiny.gin", "gin/models/t5_1_1/adamw_opt.gin")
  split = "validation" if task is _SQUAD else "validation_matched"
  where = {"utils.DatasetConfig.split": f"'{split}'"}
  evaluated = start.folder / "eval"
  output = start(
    "eval", *model, "gin/runs/eval.gin", EVAL_OUTPUT_DIR=f"'{evaluated}'", **trained, **where
  )
  assert metrics(evaluated / f"inference_eval/{name}-metrics.jsonl")[-1] == rows[-1]
  assert metric in output
  inferred = start.folder / "infer"
  start(
    "infer",
    *model,
    "gin/runs/infer.gin",
    INFER_OUTPUT_DIR=f"'{inferred}'",
    TASK_FEATURE_LENGTHS=start.finetuning["TASK_FEATURE_LENGTHS"],
    **trained,
    **where,
    **{"utils.RestoreCheckpointConfig.dtype": "'float32'"},
  )
  written = metrics(inferred / f"{name}-predict.jsonl-00000-of-00001")
  answers = [row["inputs"]["targets_pretokenized"] for row in written]
  assert len(written) == 64
  assert squad(answers, [row["prediction"] for row in written])["em"] == rows[-1][metric]


_ADAFACTOR = {
  "OPTIMIZER": "@adafactor.Adafactor()",
  "adafactor.Adafactor.logical_factor_rules": "@adafactor.standard_logical_factor_rules()",
  "utils.create_learning_rate_scheduler.factors": "'constant'",
}
_RATE = "utils.create_learning_rate_scheduler.base_learning_rate"


@pytest.mark.slow
@pytest.mark.parametrize("task", [_SQUAD, _MNLI], ids=["squad1", "mnli2"])
@pytest.mark.parametrize("variant", ["fp8", "two devices a copy", "Adafactor"])
def test_variants_also_memorize_the_examples(start, task, variant, tmp_path):
  folder, (_, _, metric) = tmp_path / "run", task
  bindings, devices, optimizer = _ADAMW, 1, "AdamW"
  if variant == "fp8":
    # A CPU has no fp8 matmuls, so they are emulated.
    te = "te_helper.TransformerEngineConfig"
    switches = {f"{te}.enabled": 1, f"{te}.emulate": True, "train.te_config_cls": f"@{te}"}
    bindings = _ADAMW | switches
  elif variant == "Adafactor":
    bindings, optimizer = _ADAFACTOR | {_RATE: 0.1}, variant
  else:
    bindings, devices = _ADAMW | {"partitioning.PjitPartitioner.num_partitions": 2}, 2
  copy_pretrained(
    start, folder, optimizer, **(_ADAFACTOR | {_RATE: 0.02} if optimizer == "Adafactor" else {})
  )
  rows = finetune(start, folder, task, devices=devices, **bindings)
  assert rows[-1]["step"] == _FINETUNED
  assert rows[-1][metric] >= 95
