"""Progress bars on terminals and lines in log files."""

from __future__ import annotations

import io
import re
import time

import pytest

from rosetta_t5.terminal import progress


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
  with progress.bar("restoring", 2.0, "GB", stream=terminal) as bar:
    bar.advance(0.5)
    bar.update(text="from disk")
  assert re.search(r"restoring 0\.50/2\.00 GB .*━.* from disk", terminal.getvalue())


def test_bars_inside_a_bar_are_drawn_below_it_and_lines_above(terminal):
  with progress.bar("step", 10, stream=terminal) as outer:
    with progress.bar("evaluating", 3, "batches", stream=terminal) as inner:
      inner.advance()
      progress.print_line("[bold] is printed as it is")
    outer.advance()
  text = terminal.getvalue()
  assert "evaluating 1/3 batches" in text
  assert "[bold] is printed as it is\n" in text
  assert text.index("step 0/10") < text.index("evaluating") < text.rindex("step 1/10")
  assert text.endswith("\x1b[?25h")  # The cursor is shown again.


def test_no_color_is_respected(terminal, monkeypatch):
  monkeypatch.setenv("NO_COLOR", "1")
  with progress.bar("restoring", 2, stream=terminal) as bar:
    bar.advance()
  assert not re.search(r"\x1b\[[0-9;]*3[0-9]", terminal.getvalue())


def test_a_log_file_gets_a_line_now_and_then():
  stream = io.StringIO()
  with progress.bar("compiling", stream=stream, line_period_s=0.05):
    time.sleep(0.3)
  lines = stream.getvalue().splitlines()
  assert 2 <= len(lines) <= 6
  assert set(lines) == {"compiling  after 0 s"}


def test_a_short_operation_leaves_no_line_in_a_log_file():
  stream = io.StringIO()
  assert list(progress.track([1, 2], "reading", stream=stream)) == [1, 2]
  assert stream.getvalue() == ""
