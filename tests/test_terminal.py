"""The first line of a command, Ctrl-C, output that is closed, and progress bars."""

from __future__ import annotations

import io
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from rosetta_t5 import terminal as terminal_lib
from rosetta_t5.checkpoints import all_steps

ROOT = pathlib.Path(__file__).resolve().parents[1]
# A shell's background jobs, of which the tests may be one, ignore Ctrl-C.
BEGIN = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from rosetta_t5 import terminal
terminal.begin("test")
"""
# One call in C, which Python's own handler cannot interrupt: like a compilation.
WAIT_IN_C = """
import hashlib
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 500_000_000)
"""
_BAR = re.compile(r"step (\d+)/100000 .*?━.*?loss [\d.]+ nats/token")


def start(program: str, **options: int) -> subprocess.Popen[str]:
  command = [sys.executable, "-c", program]
  return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, **options)


def test_ctrl_c_ends_a_command_at_once_also_while_it_compiles():
  with start(BEGIN + WAIT_IN_C) as process:
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
  assert process.returncode == -signal.SIGINT


def test_a_background_job_that_ignores_ctrl_c_continues():
  program = """
import signal
from rosetta_t5 import terminal
terminal.begin("test")
print(signal.getsignal(signal.SIGINT))
"""
  command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", program]
  result = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
  assert result.stdout == "1\n"  # SIG_IGN


def test_a_line_appears_before_anything_slow_is_imported():
  program = "assert not {'jax', 'numpy', 'tensorflow', 'rich'} & set(sys.modules)"
  with start(BEGIN + program, stderr=subprocess.PIPE) as process:
    assert process.stderr.read() == "test is loading its libraries …\n"
  assert process.returncode == 0


def test_a_run_continues_after_its_output_and_its_terminal_were_closed():
  program = """
terminal.tolerate_lost_output()
sys.stdin.read()
signal.raise_signal(signal.SIGHUP)
for _ in range(3):
  terminal.print_line("a line")
  print("a note", file=sys.stderr)
"""
  with start(BEGIN + program, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
    process.stdout.close()
    process.stderr.close()
    process.stdin.close()
  assert process.returncode == 0


class Terminal(io.StringIO):
  """A stream that claims to be a terminal."""

  def isatty(self) -> bool:
    return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setenv("COLUMNS", "100")
  return Terminal()


def test_a_terminal_shows_what_is_done_of_how_much_with_its_unit(terminal):
  with terminal_lib.progress_bar("restoring", 2.0, "GB", stream=terminal) as bar:
    bar.advance(0.5)
    bar.update(text="from disk")
  assert re.search(r"restoring 0\.50/2\.00 GB .*━.* from disk", terminal.getvalue())


def test_bars_inside_a_bar_are_drawn_below_it_and_lines_above(terminal):
  with terminal_lib.progress_bar("step", 10, stream=terminal) as outer:
    with terminal_lib.progress_bar("evaluating", 3, "batches", stream=terminal) as inner:
      inner.advance()
      time.sleep(0.5)
      terminal_lib.print_line("[bold] is printed as it is", terminal)
    outer.advance()
  text = terminal.getvalue()
  assert "evaluating 1/3 batches" in text
  assert "[bold] is printed as it is\n" in text
  assert text.index("step 0/10") < text.index("evaluating") < text.rindex("step 1/10")


def test_no_color_is_respected(terminal, monkeypatch):
  monkeypatch.setenv("NO_COLOR", "1")
  with terminal_lib.progress_bar("restoring", 2, stream=terminal) as bar:
    bar.advance()
  assert not re.search(r"\x1b\[[0-9;]*3[0-9]", terminal.getvalue())


def test_a_log_file_gets_a_line_now_and_then():
  stream = io.StringIO()
  with terminal_lib.progress_bar("compiling", stream=stream, line_period_s=0.05):
    time.sleep(0.3)
  lines = stream.getvalue().splitlines()
  assert 2 <= len(lines) <= 6
  assert set(lines) == {"compiling  after 0 s"}


def test_a_short_operation_leaves_no_line_in_a_log_file():
  stream = io.StringIO()
  assert list(terminal_lib.track([1, 2], "reading", stream=stream)) == [1, 2]
  assert stream.getvalue() == ""


@pytest.mark.slow
def test_a_run_shows_a_line_at_once_and_moves_its_bar_and_ctrl_c_saves_its_last_step(tmp_path):
  command = [
    *(sys.executable, "-m", "t5x.train", f"--gin_file={ROOT / 'tests/resume/resume.gin'}"),
    *(f"--gin.MODEL_DIR='{tmp_path}'", "--gin.TRAIN_STEPS=100000"),
    *(
      "--gin.train_script.train.stats_period=100000",
      "--gin.utils.SaveCheckpointConfig.period=100000",
    ),
  ]
  environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/resume'}", "TERM": "xterm", "COLUMNS": "120"}
  started = time.monotonic()
  terminal, inner = pty.openpty()
  run = subprocess.Popen(
    ["setsid", "--ctty", "--wait", *command],  # pty.fork warns where jax has threads
    stdin=inner,
    stdout=inner,
    stderr=inner,
    env={**os.environ, **environment, "JAX_PLATFORMS": "cpu"},
  )
  os.close(inner)
  text, first_line, is_pressed = "", 0.0, False
  try:
    while part := os.read(terminal, 100_000):
      text += part.decode(errors="replace")
      first_line = first_line or time.monotonic() - started
      if not is_pressed and len(set(_BAR.findall(text))) > 2:
        os.write(terminal, b"\x03")
        is_pressed = True
  except OSError:  # The process has ended.
    pass
  assert run.wait() == 130, text
  assert first_line < 3  # 0.1 s on a quiet machine
  assert "Traceback" not in text
  last = all_steps(tmp_path)[-1]
  assert f"interrupted  after step {last}: run the same command to continue" in text
