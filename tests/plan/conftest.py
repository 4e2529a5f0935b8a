"""A dry run of a tiny model, in this process."""

from __future__ import annotations

import pathlib

import gin
import pytest

from rosetta_t5.data.tensorflow_import import import_seqio
from t5x.main import main

RUN = """
include 't5x/examples/t5/t5_1_1/tiny.gin'
include 't5x/configs/runs/pretrain.gin'
from __gin__ import dynamic_registration
import seqio
MIXTURE_OR_TASK_NAME = 'some_task'
TASK_FEATURE_LENGTHS = {'inputs': 16, 'targets': 8}
DROPOUT_RATE = 0.0
TRAIN_STEPS = 100
BATCH_SIZE = 16
USE_CACHED_TASKS = False
VOCABULARY = @seqio.ByteVocabulary()
MODEL_DIR = 'run'
"""


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
  """Returns the exit status, the rows by name and the whole output of a check of RUN."""
  monkeypatch.delenv("ROSETTA_T5_DEBUG", raising=False)
  monkeypatch.chdir(tmp_path)
  pathlib.Path("run.gin").write_text(RUN)
  _register_task()

  def _check(*arguments: str) -> tuple[int, dict[str, str], str]:
    try:
      main(["train", "--gin_file=run.gin", "--dry_run", "--devices=4", *arguments])
      status = 0
    except SystemExit as ended:
      status = ended.code
    gin.clear_config()
    shown = capsys.readouterr()
    lines = [line.split("  ", 1) for line in shown.out.splitlines() if "  " in line]
    return status, {name: text.strip() for name, text in lines}, shown.out + shown.err

  return _check


def _register_task() -> None:
  seqio = import_seqio()
  if "some_task" not in seqio.TaskRegistry.names():
    features = dict.fromkeys(["inputs", "targets"], seqio.Feature(seqio.ByteVocabulary()))
    source = seqio.FunctionDataSource(
      lambda split, shuffle_files: None, splits=["train", "validation"]
    )
    seqio.TaskRegistry.add("some_task", source=source, preprocessors=[], output_features=features)
