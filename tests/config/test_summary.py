"""config.gin contains the configuration of a run and repeats it."""

from __future__ import annotations

import gin
import pytest

from rosetta_t5.config import get_gin_config_str, parse_gin_flags, summarize_gin_config
from rosetta_t5.config.configuration import configure
from rosetta_t5.config.language.statements import read_program

RUN = """
STEPS = 3
train_script.train:
  model = @toy.Model()
  model_dir = '/run'
  total_steps = %STEPS
  dataset_cfg = @train/toy.DatasetConfig
toy.Model.width = 8
toy.Model.optimizer = @toy.Optimizer
train/toy.DatasetConfig.lengths = {'inputs': 64}
"""


def test_the_summary_contains_bindings_and_the_defaults_of_called_functions(run):
  run(RUN)
  text = get_gin_config_str()
  for line in (
    "import __main__ as train_script",
    "import toy",
    "STEPS = 3",
    "train_script.train.total_steps = %STEPS",
    "toy.Model.dropout_rate = 0.1",  # a default, in force since Model was built
    "train/toy.DatasetConfig.lengths = {'inputs': 64}",  # bound, and not called yet
  ):
    assert line in text.splitlines(), text


def test_the_summary_lists_values_under_the_scope_that_binds_them(run):
  run(RUN.replace("@toy.Model()", "%MODEL") + "MODEL = @toy.Model()\nOTHER/toy.Model.width = 9")
  lines = get_gin_config_str().splitlines()
  assert "toy.Model.dropout_rate = 0.1" in lines
  assert "OTHER/toy.Model.width = 9" in lines
  assert not [line for line in lines if line.startswith("MODEL/")]


def test_the_summary_repeats_the_run(run, write):
  import toy

  first = run(RUN)
  write("config.gin", get_gin_config_str())
  gin.clear_config()
  again = configure(read_program(["config.gin"]), toy.train)()
  assert again["model"].width == first["model"].width
  assert again["dataset_cfg"]().lengths == {"inputs": 64}
  assert get_gin_config_str().count("\n") >= 20


class _Writer:
  """Keeps what a TensorBoard writer receives."""

  def __init__(self):
    self.texts: dict[int, dict[str, str]] = {}
    self.flushed = False

  def write_texts(self, step, texts):
    self.texts[step] = texts

  def flush(self):
    self.flushed = True


def test_the_summary_is_written_to_the_model_dir_and_to_tensorboard(tmp_path):
  parse_gin_flags(["."], [], ["A = 1"])
  writer = _Writer()
  summarize_gin_config(str(tmp_path / "run"), writer, 7)
  assert "A = 1" in (tmp_path / "run/config.gin").read_text()
  assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.gin"]
  assert "A = 1" in writer.texts[7]["config"]
  assert writer.flushed


def test_only_process_0_writes(tmp_path, monkeypatch):
  monkeypatch.setattr("jax.process_index", lambda: 1)
  summarize_gin_config(str(tmp_path / "run"), None, 0)
  assert not (tmp_path / "run").exists()


def test_provenance_is_refused():
  with pytest.raises(ValueError, match="leave show_provenance at False"):
    get_gin_config_str(show_provenance=True)
