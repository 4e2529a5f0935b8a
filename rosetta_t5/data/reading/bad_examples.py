"""Examples that cannot be used: counted and told, or refused, but never passed over in silence."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
import threading
import weakref
from collections.abc import Iterator
from typing import ClassVar

from absl import logging

POLICIES = ("skip", "refuse")
_TOLD = 10
# A file whose first records are all bad is the wrong file, or is read the wrong way.
_HOPELESS = 1000


# How tf.data tells of a ValueError that a reader raised.
_WRAPPED = re.compile(r"ValueError: (?P<text>(?:Not one of the |\S.*, line \d+: ).*?)\s*(?:\n|$)")


@contextlib.contextmanager
def as_raised() -> Iterator[None]:
  """Raises a reader's ValueError as it was, where tf.data has wrapped it in an error of its own."""
  try:
    yield
  except Exception as error:
    is_wrapped = type(error).__module__.startswith("tensorflow")
    found = _WRAPPED.search(str(error)) if is_wrapped else None
    if found is None:
      raise
    raise ValueError(found["text"]) from None


@dataclasses.dataclass(frozen=True)
class BadExample:
  """A record that cannot be used.

  Attributes:
    file: where it is.
    line: its line, or its row in files without lines; from 1.
    reason: a short phrase.
  """

  file: str
  line: int
  reason: str

  def __str__(self) -> str:
    return f"{self.file}, line {self.line}: {self.reason}"


class BadExamples:
  """Takes bad examples by a policy, from any thread.

  Each is counted and told once, however often its file is read.

  Attributes:
    counts: how many there were, by reason.
  """

  _everywhere: ClassVar[weakref.WeakSet[BadExamples]] = weakref.WeakSet()

  def __init__(self, policy: str = "skip"):
    """Args: policy: "skip" counts and logs them; "refuse" stops at the first."""
    if policy not in POLICIES:
      raise ValueError(f"on_bad_example = {policy!r} is none of {' or '.join(POLICIES)}")
    self.policy = policy
    self.counts: collections.Counter[str] = collections.Counter()
    self.first: BadExample | None = None
    self._last_lines: dict[str, int] = {}  # of each file, whose records come in order
    self._lock = threading.Lock()
    BadExamples._everywhere.add(self)

  @property
  def total(self) -> int:
    """How many there were."""
    return sum(self.counts.values())

  @classmethod
  def left_out_so_far(cls) -> int:
    """Returns how many this process has left out, whatever it was reading for."""
    return sum(examples.total for examples in list(cls._everywhere))

  def add(self, bad: BadExample) -> None:
    """Counts one.

    Raises:
      ValueError: the policy is to refuse.
    """
    if self.policy == "refuse":
      raise ValueError(f'{bad}. Mend it, or set on_bad_example = "skip" to go on without it.')
    with self._lock:
      if bad.line <= self._last_lines.get(bad.file, 0):
        return
      self._last_lines[bad.file] = bad.line
      self.counts[bad.reason] += 1
      self.first = self.first or bad
      total = self.total
    if total <= _TOLD or not total & (total - 1):  # then at powers of two
      logging.warning("Bad example %d is left out: %s", total, bad)

  def check_hope(self, path: str, good: int, bad: int, is_end: bool) -> None:
    """Stops if nothing good has come out of a file.

    Raises:
      ValueError: all of the file, or of its beginning, was bad.
    """
    if good or not bad or not (is_end or bad >= _HOPELESS):
      return
    raise ValueError(
      f"Not one of the {'' if is_end else 'first '}{bad} records of {path} can be used; the first "
      f"is bad for this reason: {self.first}"
    )

  def summary(self) -> str:
    """Returns one line: how many, why, and the first."""
    if not self.first:
      return "no bad examples"
    reasons = ", ".join(f"{count} × {reason}" for reason, count in self.counts.most_common(5))
    return f"{self.total} bad examples left out ({reasons}); the first: {self.first}"
