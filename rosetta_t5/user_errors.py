"""Errors that users cause: collected, and printed without a traceback."""

import contextlib
import difflib
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rosetta_t5.terminal import finish_output

# Where the modules of this distribution are: code in other modules is the user's, or a library's.
OWN_PACKAGES = ("rosetta_t5.", "t5x.")
DEBUG_VARIABLE = "ROSETTA_T5_DEBUG"
# Gin appends this to every error of a configured function, once for each function on the stack.
_GIN_CALL_NOTE = re.compile(r"\n  In call to configurable '[^']*' \(.*\)(?: in scope '[^']*')?")
# Returns a context for the report of an error that ends the program. Processes of one run end together in it.
around_failure: Callable[[Exception], contextlib.AbstractContextManager[Any]]
around_failure = lambda error: contextlib.nullcontext()  # noqa: E731


class ConfigError(ValueError):
  """The command line or a gin file is wrong. The text names the line to change."""


class FollowOnError(ConfigError):
  """Probably the consequence of an error that is reported already, such as a failed import."""


class Problems:
  """The errors of a configuration, collected so that all of them are printed at once.

  Attributes:
    messages: one text for each problem, in the order in which they were found.
  """

  def __init__(self) -> None:
    self.messages: list[str] = []

  @contextlib.contextmanager
  def collect(self, *more: object) -> Iterator[None]:
    """Collects a ConfigError that the body raises.

    Args:
      *more: lines to add to the message, such as the location of the error.
    """
    try:
      yield
    except ConfigError as error:
      if not (self.messages and isinstance(error, FollowOnError)):
        self._add(with_lines(str(error), more))

  def _add(self, text: str) -> None:
    """Adds a message. If the same problem occurs at several lines, one message lists them all."""
    head, *rest = text.split("\n")
    for n, message in enumerate(self.messages):
      lines = message.split("\n")
      # A head such as "2 values are missing:" counts the lines below it, so no line can be added.
      if lines[0] == head and not head.endswith(":"):
        self.messages[n] = "\n".join([*lines, *(line for line in rest if line not in lines)])
        return
    self.messages.append(text)

  def raise_if_any(self) -> None:
    """Raises ConfigError with every problem, if there are any."""
    if self.messages:
      raise ConfigError(str(self))

  def __str__(self) -> str:
    """The only problem, or all of them numbered."""
    if len(self.messages) == 1:
      return self.messages[0]
    numbered = (f"{n}. {text}".replace("\n", "\n   ") for n, text in enumerate(self.messages, 1))
    return "\n".join([f"{len(self.messages)} problems\n", *numbered])


def with_lines(text: str, lines: Iterable[object]) -> str:
  """Returns a message followed by lines, such as locations, that it does not contain yet."""
  new = dict.fromkeys(str(line) for line in lines if str(line) not in text)
  return "\n".join([text, *(f"  {line}" for line in new)])


def reason_of(error: BaseException) -> str:
  """Returns an error's first line, with its class unless it is an error for users."""
  kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
  return kind + strip_gin_notes(str(error)).partition("\n")[0]


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
  """Returns " Did you mean A or B?" for the known names most similar to `name`, or ""."""
  found = difflib.get_close_matches(name, sorted(set(known)), n=3, cutoff=cutoff)
  return f" Did you mean {' or '.join(found)}?" if found else ""


@contextlib.contextmanager
def exit_on_user_error(*also: type[Exception]) -> Iterator[None]:
  """Prints user errors of the body without a traceback, and ends the program.

  The exit status is 2 if the command line or a gin file is wrong, and 1 if the run refused its
  input. Other errors are raised. With --debug or ROSETTA_T5_DEBUG=1 all errors keep their traceback. If the
  reader of the output has ended, as `head` does, the program ends silently with the status of SIGPIPE.

  Args:
    *also: classes of errors that are the user's, wherever they were raised.
  """
  try:
    yield
  except BrokenPipeError:
    finish_output()
    sys.exit(128 + signal.SIGPIPE)
  except Exception as raised:
    error = _inside_gins_copy(raised)
    if isinstance(error, KeyError) and re.fullmatch(r"'\w+://'", str(error)):  # raised by epath
      error = ConfigError(
        f"paths that begin with {error.args[0]} cannot be read: give a local path"
      )
    with around_failure(error):
      is_ours = _is_ours(error)
      is_users = is_ours or isinstance(error, (OSError, MemoryError, *also))
      if os.environ.get(DEBUG_VARIABLE) or not (is_users or "RESOURCE_EXHAUSTED" in str(error)):
        raise
      # The text of an error that we raised says everything, unless it reports another one.
      is_complete = isinstance(error, ConfigError) or (is_ours and error.__cause__ is None)
      hint = "" if is_complete else "\n(--debug shows where this was raised)"
      print(f"\nerror: {printable(_message(error))}{hint}", file=sys.stderr, flush=True)
      finish_output()
      sys.exit(2 if isinstance(error, ConfigError) else 1)


def printable(text: str) -> str:
  """Returns a text whose control characters, which a terminal would execute, are escaped."""
  return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def strip_gin_notes(text: str) -> str:
  """Returns an error's text without the lines that gin adds for each configured function."""
  return _GIN_CALL_NOTE.sub("", text).strip()


def _inside_gins_copy(error: Exception) -> Exception:
  """Returns the error of which gin has raised a copy, which lacks the file of an OSError, or the error itself."""
  inner = error.__context__
  is_copy = getattr(type(error).__init__, "__module__", "") == "gin.utils"
  return _inside_gins_copy(inner) if is_copy and isinstance(inner, Exception) else error


def _is_ours(error: Exception) -> bool:
  """Returns whether this package, or SeqIO, which checks users' tasks, raised the error for a user."""
  if type(error).__module__.startswith(OWN_PACKAGES):
    return True
  *_, (innermost_frame, _) = traceback.walk_tb(error.__traceback__)
  raised_in = innermost_frame.f_globals.get("__name__", "")
  return isinstance(error, ValueError) and raised_in.startswith((*OWN_PACKAGES, "seqio."))


def _message(error: Exception) -> str:
  text = strip_gin_notes(str(error)) or type(error).__name__
  if isinstance(error, OSError) and error.strerror:
    pairs = zip(sys.argv, [*sys.argv[1:], ""], strict=True)
    option = next((f"{a} " for a, b in pairs if a[:2] == "--" and b == error.filename), "")
    return f"{option}{error.filename}: {error.strerror}" if error.filename else error.strerror
  if isinstance(error, MemoryError) or text.startswith("RESOURCE_EXHAUSTED"):
    # TensorStore has one code for memory and disks.
    lacking = "space on the disk" if "No space left" in text else "memory"
    return f"there is not enough {lacking}: {text.removeprefix('RESOURCE_EXHAUSTED: ')}"
  if text.startswith("Failed to evaluate task") and (cause := error.__cause__):  # SeqIO's text
    last = traceback.extract_tb(cause.__traceback__)[-1]
    text += f"\n  {type(cause).__name__} in {last.filename}, line {last.lineno}:  {last.line}"
  return text
