"""The number of steps that a run and its restarts make, and the examples that they count."""

from __future__ import annotations

import jax
import killable_run
import pytest

from rosetta_t5.checkpoints import (
  CheckpointConfig,
  RestoreCheckpointConfig,
  SaveCheckpointConfig,
  all_steps,
)
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.training.actions import ActionMode, BaseAction


class StopAt(BaseAction):
  """Ends the run after a step, and records the examples that the run has counted."""

  def __init__(self, step):
    self.step, self.samples = step, []

  def run(self, train_state, metrics_by_task):
    self.samples.append(int(metrics_by_task["train"]["data/consumed_samples"].value))
    return int(train_state.step) == self.step


def train(folder, total_steps=1, stop_at=0, start=None, **arguments):
  """Trains until `stop_at`; returns the folder's last step, and the counts of examples."""
  action = StopAt(stop_at)
  restore = RestoreCheckpointConfig(str(start), mode="specific") if start else None
  killable_run.run(
    str(folder),
    total_steps,
    period=1,
    sigterm_after=0,
    checkpoint_cfg=CheckpointConfig(SaveCheckpointConfig(period=1), restore),
    partitioner=PjitPartitioner(mesh={"data": 1}).on_devices(jax.devices()[:1]),
    actions={ActionMode.TRAIN: [action]},
    **arguments,
  )
  return all_steps(folder)[-1], action.samples


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
  folder = tmp_path_factory.mktemp("steps") / "pretrained"
  train(folder, 2)
  return folder / "checkpoint_2"


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [2, 3])
def test_relative_steps_of_a_finetuning_count_from_its_start_also_after_restarts(
  pretrained, tmp_path, stop_at
):
  batch = killable_run.BATCH
  finetune = {"start": pretrained, "relative_steps": 3}
  if stop_at == 2:  # killed after the checkpoint before the first step
    train(tmp_path, stop_at=3, **finetune)
    last = tmp_path / "checkpoint_3"
    last.rename(tmp_path / "lost")
  else:
    assert train(tmp_path, stop_at=3, **finetune) == (3, [batch])
  end, samples = train(tmp_path, **finetune)
  assert (end, samples[-1]) == (5, 3 * batch)
  assert train(tmp_path, **finetune) == (5, [])
  assert train(tmp_path, **finetune | {"relative_steps": 4}) == (6, [4 * batch])


@pytest.mark.slow
def test_relative_steps_continue_a_run_that_had_none(tmp_path):
  train(tmp_path, 2)
  assert train(tmp_path, relative_steps=2, stop_at=3)[0] == 3
  assert train(tmp_path, relative_steps=2) == (4, [4 * killable_run.BATCH])


def test_total_steps_below_the_step_of_the_checkpoint_are_refused(pretrained, tmp_path):
  for steps in (1, 2):
    with pytest.raises(
      ValueError, match=rf"more than 2, .*checkpoint_2, .* got {steps}\. .*RELATIVE"
    ):
      train(tmp_path, steps, start=pretrained)
  with pytest.raises(
    ValueError, match=r"To train 1 more steps, set TRAIN_STEPS = 3, or TRAIN_STEPS_RELATIVE"
  ):
    train(pretrained.parent, 1)
  with pytest.raises(ValueError, match=r"checkpoint_9 \(mode = 'specific'\): there is no such"):
    train(tmp_path, 3, start=pretrained.with_name("checkpoint_9"))
  assert train(pretrained.parent, 2) == (2, [])  # a restart of a complete run
