"""What a run is told of the run before it in the same folder."""

from __future__ import annotations

import gin
import pytest

from rosetta_t5.config.changes import changes_since
from rosetta_t5.config.language.statements import read_program

BEFORE = """
from __gin__ import dynamic_registration
import toy
# Macros:
STEPS = 3
WIDTH = 8
train/toy.DatasetConfig.batch_size = 128
train/toy.DatasetConfig.lengths = {'inputs': 4}
toy.Model.width = %WIDTH
toy.Model.optimizer = @toy.Optimizer
toy.Model.dropout_rate = 0.1
"""


@pytest.fixture
def changes(write, run):
  run("train_script.train:\n  model = @toy.Model()\n  model_dir = '/run'\n  total_steps = 1\n"
      "toy.Model.width = 1\n")  # fmt: skip
  write("run/config.gin", BEFORE.lstrip())

  def _changes(now: str) -> list[str]:
    return changes_since("run", read_program([write("now.gin", now)], [], ["."]))

  return _changes


def test_the_same_is_no_change_however_it_is_written(changes):
  same = BEFORE.replace("= %WIDTH", "= 8").replace("@toy.Optimizer", "@other.toy.Optimizer")
  assert changes(same) == []


def test_defaults_written_down_are_no_change(changes):
  assert changes(BEFORE.replace("toy.Model.dropout_rate = 0.1\n", "")) == []


def test_values_that_differ_are_shown(changes):
  now = BEFORE.replace("STEPS = 3", "STEPS = 5").replace("{'inputs': 4}", "{'inputs': 6}")
  assert changes(now) == [
    "STEPS: 3 → 5",
    "train/toy.DatasetConfig.lengths: {'inputs': 4} → {'inputs': 6}",
  ]


def test_a_binding_taken_out_goes_back_to_the_default(changes):
  before = BEFORE.replace("dropout_rate = 0.1", "dropout_rate = 0.5")
  with open("run/config.gin", "w") as file:
    file.write(before)
  assert changes(before.replace("toy.Model.dropout_rate = 0.5\n", "")) == [
    "toy.Model.dropout_rate: 0.5 → 0.1"
  ]


def test_a_binding_of_one_scope_is_held_to_that_of_the_scope_around_it(changes):
  now = BEFORE.replace(
    "train/toy.DatasetConfig.batch_size = 128", "toy.DatasetConfig.batch_size = 8"
  )
  assert changes(now) == ["train/toy.DatasetConfig.batch_size: 128 → 8"]


def test_no_file_is_no_change(tmp_path):
  assert changes_since(tmp_path) == []


def test_a_run_is_held_to_what_gin_holds(changes):
  assert changes_since("run") == [
    "toy.Model.width: %WIDTH → 1",
    "toy.Model.optimizer: @Optimizer → None",
  ]


def test_a_run_without_gin_is_held_to_nothing(changes):
  gin.clear_config()
  assert changes_since("run") == []
