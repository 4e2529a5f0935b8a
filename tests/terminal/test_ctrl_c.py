"""Ctrl-C in small programs, each a process of its own, which import nothing that is slow."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A shell's background jobs, of which the tests may be one, ignore Ctrl-C.
BEGIN = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from rosetta_t5.terminal import command, ctrl_c
command.begin("test")
"""
# One call in C, which Python cannot interrupt and which holds no lock: like a compilation.
WAIT_IN_C = """
import hashlib
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 500_000_000)
"""


def press_ctrl_c(program: str, *after: str) -> tuple[int, str]:
  """Runs a program, sends Ctrl-C after each of these lines; returns its exit status and stderr."""
  with subprocess.Popen(
    [sys.executable, "-c", BEGIN + program],
    cwd=ROOT,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  ) as process:
    for expected in after:
      assert process.stdout.readline() == f"{expected}\n"
      process.send_signal(signal.SIGINT)
    errors = process.stderr.read()
  return process.returncode, errors


def test_ctrl_c_ends_a_phase_without_a_loop_at_once_with_one_line():
  status, errors = press_ctrl_c(WAIT_IN_C, "ready")
  assert status == 130
  assert errors.splitlines()[1:] == ["stopped: there was nothing to save"]


def test_a_line_appears_before_anything_slow_is_imported():
  program = "import sys; assert not {'jax', 'numpy', 'tensorflow', 'rich'} & set(sys.modules)"
  assert press_ctrl_c(program) == (0, "test is loading its libraries …\n")


def test_the_first_ctrl_c_is_recorded_even_where_exceptions_are_swallowed_and_the_second_ends():
  program = """
section = ctrl_c.Section("the rest is kept", finishes="this finishes a step")
with ctrl_c.entered(section):
  try:
    print("step", flush=True)
    while not section.is_requested: time.sleep(0.01)
  except BaseException:
    pass
  try:
    ctrl_c.check()
  except SystemExit as end:
    print(end.code, flush=True)
  time.sleep(60)
"""
  status, errors = press_ctrl_c(program, "step", "130")
  assert status == 130
  assert errors.splitlines()[1:] == [
    "Ctrl-C: this finishes a step. Press it again to end at once.",
    "stopped: the rest is kept",
  ]


def test_the_line_is_printed_while_tensorflow_is_imported():
  program = """
from rosetta_t5.data.tensorflow_import import quiet_tensorflow_import
with quiet_tensorflow_import():
  print("ready", flush=True)
  time.sleep(60)
"""
  status, errors = press_ctrl_c(program, "ready")
  assert (status, errors.splitlines()[1:]) == (130, ["stopped: there was nothing to save"])


def test_unfinished_files_are_removed(tmp_path: pathlib.Path):
  (tmp_path / "new.unfinished").mkdir()
  program = f"""
with ctrl_c.entered(ctrl_c.removing({str(tmp_path / "new.unfinished")!r}, "nothing was kept")):
  print("ready", flush=True)
  time.sleep(60)
"""
  status, errors = press_ctrl_c(program, "ready")
  assert (status, errors.splitlines()[1:]) == (130, ["stopped: nothing was kept"])
  assert list(tmp_path.iterdir()) == []


def test_a_background_job_that_ignores_ctrl_c_goes_on():
  program = """
import signal
from rosetta_t5.terminal import command
command.begin("test")
print(signal.getsignal(signal.SIGINT))
"""
  command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", program]
  result = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
  assert result.stdout == "1\n"  # SIG_IGN
