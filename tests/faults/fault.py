"""Faults: what is broken, the command that meets it, and what the command must then do.

A row of a table is a `Fault`. Its commands are a bash script that runs in a folder with the tiny run of
`tiny.gin`: `rows.jsonl`, `tiny.gin`, and `run/`, trained for four steps with `$TRAIN` (checkpoints 2 and
4, with the data's position). The variables of `SCRIPT` shorten the usual commands. To add a row, write

    Fault(
      "one byte of an array is flipped",
      "flip run/checkpoint_4/target.encoder…/0.0 && $TRAIN --gin.TRAIN_STEPS=6",
      expected=r"checkpoint_4 is damaged: .*encoder",
      status=0,
    )

and run it with `pytest tests/faults -k "one byte" -m ""`. Beyond the row's own expectation, no fault may
end in a traceback or a time-out, and every checkpoint that the row itself did not touch must still be in
its place, byte for byte.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import re
import subprocess
from collections.abc import Callable, Iterable
from typing import Any

import pytest

SCRIPT = """
TRAIN="python -m t5x.train --gin_file=tiny.gin"
EVAL="rosetta-t5 eval --model_dir run"
INFER="rosetta-t5 infer --model_dir run"
flip() {  # FILE [OFFSET]: inverts one byte, by default the one in the middle
  local size=$(stat -c %s "$1"); local offset=${2:-$((size / 2))}
  local byte=$(od -An -tu1 -j "$offset" -N1 "$1")
  printf "\\\\x$(printf %02x $((255 - byte)))" | dd of="$1" bs=1 seek="$offset" conv=notrunc status=none
}
truncate_to_half() { truncate -s $(($(stat -c %s "$1") / 2)) "$1"; }
zeros() { local size=$(stat -c %s "$1"); head -c "$size" /dev/zero > "$1"; }
largest() { find "$1" -type f -printf '%s %p\\n' | sort -n | tail -1 | cut -d' ' -f2-; }
set -u
"""
TIMEOUT = 90  # seconds


@dataclasses.dataclass(frozen=True)
class Fault:
  """A row: `commands` must exit with `status` and print what `expected` (a regular expression) finds."""

  what: str
  commands: str
  expected: str
  status: int = 1
  unexpected: str = "Traceback \\(most recent call last\\)"
  keeps: bool = True  # whether the row's commands leave checkpoints that they do not touch alone


def fault_table(faults: Iterable[Fault]) -> Callable[..., Any]:
  """Returns a decorator that runs a test with each row as its argument `fault`."""
  return pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, id=fault.what, marks=pytest.mark.slow) for fault in faults],
  )


def check(fault: Fault, folder: pathlib.Path, environment: dict[str, str]) -> None:
  """Runs a row's commands in a folder that contains the tiny run.

  Raises:
    AssertionError: the exit status or output differ from the row's, there is a traceback, or a
      checkpoint is lost.
  """
  before = _checkpoints(folder)
  with (
    (folder / "output.txt").open("w+") as file,
    subprocess.Popen(
      ["bash", "-c", SCRIPT + fault.commands],
      cwd=folder,
      env=environment,
      stdin=subprocess.DEVNULL,
      stdout=file,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    ) as bash,
  ):
    try:
      status: int | str = bash.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
      subprocess.run(["pkill", "-KILL", "-s", str(bash.pid)], check=False)
      status = f"none within {TIMEOUT} s"
    file.seek(0)
    output = file.read()
  report = f"{fault.what}\n$ {fault.commands}\n{output}\nexit status {status}"
  assert status == fault.status, report
  assert re.search(fault.expected, output, re.DOTALL), report
  assert not re.search(fault.unexpected, output), report
  if fault.keeps:
    after = _checkpoints(folder)
    changed = [n for n in before if n not in fault.commands and after.get(n) != before[n]]
    assert not changed, f"{report}\nlost or changed: {changed}, left: {sorted(after)}"


def _checkpoints(folder: pathlib.Path) -> dict[str, str]:
  """Returns a digest of the contents of every checkpoint in run/, by the checkpoint's name."""
  digests = {}
  for checkpoint in folder.glob("run/checkpoint_*"):
    digest = hashlib.sha256()
    for path in sorted(checkpoint.rglob("*")):
      digest.update(str(path.relative_to(checkpoint)).encode())
      digest.update(path.read_bytes() if path.is_file() else b"")
    digests[checkpoint.name] = digest.hexdigest()
  return digests
