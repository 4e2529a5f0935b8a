"""Processes that train, for tests that kill them."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
from forked_python import python

Losses = dict[int, str]
Train = Callable[..., Losses]


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
  """Trains in a separate process: train(model_dir, steps, kill=(after how many steps, seconds)).

  With `sigterm_after`, the process gets a SIGTERM after that step instead of being killed. Returns the
  exact loss of each step (see killable_run.py). A run that fails without being killed raises
  ChildProcessError with the end of its output.
  """
  folder = tmp_path_factory.mktemp("programs")
  command = [python(), str(pathlib.Path(__file__).parent / "killable_run.py"), str(folder)]
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

    def run(
      model_dir: pathlib.Path,
      steps: int,
      kill: tuple[int, float] | None = None,
      sigterm_after: int = 0,
    ) -> Losses:
      start = len((folder / "stderr").read_text())
      # The status of a terminated run asks its launcher to restart it.
      expected = signal.SIGKILL if kill else 143 << 8 if sigterm_after else 0
      # A save and the deletion of an old checkpoint are running almost all the time. In a run that is
      # terminated, no save is due at its last step.
      period = 100 if sigterm_after else 1
      print(model_dir, steps, period, sigterm_after, file=process.stdin, flush=True)
      pid, losses = 0, {}
      for line in process.stdout:
        match line.split():
          case ["pid", number]:
            pid = int(number)
          case ["step", step, loss]:
            losses[int(step)] = loss
          case ["ended", status]:
            if int(status) != expected:
              raise ChildProcessError((folder / "stderr").read_text()[start:])
            return losses
        if kill is not None and pid and len(losses) == kill[0]:
          time.sleep(kill[1])
          os.kill(pid, signal.SIGKILL)  # it continues to train until then
          kill = (-1, 0)
      raise AssertionError((folder / "stderr").read_text())

    yield run
    process.stdin.close()
