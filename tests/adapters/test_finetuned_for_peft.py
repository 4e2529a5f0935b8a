"""Adapters that `rosetta-t5 finetune` trains and `convert --to peft` writes compute the same in PEFT."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from peft_folders import logits_of
from test_finetune_command import call
from test_folder_runs import make_folder

from rosetta_t5 import checkpoints, trained_model
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays

# In a process of its own: PyTorch's import after TensorFlow's may crash.
PEFT = """
import pathlib, sys
import numpy as np
from peft_folders import load_base, their_logits
import peft
family, base, folder, output = sys.argv[1:]
model, path = load_base(family, base), pathlib.Path(base)
plain = their_logits(model, path)
np.save(output, [plain, their_logits(peft.PeftModel.from_pretrained(model, folder).eval(), path)])
"""


@pytest.fixture(scope="module", params=["t5gemma", "llama"])
def given(request, tmp_path_factory):
  """Returns (the family, the folder of a model, a file of rows)."""
  root = tmp_path_factory.mktemp("given")
  words = [{"text": f"w{n} w{n + 1} w9", "label": f"w{4 + n % 2}"} for n in range(3, 30)]
  (root / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in words))
  make_folder(root / "model", request.param, layers=2)
  return request.param, root / "model", root / "rows.jsonl"


@pytest.mark.slow
@pytest.mark.parametrize("method", [("--lora", 4), ("--dora", 4), ("--ia3",), ("--prompt", 5)])
def test_a_finetuned_adapter_computes_the_same_in_peft(given, method, tmp_path):
  family, base, rows = given
  run, folder = tmp_path / "run", tmp_path / "peft"
  options = ("--inputs", "text", "--targets", "label", "--epochs", 2, "--batch_size", 8)
  options += tuple(
    f"--gin.train_script.train.{x}_eval_dataset_cfg=None" for x in ("train", "infer")
  )
  options += ("--learning_rate", 0.05, "--out", run)
  status, _, errors = call("finetune", base, rows, *options, *method)
  assert status == 0, errors[-2000:]
  status, _, errors = call("convert", run, folder, "--to", "peft")
  assert status == 0, errors[-2000:]
  if importlib.util.find_spec("peft") is None:
    pytest.skip("peft, the oracle, is not installed")
  files = [family, base, folder, tmp_path / "logits.npy"]
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
  subprocess.run([sys.executable, "-c", PEFT, *map(str, files)], env=environment, check=True)
  plain, found = np.load(files[-1])
  checkpoint = run / f"checkpoint_{checkpoints.latest_step(run)}"
  adapter = trained_model.open_model_dir(run).model.adapter
  expected = logits_of(adapter, read_arrays(checkpoint), base)
  assert np.abs(found - plain).max() > 0.05
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
