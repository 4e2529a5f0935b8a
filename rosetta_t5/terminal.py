"""The terminal of a command: its first line, progress bars, lines above them, and the types of its options."""

import argparse
import atexit
import contextlib
import functools
import gc
import io
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from typing import IO, Any, TypeVar

T = TypeVar("T")

LINE_PERIOD_S = 30.0  # between the lines of a long operation in a log file
_log = logging.getLogger(__name__)


class _LossyFile(io.FileIO):
  """A standard stream that discards what cannot be written, because its reader or its disk is gone."""

  def write(self, data: Any) -> int:
    try:
      return super().write(data)
    except OSError:
      return memoryview(data).nbytes


def begin(name: str) -> None:
  """Prints a line, because the imports that follow take seconds. Ctrl-C ends the process at once.

  Args:
    name: the command, such as "rosetta-t5 train".
  """
  for stream in ("stdout", "stderr"):
    opened = getattr(sys, stream) or open(os.devnull, "w")  # noqa: SIM115
    opened.reconfigure(errors="backslashreplace", line_buffering=True)
    setattr(sys, stream, opened)
  sys.stderr = _lossy(sys.stderr, sys.__stderr__)
  # Python's own handler would wait for the end of a compilation. A background job ignores Ctrl-C.
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
  logging.basicConfig(format="note     %(message)s", level=logging.WARNING)
  # Imports create a million objects that stay; at the default threshold, a third of their time is
  # spent on looking for garbage among these.
  gc.set_threshold(50_000, 20, 100)
  atexit.register(gc.freeze)  # Python would look for garbage once more before it exits.
  # With many processes, the first one prints a line for all when they have met.
  silent = ("--multiprocess_gpu", "-h", "--help")
  if not any(argument.startswith(silent) for argument in sys.argv[1:]):
    print(f"{name} is loading its libraries …", file=sys.stderr)


def tolerate_lost_output() -> None:
  """From now on, lost output (terminal, pipe or log file) does not end this process."""
  if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
  sys.stdout = _lossy(sys.stdout, sys.__stdout__)


def _lossy(stream: Any, own: Any) -> Any:
  """Returns a stream for the same descriptor, unless something else has replaced Python's own stream."""
  if stream is not own:
    return stream
  with contextlib.suppress(OSError):
    stream.flush()
  raw = io.BufferedWriter(_LossyFile(stream.fileno(), "w", closefd=False))
  return io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True)


def finish_output() -> None:
  """Flushes standard output or, if that fails, discards what is left: Python would retry at its exit."""
  try:
    sys.stdout.flush()
  except OSError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def optional_output(what: str, errors: type[Exception] = OSError) -> Iterator[None]:
  """Inside the `with`, an error is logged: a run does not end because `what` cannot be written."""
  try:
    yield
  except errors as error:
    _log.warning("%s cannot be written: %s", what, error)


class Bar:
  """The progress of one operation.

  Attributes:
    is_drawn: whether a terminal shows the bar.
  """

  def __init__(self, display: Any, label: str, total: float | None, unit: str, completed: float):
    self._display, self._unit, self.is_drawn = display, unit, not display.disable
    display.add_task(label, total=total, text="", amount="")
    self._task = display.tasks[-1]
    self.update(completed)

  def advance(self, count: float = 1) -> None:
    """Adds to what is completed."""
    self.update(self._task.completed + count)

  def update(self, completed: float | None = None, **changes: Any) -> None:
    """Changes what is shown: `completed`, `total` or `text`. None leaves it as it is."""
    self._display.update(self._task.id, completed=completed, **changes)
    # What is completed, such as "12/64 arrays" or "0.50/2.00 GB"; "" before anything is.
    digits = ".2f" if self._unit == "GB" else ".0f"
    total = "" if self._task.total is None else f"/{self._task.total:{digits}}"
    amount = f"{self._task.completed:{digits}}{total} {self._unit}".rstrip()
    self._display.update(self._task.id, amount=amount * bool(self._task.completed or total))

  def line(self) -> str:
    """Returns what is shown as a line of text."""
    fields = self._task.fields
    return "  ".join(filter(None, [self._task.description, fields["amount"], fields["text"]]))


@contextlib.contextmanager
def progress_bar(
  label: str,
  total: float | None = None,
  unit: str = "",
  completed: float = 0,
  stream: IO[str] | None = None,
  line_period_s: float = LINE_PERIOD_S,
) -> Iterator[Bar]:
  """Shows the progress of an operation on the first process: a bar on a terminal, else lines.

  Args:
    label: what is done, such as "restoring checkpoint_100".
    total: how much there is to do; None if that is unknown.
    unit: of `total`; amounts in "GB" get decimals.
    completed: how much is done already.
    stream: where to show it; None for standard output.
    line_period_s: seconds between lines where there is no terminal; 0 prints none.
  """
  from rich import progress

  console = _console_of(stream or sys.stdout)
  display = progress.Progress(
    progress.TextColumn("{task.description} {task.fields[amount]}", markup=False),
    progress.BarColumn(bar_width=16),
    progress.TextColumn("{task.fields[text]}", markup=False),
    progress.TimeElapsedColumn(),
    progress.TimeRemainingColumn(),
    console=console,
    refresh_per_second=4,
    transient=True,
    redirect_stdout=sys.stdout.isatty(),
    redirect_stderr=sys.stderr.isatty(),
    disable=not (console.is_interactive and _is_first_process()),
  )
  bar, ended = Bar(display, label, total, unit, completed), threading.Event()
  with display:
    if bar.is_drawn:
      console.show_cursor()  # A process that Ctrl-C ends at once would leave it hidden.
    elif line_period_s:
      arguments = (bar, stream, line_period_s, ended)
      threading.Thread(target=_print_lines, args=arguments, daemon=True).start()
    try:
      yield bar
    finally:
      ended.set()


def track(
  items: Iterable[T], label: str, *arguments: Any, **options: Any
) -> Generator[T, None, None]:
  """Yields the items, and shows how many have been used; the other arguments are those of `progress_bar`."""
  with progress_bar(label, *arguments, **options) as bar:
    for item in items:
      yield item
      bar.advance()


def print_line(text: str, stream: IO[str] | None = None) -> None:
  """Prints a line on the first process, above the bars if there are any, in one write."""
  if _is_first_process():
    _console_of(stream or sys.stdout).out(text, highlight=False)


def format_duration(seconds: float) -> str:
  """Formats a duration in its two largest units: 45s, 1m20s, 2h05m, 3d04h."""
  minutes, seconds = divmod(round(max(0.0, seconds)), 60)
  hours, minutes = divmod(minutes, 60)
  days, hours = divmod(hours, 24)
  if days:
    return f"{days}d{hours:02}h"
  if hours:
    return f"{hours}h{minutes:02}m"
  return f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"


def format_seconds(seconds: float) -> str:
  """Formats a measured or estimated time with three digits: 1.53 s, 20.4 ms, 0.015 ms."""
  if seconds >= 1:
    return f"{format_number(seconds, 3)} s"
  return f"{format_number(round(1000 * seconds, 4), 3)} ms"


def format_number(number: float, digits: int = 4) -> str:
  """Formats a number with at least this many digits, and thousands with commas: 0.1234, 5.6, 12,345."""
  return f"{number:,.0f}" if abs(number) >= 10 ** (digits - 1) else f"{number:.{digits}g}"


def size_text(number: float) -> str:
  """Returns a number of bytes as text, such as 310 MB or 11.4 GB."""
  for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
    if number >= size:
      return f"{format_number(number / size, 3)} {unit}"
  return f"{format_number(number / 1e3, 3)} kB"


def _print_lines(bar: Bar, stream: IO[str] | None, period_s: float, ended: threading.Event) -> None:
  started = time.monotonic()
  while not ended.wait(period_s):
    print_line(f"{bar.line()}  after {time.monotonic() - started:.0f} s", stream)


def _console_of(stream: Any) -> Any:
  """Returns the only console of a stream; while bars are drawn, rich replaces the stream."""
  return _make_console(getattr(stream, "rich_proxied_file", stream))


@functools.lru_cache(maxsize=2)
def _make_console(stream: Any) -> Any:
  from rich.console import Console

  # Open MPI gives each of its processes a terminal, even if their output goes to a log file.
  is_terminal = False if "OMPI_COMM_WORLD_RANK" in os.environ else None
  return Console(file=stream, force_terminal=is_terminal)


def _is_first_process() -> bool:
  """Returns whether this is process 0 of its run; the processes of a run may not have met yet."""
  jax = sys.modules.get("jax")
  return jax is None or not jax.distributed.is_initialized() or jax.process_index() == 0


def option_names(parser: argparse.ArgumentParser) -> Collection[str]:
  """Returns the options of a parser, such as --help; argparse has no public name for them."""
  return parser._option_string_actions


def _number_type(
  convert: Callable[[str], T], holds: Callable[[T], bool], expected: str
) -> Callable[[str], T]:
  """Returns a type of options of argparse: a number that satisfies a condition."""

  def parse(text: str) -> T:
    with contextlib.suppress(ValueError):
      if holds(number := convert(text)):
        return number
    raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r}")

  return parse


positive_integer = _number_type(int, lambda number: number > 0, "a positive integer")
positive_number = _number_type(float, lambda x: 0 < x < math.inf, "a number greater than 0")
percentage = _number_type(float, lambda number: 0 <= number <= 100, "a number from 0 to 100")


def machine_path(text: str) -> str:
  """Returns a path on this machine.

  Raises:
    ArgumentTypeError: the path is in remote storage.
  """
  if "://" in text:
    raise argparse.ArgumentTypeError(f"must be a path on this machine, got {text!r}")
  return text


def output_file(path: str) -> str:
  """Returns the path of a file that can be written; checked at the start, so that no result is lost.

  Raises:
    ArgumentTypeError: there is something else at the path, or no folder for it.
  """
  exists, folder = os.path.exists(path), os.path.dirname(path) or "."
  if not os.path.isdir(folder) or (exists and not os.path.isfile(path)):
    raise argparse.ArgumentTypeError(f"{path} must be a file in a folder that exists")
  return path


def feature_lengths(text: str) -> dict[str, int]:
  """Returns the lengths of features, such as {"inputs": 512, "targets": 128}.

  Raises:
    ArgumentTypeError: the text is not like inputs=512,targets=128.
  """
  lengths = {}
  for part in text.split(","):
    name, _, length = part.partition("=")
    if not name or not length.isdecimal() or int(length) < 1:
      raise argparse.ArgumentTypeError(f"must be like inputs=512,targets=128, got {text!r}")
    lengths[name] = int(length)
  return lengths
