"""Trains through random faults, and compares every loss and the last checkpoint with an undisturbed run.

    python tests/resume/soak.py --minutes 20 --faults 200 --seed 0        # or: make soak

A third of the time goes to the undisturbed run, which determines the number of steps; a run with faults
in random order repeats these steps. The order, the moments and the damage depend only on the seed, as far
as an operating system allows. The disturbed run writes to a disk in memory, which only root can mount.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import numpy as np

from rosetta_t5.checkpoints import all_steps
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays

PERIOD = 20  # steps between checkpoints
_TIMEOUT_S = 120.0  # for what must happen within a second or two
_SECONDS_TO_START = 1.0
_SECONDS_OF_STEPS = 0.1  # a few
# The statuses of a process that a signal ends: before its first step, and after it has saved its state.
_SIGNALS = {
  "kill": (signal.SIGKILL, (-signal.SIGKILL,)),
  "SIGTERM": (signal.SIGTERM, (-signal.SIGTERM, 143)),
  "SIGUSR1": (signal.SIGUSR1, (-signal.SIGUSR1, 143)),
  "SIGINT": (signal.SIGINT, (-signal.SIGINT, 130)),
}
_WITHOUT_A_DISK = (*_SIGNALS, "stop", "byte flip")


@dataclasses.dataclass(frozen=True)
class Fault:
  """A fault of a plan.

  Attributes:
    kind: what happens.
    step: it happens after this step.
    at_start: the process is killed first, and the fault happens to the next one while it starts.
    delay: seconds to wait before it.
    choice: from 0 to 1; selects the duration of a stop, or the byte that is flipped.
  """

  kind: str
  step: int
  at_start: bool
  delay: float
  choice: float


def plan(number: int, steps: int, kinds: tuple[str, ...], seed: int) -> list[Fault]:
  """Returns faults in the order of their steps; every kind occurs as often as the others."""
  draw = random.Random(seed)
  order = [kinds[n % len(kinds)] for n in range(number)]
  draw.shuffle(order)
  at = sorted(draw.randrange(steps * 9 // 10) for _ in order)
  faults = []
  for kind, step in zip(order, at, strict=True):
    at_start = draw.random() < 0.25
    delay = draw.uniform(0, _SECONDS_TO_START if at_start else _SECONDS_OF_STEPS)
    faults.append(Fault(kind, step, at_start, delay, draw.random()))
  return faults


class Training(contextlib.AbstractContextManager["Training"]):
  """Processes that train in one folder, one after the other, forked by killable_run.py.

  Attributes:
    model_dir: the folder of the run.
    losses: the exact loss of each step so far; of a step with several losses, all of them.
  """

  def __init__(self, folder: pathlib.Path, model_dir: pathlib.Path, steps: int):
    """Starts killable_run.py; the folder gets its errors and its compilation cache."""
    self.model_dir = model_dir
    self.losses: dict[int, str] = {}
    self._steps = steps
    self._changed = threading.Condition()
    self._pid = self._step = 0
    self._status: int | None = None
    with open(folder / "stderr", "a") as errors:
      self._server = subprocess.Popen(
        [sys.executable, str(pathlib.Path(__file__).with_name("killable_run.py")), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        start_new_session=True,
      )
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def __exit__(self, *exc_info: object) -> None:
    os.killpg(self._server.pid, signal.SIGKILL)
    self._reader.join()
    with self._server:  # closes its pipes and waits
      pass

  def start(self) -> None:
    """Starts a process, which continues from the last checkpoint."""
    self._pid, self._step, self._status = 0, 0, None
    print(self.model_dir, self._steps, PERIOD, 0, file=self._server.stdin, flush=True)
    self.wait(lambda: self._pid)

  def has_ended(self) -> bool:
    """Returns whether the current process has ended."""
    return self._status is not None

  def has_reached(self, step: int) -> bool:
    """Returns whether the current process has completed a step, or has ended."""
    return self._step >= step or self.has_ended()

  def send(self, number: signal.Signals) -> None:
    """Sends a signal, unless the process has ended."""
    with contextlib.suppress(ProcessLookupError):
      os.kill(self._pid, number)

  def end(self) -> int:
    """Waits until the process has ended, and returns its exit status."""
    self.wait(self.has_ended)
    return int(self._status)

  def wait(self, is_done, seconds: float = _TIMEOUT_S) -> None:
    """Waits for a change; raises TimeoutError."""
    with self._changed:
      if not self._changed.wait_for(is_done, seconds):
        raise TimeoutError(f"nothing happened for {seconds} s after step {self._step}")

  def _read(self) -> None:
    for line in self._server.stdout:
      with self._changed:
        match line.split():
          case ["pid", number]:
            self._pid = int(number)
          case ["step", step, loss]:
            self._step = int(step)
            # A step that is repeated after a fault has the same loss.
            if self.losses.setdefault(self._step, loss) != loss:
              self.losses[self._step] = f"{self.losses[self._step]} and {loss}"
          case ["ended", status]:
            self._status = os.waitstatus_to_exitcode(int(status))
        self._changed.notify_all()


def inject(fault: Fault, training: Training) -> str | None:
  """Injects a fault, checks how the process ends, and then starts the next one.

  Returns:
    What happened; None if there was nothing to disturb, because the run had ended.
  """
  if training.has_ended():
    return None
  if fault.at_start or fault.kind == "byte flip":
    training.send(signal.SIGKILL)
    training.end()
    if fault.kind == "byte flip":
      return flip_byte_of_newest(training, fault)
    training.start()
  time.sleep(fault.delay)
  if fault.kind == "stop":
    training.send(signal.SIGSTOP)
    time.sleep(fault.choice)
    training.send(signal.SIGCONT)
    return fault.kind
  if fault.kind == "full disk":
    with full(training.model_dir.parent):
      status, expected = training.end(), (0, 1)
  else:
    number, expected = _SIGNALS[fault.kind]
    training.send(number)
    status = training.end()
  assert status in (0, *expected), f"{fault} ended the process with status {status}"
  training.start()
  return fault.kind


def flip_byte_of_newest(training: Training, fault: Fault) -> str | None:
  """Inverts a bit of the newest checkpoint; the next process finds it, or it must change nothing.

  Returns:
    What happened; None if there is no other checkpoint, and nothing was changed.
  """
  *older, step = all_steps(training.model_dir)
  if not older:
    training.start()
    return None
  folder = training.model_dir / f"checkpoint_{step}"
  files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
  draw = random.Random(fault.choice)
  with draw.choice(files).open("r+b") as file:
    position = draw.randrange(os.fstat(file.fileno()).st_size)
    file.seek(position)
    byte = file.read(1)[0]
    file.seek(position)
    file.write(bytes([byte ^ (1 << draw.randrange(8))]))
  training.start()
  training.wait(lambda: training.has_reached(1))
  damaged = training.model_dir / f"damaged_checkpoint_{step}"
  if not damaged.exists():
    return "byte flip where nothing reads"
  shutil.rmtree(damaged)
  return "byte flip, noticed"


@contextlib.contextmanager
def full(disk: pathlib.Path) -> Iterator[None]:
  """Inside the `with`, there is no space on a disk."""
  fill = disk / "fill"
  try:
    with contextlib.suppress(OSError), fill.open("wb", buffering=0) as file:
      while file.write(bytes(1 << 16)):
        pass
    yield
  finally:
    fill.unlink()


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, size: str) -> Iterator[bool]:
  """Mounts a disk in memory at a new folder; yields whether that is allowed."""
  folder.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
  is_mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
  try:
    yield is_mounted
  finally:
    if is_mounted:
      subprocess.run(["umount", "--lazy", str(folder)], check=True)


def final_state(model_dir: pathlib.Path, step: int) -> dict[str, np.ndarray]:
  """Returns the arrays of a checkpoint by name."""
  folder = model_dir / f"checkpoint_{step}"
  return {name: array.get() for name, array in read_arrays(folder).items()}


def train_undisturbed(folder: pathlib.Path, seconds: float, steps: int) -> Training:
  """Trains for a time or a number of steps, whichever ends first."""
  with Training(folder, folder / "whole", steps) as training:
    training.start()
    with contextlib.suppress(TimeoutError):
      training.wait(lambda: training.has_reached(steps), seconds)
    training.send(signal.SIGTERM)
    assert training.end() in (0, 143)
  return training


def soak(folder: pathlib.Path, number: int, seed: int, seconds: float, steps: int) -> str:
  """Compares a run with `number` faults with an undisturbed one.

  Args:
    folder: an empty folder for everything.
    number: the number of faults.
    seed: determines them.
    seconds: how long the undisturbed run trains at most.
    steps: how many steps it trains at most.

  Returns:
    A table of the faults.

  Raises:
    AssertionError: a fault had another effect than it must have, or the runs differ.
  """
  whole = train_undisturbed(folder, seconds, steps)
  steps = max(whole.losses)
  started = time.monotonic()
  with (
    small_disk(folder / "disk", "64m") as has_disk,
    Training(folder, folder / "disk" / "run", steps) as training,
  ):
    faults = plan(number, steps, (*_WITHOUT_A_DISK, *["full disk"] * has_disk), seed)
    counts: collections.Counter[str] = collections.Counter()
    training.start()
    for fault in faults:
      training.wait(lambda step=fault.step: training.has_reached(step), seconds + _TIMEOUT_S)
      if what := inject(fault, training):
        counts[what] += 1
    assert training.end() == 0
    assert training.losses == whole.losses
    states = final_state(whole.model_dir, steps), final_state(training.model_dir, steps)
    assert states[0].keys() == states[1].keys()
    for name, array in states[0].items():
      np.testing.assert_array_equal(array, states[1][name], err_msg=name, strict=True)
    assert not [*training.model_dir.glob("*tmp*"), *training.model_dir.glob("damaged_*")]
  rows = [f"| {kind} | {count} |" for kind, count in sorted(counts.items())]
  duration = time.monotonic() - started
  return "\n".join(
    [
      f"{steps} steps; the disturbed run took {duration:.0f} s, and ends bit-identical: "
      f"{len(states[0])} arrays and {len(whole.losses)} losses.",
      "",
      "| fault | number |",
      "| --- | --- |",
      *rows,
      f"| all | {counts.total()} |",
    ]
  )


def main() -> None:
  """Runs the soak that the command line describes, and prints its result."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--minutes", type=float, default=20, help="about how long to take")
  parser.add_argument("--faults", type=int, default=200)
  parser.add_argument("--seed", type=int, default=0)
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    result = soak(
      pathlib.Path(folder), options.faults, options.seed, options.minutes * 60 / 3, 10**9
    )
  versions = ", ".join(
    f"{package} {importlib.metadata.version(package)}"
    for package in ("jax", "orbax-checkpoint", "rosetta-t5")
  )
  print(f"Python {platform.python_version()}, {versions}\n\n{result}")


if __name__ == "__main__":
  main()
