"""Progress bars on a terminal; in a log file, a line now and then."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from typing import IO, Any, TypeVar

from rosetta_t5.terminal import ctrl_c
from rosetta_t5.terminal.processes import index_and_count

T = TypeVar("T")

LINE_PERIOD_S = 30.0  # between the lines of a long operation in a log file
_REFRESHES_PER_SECOND = 4
_BAR_WIDTH = 16

# All bars that are drawn at one time share one display, because a terminal has one cursor.
_display: Any = None


class Bar:
  """The progress of one operation.

  Attributes:
    is_drawn: whether a terminal shows it.
  """

  def __init__(self, label: str, total: float | None, unit: str, completed: float):
    self.label, self.total, self.unit, self.completed = label, total, unit, completed
    self.text = ""
    self.is_drawn = False
    self._task: Any = None

  def advance(self, count: float = 1) -> None:
    """Adds to what is completed."""
    self.update(self.completed + count)

  def update(
    self, completed: float | None = None, total: float | None = None, text: str | None = None
  ) -> None:
    """Changes what is shown; None leaves it as it is."""
    self.completed = self.completed if completed is None else completed
    self.total = self.total if total is None else total
    self.text = self.text if text is None else text
    if self.is_drawn:
      fields = {"amount": self.amount(), "text": self.text}
      _display.update(self._task, completed=self.completed, total=self.total, **fields)

  def amount(self) -> str:
    """Returns what is completed, such as "12/64 arrays" or "0.50/2.00 GB"; "" before anything is."""
    digits = ".2f" if self.unit == "GB" else ".0f"
    if self.total is None:
      return f"{self.completed:{digits}}{self.unit and ' ' + self.unit}" if self.completed else ""
    return f"{self.completed:{digits}}/{self.total:{digits}}{self.unit and ' ' + self.unit}"

  def line(self) -> str:
    """Returns what is shown as a line of text."""
    return "  ".join(filter(None, [self.label, self.amount(), self.text]))

  def draw(self, stream: IO[str]) -> None:
    """Adds this bar to the display, and starts the display if there is none."""
    global _display
    if _display is None:
      _display = _start_display(stream)
    amount = self.amount()
    self._task = _display.add_task(
      self.label, total=self.total, completed=self.completed, amount=amount, text=""
    )
    self.is_drawn = True

  def erase(self) -> None:
    """Removes this bar from the display, which ends with its last bar."""
    global _display
    self.is_drawn = False
    _display.refresh()
    if len(_display.task_ids) > 1:
      _display.remove_task(self._task)
    else:
      _display.stop()
      _display = None


@contextlib.contextmanager
def bar(
  label: str,
  total: float | None = None,
  unit: str = "",
  completed: float = 0,
  stream: IO[str] | None = None,
  line_period_s: float = LINE_PERIOD_S,
) -> Iterator[Bar]:
  """Shows the progress of an operation while the `with` lasts. Only the first process shows anything.

  Args:
    label: what is done, such as "restoring checkpoint_100".
    total: how much there is to do; None if that is unknown.
    unit: of `total`; amounts in "GB" get decimals.
    completed: how much is done already.
    stream: where to show it; None for standard output.
    line_period_s: seconds between lines where there is no terminal; 0 prints none.
  """
  shown = Bar(label, total, unit, completed)
  stream = stream or sys.stdout
  if index_and_count()[0] > 0:
    yield shown
  elif is_terminal(stream):
    shown.draw(stream)
    try:
      yield shown
    finally:
      shown.erase()
  else:
    ended = threading.Event()
    arguments = (shown, stream, line_period_s, ended)
    threading.Thread(target=_print_lines, args=arguments, name="progress", daemon=True).start()
    try:
      yield shown
    finally:
      ended.set()


def track(
  items: Iterable[T],
  label: str,
  total: float | None = None,
  unit: str = "",
  stream: IO[str] | None = None,
  together: bool = False,
) -> Generator[T, None, None]:
  """Yields the items and shows how many have been used. Ctrl-C can end the operation between two.

  Args:
    label: what is done.
    total: how many items there are; None if that is unknown.
    unit: of `total`.
    stream: where to show it; None for standard output.
    together: whether all processes of the run have the same number of items.

  Raises:
    Interrupted: Ctrl-C was pressed, and the command finishes something because of it.
  """
  with bar(label, total, unit, stream=stream) as shown:
    for item in items:
      ctrl_c.check(together)
      yield item
      shown.advance()


def print_line(text: str, stream: IO[str] | None = None) -> None:
  """Prints a line on the first process, above the bars if there are any, and flushes it."""
  if index_and_count()[0] > 0:
    return
  if _display is not None:
    _display.console.print(text, markup=False, soft_wrap=True)
  else:
    # One write: print() writes the end of the line by itself, and another thread may come between.
    print(f"{text}\n", end="", file=stream or sys.stdout, flush=True)


def is_terminal(stream: Any) -> bool:
  """Returns whether bars can be drawn on a stream."""
  # Open MPI gives each of its processes a terminal, even if their output goes to a log file.
  if os.environ.get("TERM") == "dumb" or "OMPI_COMM_WORLD_RANK" in os.environ:
    return False
  return bool(stream.isatty())


def _start_display(stream: IO[str]) -> Any:
  from rich import console, progress

  display = progress.Progress(
    progress.TextColumn("{task.description} {task.fields[amount]}", markup=False),
    progress.BarColumn(bar_width=_BAR_WIDTH),
    progress.TextColumn("{task.fields[text]}", markup=False),
    progress.TimeElapsedColumn(),
    console=console.Console(file=stream, force_terminal=True, highlight=False),
    refresh_per_second=_REFRESHES_PER_SECOND,
    redirect_stdout=stream is sys.stdout,
    redirect_stderr=is_terminal(sys.stderr),
  )
  display.start()
  return display


def _print_lines(shown: Bar, stream: IO[str], period_s: float, ended: threading.Event) -> None:
  started = time.monotonic()
  while period_s and not ended.wait(period_s):
    print_line(f"{shown.line()}  after {time.monotonic() - started:.0f} s", stream)
