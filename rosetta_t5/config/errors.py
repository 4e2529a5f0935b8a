"""What the user wrote and cannot run, as text; and programs that end with that text."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from types import TracebackType

DEBUG_VARIABLE = "ROSETTA_T5_DEBUG"
# Gin appends this to whatever a configured function raises, once for every function on the way.
_GIN_CALL_NOTE = re.compile(r"\n  In call to configurable '[^']*' \(.*\)(?: in scope '[^']*')?")


class ConfigError(ValueError):
  """A command line or gin file that cannot run: what was given, where, and the line to change."""


class FollowOnError(ConfigError):
  """What is wrong only because something else is, which has been told: a name of a failed import."""


class Problems:
  """What is wrong with a configuration, collected so that all of it can be told at once.

  Attributes:
    texts: one text a problem, in the order in which they were found.
  """

  def __init__(self) -> None:
    self.texts: list[str] = []

  @contextlib.contextmanager
  def noted(self, *more: object) -> Iterator[None]:
    """Notes a ConfigError of the body, with lines of its own (where it comes from), and goes on."""
    try:
      yield
    except ConfigError as error:
      if not (self.texts and isinstance(error, FollowOnError)):
        self._tell("\n".join([str(error), *(f"  {line}" for line in more)]))

  def _tell(self, text: str) -> None:
    """Adds a text; where the same is wrong in several places, it is told once with all of them."""
    head, *rest = text.split("\n")
    for n, told in enumerate(self.texts):
      lines = told.split("\n")
      # A head that ends in a colon counts what follows.
      if lines[0] == head and not head.endswith(":"):
        self.texts[n] = "\n".join([*lines, *(line for line in rest if line not in lines)])
        return
    self.texts.append(text)

  def refuse(self) -> None:
    """Raises ConfigError with every problem, if there are any."""
    if len(self.texts) == 1:
      raise ConfigError(self.texts[0])
    if self.texts:
      raise ConfigError(f"{len(self.texts)} problems\n\n{self}")

  def __str__(self) -> str:
    """The problems, numbered."""
    numbered = (f"{n}. {text}".replace("\n", "\n   ") for n, text in enumerate(self.texts, 1))
    return "\n".join(numbered)


def near(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
  """Returns " Did you mean A or B?" for the known names most like `name`, or nothing."""
  found = difflib.get_close_matches(name, sorted(set(known)), n=3, cutoff=cutoff)
  return f" Did you mean {' or '.join(found)}?" if found else ""


@contextlib.contextmanager
def errors_as_text() -> Iterator[None]:
  """Ends the program with an error's text alone when it is the user's to mend.

  Exit status 2 says that the command line or a gin file is wrong, 1 that the run refused what it
  was given. Errors that none of our own lines raised keep their traceback, and all of them do if
  --debug is given or ROSETTA_T5_DEBUG=1 is set.
  """
  try:
    yield
  except Exception as error:
    if os.environ.get(DEBUG_VARIABLE) or not _is_for_the_user(error):
      raise
    print(
      f"\nerror: {gin_notes_cut(str(error))}\n(--debug shows where this was raised)",
      file=sys.stderr,
      flush=True,
    )
    sys.exit(2 if isinstance(error, ConfigError) else 1)


def gin_notes_cut(text: str) -> str:
  """Returns an error's text without what gin appends on its way through configured functions."""
  return _GIN_CALL_NOTE.sub("", text).strip()


def _is_for_the_user(error: Exception) -> bool:
  """Whether it is an error class of ours, or a ValueError of a line of ours: both are for users."""
  if type(error).__module__.startswith("rosetta_t5."):
    return True
  return isinstance(error, ValueError) and _raised_in(error.__traceback__).startswith("rosetta_t5.")


def _raised_in(traceback: TracebackType | None) -> str:
  """The name of the module whose line raised."""
  module = ""
  while traceback is not None:
    module = traceback.tb_frame.f_globals.get("__name__", "")
    traceback = traceback.tb_next
  return module
