"""Training processes killed at random moments: the run they leave ends as one that nobody killed."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from rosetta_t5.checkpoints import all_steps
from rosetta_t5.checkpoints.reading import read_arrays

Losses = dict[int, str]
Train = Callable[..., Losses]

# Of a restart that is not killed, without load: importing nothing and compiling nothing, 0.7 s.
_SECONDS_TO_START = 0.7
_SECONDS_A_STEP = 0.2


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
  """Trains in a process of its own: train(model_dir, steps, kill=(after so many steps, seconds))."""
  folder = tmp_path_factory.mktemp("programs")
  command = [sys.executable, str(pathlib.Path(__file__).parent / "killable_run.py"), str(folder)]
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  with (
    open(folder / "stderr", "w+") as errors,
    subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=errors,
      text=True,
      env=environment,
    ) as process,
  ):

    def run(model_dir: pathlib.Path, steps: int, kill: tuple[int, float] | None = None) -> Losses:
      print(model_dir, steps, file=process.stdin, flush=True)
      pid, losses = 0, {}
      for line in process.stdout:
        match line.split():
          case ["pid", number]:
            pid = int(number)
          case ["step", step, loss]:
            losses[int(step)] = loss
          case ["ended", status]:
            assert int(status) == (signal.SIGKILL if kill else 0), (folder / "stderr").read_text()
            return losses
        if kill is not None and pid and len(losses) == kill[0]:
          time.sleep(kill[1])
          os.kill(pid, signal.SIGKILL)  # it trains on until then
          kill = (-1, 0)
      raise AssertionError((folder / "stderr").read_text())

    yield run
    process.stdin.close()


def final_state(model_dir: pathlib.Path, step: int) -> dict[str, np.ndarray]:
  return {
    name: array.get() for name, array in read_arrays(model_dir / f"checkpoint_{step}").items()
  }


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_a_run_killed_again_and_again_ends_as_one_that_nobody_killed(train, tmp_path, kills):
  # No process gets further than 3 steps and a moment, so the last kill comes before the end.
  steps = 2 * kills + 5
  whole = train(tmp_path / "whole", steps)
  choose = random.Random(kills)
  killed = tmp_path / "killed"
  left_unfinished = 0
  for number in range(kills):
    after_steps = choose.choice((0, 1, 1, 2))
    longest = _SECONDS_A_STEP if after_steps else _SECONDS_TO_START
    losses = train(killed, steps, kill=(after_steps, choose.uniform(0, longest)))
    assert losses.items() <= whole.items(), f"process {number} went another way"
    left_unfinished += bool(killed.exists() and list(killed.glob("checkpoint_*tmp*")))
  resumed_after = all_steps(killed)[-1]
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
