"""Errors that users cause: collected, and printed without a traceback."""

from __future__ import annotations

import contextlib
import difflib
import errno
import linecache
import os
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rosetta_t5.terminal.standard_streams import finish_output

DEBUG_VARIABLE = "ROSETTA_T5_DEBUG"
# Gin appends this to every error of a configured function, once for each function on the stack.
_GIN_CALL_NOTE = re.compile(r"\n  In call to configurable '[^']*' \(.*\)(?: in scope '[^']*')?")
_FRAME = re.compile(r'File "(.+?)", line (\d+)')  # of a traceback
# What a read or a write reports about the disk, without the name of the file.
_DISK_ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE)
# Returns a context for the report of an error that ends the program. Processes of one run end together in it.
around_failure: Callable[[Exception], contextlib.AbstractContextManager[Any]]
around_failure = lambda error: contextlib.nullcontext()  # noqa: E731
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class ConfigError(ValueError):
  """The command line or a gin file is wrong. The text names the line to change."""


@contextlib.contextmanager
def refuse_exit(module: str) -> Iterator[None]:
  """Raises ConfigError if the import of a user's module ends the program, perhaps with status 0."""
  try:
    yield
  except SystemExit as end:
    raise ConfigError(
      f"the module {module!r} ended the program when it was imported (sys.exit({end.code!r})): move its "
      "main program into a function that is called if __name__ == '__main__'"
    ) from end


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
  input. Other errors are raised; if nothing catches them, Python shows the line of the user's code
  or, if there is none, the traceback. With --debug or ROSETTA_T5_DEBUG=1 all errors keep their
  traceback. If the reader of the output has ended, as `head` does, the program ends silently with
  the status of SIGPIPE.

  Args:
    *also: classes of errors that are the user's, wherever they were raised.
  """
  try:
    yield
  except BrokenPipeError:
    finish_output()
    sys.exit(128 + signal.SIGPIPE)
  except Exception as raised:
    error = _without_gins_proxy(raised)
    if isinstance(error, KeyError) and re.fullmatch(r"'\w+://'", str(error)):  # raised by epath
      text = f"paths that begin with {error.args[0]} cannot be read: give a local path"
      error = ConfigError(text).with_traceback(error.__traceback__)
    with around_failure(error):
      if not _print_user_error(error, also):
        raise
      sys.exit(2 if isinstance(error, ConfigError) else 1)


def _print_user_error(error: Exception, also: tuple[type[Exception], ...]) -> bool:
  """Prints an error that a user can correct; returns whether it is one, and is not being debugged."""
  is_ours, is_debugged = _is_ours(error), bool(os.environ.get(DEBUG_VARIABLE))
  is_users = is_ours or isinstance(error, also) or _is_about_file(error) or _is_out_of_memory(error)
  if is_debugged or not is_users:
    if not is_debugged:
      sys.excepthook = show_briefly
    return False
  # The text of an error that we raised says everything, unless it reports another one.
  says_all = isinstance(error, ConfigError) or (is_ours and error.__cause__ is None)
  hint = "" if says_all else "\n(--debug shows where this was raised)"
  print(f"\nerror: {printable(_message(error))}{hint}", file=sys.stderr, flush=True)
  finish_output()
  return True


def printable(text: str) -> str:
  """Returns a text whose control characters, which a terminal would execute, are escaped."""
  return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def strip_gin_notes(text: str) -> str:
  """Returns an error's text without the lines that gin adds for each configured function."""
  return _GIN_CALL_NOTE.sub("", text).strip()


def last_line_of_user(error: BaseException) -> tuple[str, int, str] | None:
  """Returns (file, line number, text) of the last line of a traceback that is in the user's code.

  TensorFlow reports the lines of functions that it traces in the text of its errors, so these are
  searched too.
  """
  text = "".join(traceback.format_exception(error))
  lines = [(file, int(number)) for file, number in _FRAME.findall(text) if _is_users(file)]
  if not lines:
    return None
  file, number = lines[-1]
  return file, number, linecache.getline(file, number).strip()


def _is_users(file: str) -> bool:
  """Returns whether a file is neither installed, nor part of this distribution, nor generated."""
  packages = (f"{_ROOT}/rosetta_t5/", f"{_ROOT}/t5x/")
  others = ("<", *sysconfig.get_paths().values(), *packages)
  return not file.startswith(others) and "__autograph_generated_file" not in file


def show_briefly(kind: Any, error: BaseException, trace: Any) -> None:
  """Prints an uncaught error, as `sys.excepthook`, without a traceback if its cause is known.

  The cause may be a line of the user's code, a package that cannot be imported here, or a device that
  JAX cannot use.
  """
  in_full = os.environ.get(DEBUG_VARIABLE) or "--debug" in sys.argv
  if in_full or not isinstance(error, Exception):
    sys.__excepthook__(kind, error, trace)
    return
  found = last_line_of_user(error)
  cause = "" if found else _cause_outside(error)
  if not (found or cause):
    sys.__excepthook__(kind, error, trace)
    return
  message = (_message(error).splitlines() or [""])[-1].strip()
  message = message if message.startswith(kind.__name__) else f"{kind.__name__}: {message}"
  place = f"\n  {found[0]}, line {found[1]}:  {found[2]}" if found else ""
  print(f"\nerror: {cause}{message}{place}\n(--debug prints the whole traceback)", file=sys.stderr)


def _cause_outside(error: Exception) -> str:
  """Returns the beginning of a message on what this machine or its environment variables break, or ""."""
  frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
  names = [frame.f_globals.get("__name__", "") for frame in frames]
  for frame, name in zip(frames, names, strict=True):
    is_ours = name.partition(".")[0] in ("__main__", "rosetta_t5", "t5x")
    if frame.f_code.co_name == "<module>" and not is_ours:
      flag = " (PYTHONOPTIMIZE=2 removes docstrings: unset it)" * (sys.flags.optimize > 1)
      return f"the package {name} cannot be imported{flag}: "
  if names[-1].startswith("jax."):
    import jax

    try:
      jax.devices()
    except (RuntimeError, AssertionError):
      wanted = jax.config.values["jax_platforms"]
      of_platforms = f" of JAX_PLATFORMS={wanted} (unset it to use others)" if wanted else ""
      return f"JAX finds no device{of_platforms}: "
  return ""


def _is_ours(error: Exception) -> bool:
  """Returns whether this package raised the error, for a cause that a user can change.

  These are the errors whose class is defined here, each ValueError that was raised here or by SeqIO,
  which checks users' tasks, and errors in regular expressions, since those in this package are correct.
  """
  *_, (innermost_frame, _) = traceback.walk_tb(error.__traceback__)
  raised_in = innermost_frame.f_globals.get("__name__", "")
  is_ours = isinstance(error, ValueError) and raised_in.startswith(("rosetta_t5.", "seqio."))
  return is_ours or isinstance(error, re.error) or type(error).__module__.startswith("rosetta_t5.")


def _without_gins_proxy(error: Exception) -> Exception:
  """Returns the error itself: gin raises a copy of it, which lacks the file of an OSError."""
  inner = error.__context__
  is_proxy = getattr(type(error).__init__, "__module__", "") == "gin.utils"
  return _without_gins_proxy(inner) if is_proxy and isinstance(inner, Exception) else error


def _is_about_file(error: Exception) -> bool:
  """Returns whether the error is the operating system's, about a file that it names or a disk."""
  return isinstance(error, OSError) and (error.filename is not None or error.errno in _DISK_ERRORS)


def _is_out_of_memory(error: Exception) -> bool:
  """Returns whether the host or a device has too little memory."""
  is_jaxs = type(error).__module__.startswith("jax")
  # gRPC reports other limits as RESOURCE_EXHAUSTED, too.
  is_about_memory = re.search("RESOURCE_EXHAUSTED.*memory", str(error), re.IGNORECASE)
  return isinstance(error, MemoryError) or bool(is_jaxs and is_about_memory)


def _message(error: Exception) -> str:
  if isinstance(error, OSError) and _is_about_file(error):
    return f"{error.filename or 'a file'}: {error.strerror}"
  if _is_out_of_memory(error):
    text = str(error).removeprefix("RESOURCE_EXHAUSTED: ") or "Python could not allocate an object"
    return f"there is not enough memory: {text}"
  if isinstance(error, re.error):
    text = strip_gin_notes(str(error))
    return f"the regular expression {error.pattern!r} is wrong: {text}"
  return strip_gin_notes(str(error)) or type(error).__name__
