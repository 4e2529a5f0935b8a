"""Training processes that are killed at random moments or terminated, and restarted."""

from __future__ import annotations

import random

import numpy as np
import pytest
from soak import final_state

from rosetta_t5.checkpoints import all_steps

# The time of a restart on an idle machine, where nothing is imported or compiled.
_SECONDS_TO_START = 0.7
_SECONDS_A_STEP = 0.2


def test_a_terminated_run_saves_its_last_step_and_its_restart_continues_from_it(train, tmp_path):
  whole = train(tmp_path / "whole", 6)
  before = train(tmp_path / "terminated", 6, sigterm_after=3)
  # The step that follows the signal may have begun already.
  assert all_steps(tmp_path / "terminated")[1:] == [max(before)]
  assert max(before) in (3, 4)
  after = train(tmp_path / "terminated", 6)
  assert min(after) == max(before) + 1
  assert before | after == whole


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_repeatedly_ends_like_one_that_is_not(train, tmp_path, kills):
  # No process trains much more than 4 steps, so the last kill happens before the end.
  steps = 3 * kills + 8
  whole = train(tmp_path / "whole", steps)
  choose = random.Random(kills)
  killed = tmp_path / "killed"
  left_unfinished = 0
  for number in range(kills):
    # A save waits for the previous one, so step 1 is on disk once step 3 is printed.
    after_steps = choose.choice((0, 1, 3, 4))
    longest = _SECONDS_A_STEP if after_steps else _SECONDS_TO_START
    losses = train(killed, steps, kill=(after_steps, choose.uniform(0, longest)))
    assert losses.items() <= whole.items(), f"process {number} has other losses"
    left_unfinished += bool(killed.exists() and list(killed.glob("checkpoint_*tmp*")))
  resumed_after = all_steps(killed)[-1]
  assert resumed_after > kills / 2, "nothing was resumed"
  last = train(killed, steps)
  assert min(last) == resumed_after + 1
  assert last.items() <= whole.items()
  assert max(last) == steps, "the last kill came before the end"
  ends = final_state(tmp_path / "whole", steps), final_state(killed, steps)
  assert ends[0].keys() == ends[1].keys()
  for name, array in ends[0].items():
    np.testing.assert_array_equal(array, ends[1][name], err_msg=name, strict=True)
  assert kills < 50 or left_unfinished >= 5, "too few kills came while a checkpoint was written"
  assert not list(killed.glob("checkpoint_*tmp*"))
