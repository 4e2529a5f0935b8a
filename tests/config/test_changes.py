"""How a run's configuration differs from the previous run in the same folder."""

from __future__ import annotations

import gin
import pytest

from rosetta_t5.config.language.statements import read_program
from rosetta_t5.config.saved_config import changes_since

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
  run(
    "train_script.train:\n  model = @toy.Model()\n  model_dir = '/run'\n  total_steps = 1\n"
    "toy.Model.width = 1\n"
  )
  write("run/config.gin", BEFORE.lstrip())

  def _changes(now: str) -> list[str]:
    return changes_since("run", read_program([write("now.gin", now)]))

  return _changes


def test_another_spelling_of_the_same_configuration_is_not_a_change(changes):
  same = BEFORE.replace("@toy.Optimizer", "@other.toy.Optimizer")
  assert changes(same) == []


def test_changed_values_are_listed(changes):
  now = BEFORE.replace("STEPS = 3", "STEPS = 5").replace("{'inputs': 4}", "{'inputs': 6}")
  assert changes(now) == [
    "STEPS: 3 → 5",
    "train/toy.DatasetConfig.lengths: {'inputs': 4} → {'inputs': 6}",
  ]


def test_without_a_config_file_there_are_no_changes(tmp_path):
  assert changes_since(tmp_path) == []


def test_a_run_is_compared_with_the_bindings_of_gin(changes):
  # The defaults of what has been called are part of the configuration.
  assert changes_since("run") == [
    "toy.Model.width: %WIDTH → 1",
    "toy.Model.optimizer: @Optimizer → None",
  ]


def test_a_run_without_gin_is_compared_with_nothing(changes):
  gin.clear_config()
  assert changes_since("run") == []
