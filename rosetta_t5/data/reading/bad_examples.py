"""Examples that cannot be used. They are counted and logged, or refused, but never dropped silently."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
import threading
from collections.abc import Iterator
from typing import ClassVar

from absl import logging

from rosetta_t5.argument_types import check_one_of

POLICIES = ("skip", "refuse")
_LOGGED_REASONS = 10  # For each of the first reasons, the first bad example is logged.
# If all of the first records are bad, it is the wrong file, or it is read in the wrong way.
_MAX_BAD_START = 1000

# Finds the text of a reader's ValueError in the error that tf.data raises instead.
_WRAPPED = re.compile(r"ValueError: (?P<text>(?:None of the |\S.*, line \d+: ).*?)\s*(?:\n|$)")


@contextlib.contextmanager
def unwrap_reader_errors() -> Iterator[None]:
  """Raises a reader's ValueError again if tf.data has converted it to an error of TensorFlow."""
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
    file: the file that contains it.
    line: its line, or its row in files without lines; the first is 1.
    reason: a short phrase.
  """

  file: str
  line: int
  reason: str

  def __str__(self) -> str:
    return f"{self.file}, line {self.line}: {self.reason}"


class BadExamples:
  """Counts and logs bad examples, or refuses them; thread-safe.

  Each example is counted once, no matter how often its file is read. One of each reason is logged,
  and then those whose number is a power of two, once there are many.

  Attributes:
    counts: number of bad examples by reason.
    first: the first one, or None.
    total_in_process: number of bad examples that this process has skipped, in all its readers.
  """

  total_in_process: ClassVar[int] = 0
  _lock: ClassVar[threading.Lock] = threading.Lock()

  def __init__(self, policy: str = "skip"):
    """Starts counting.

    Args:
      policy: "skip" counts and logs bad examples; "refuse" raises an error for the first.

    Raises:
      ValueError: the policy is unknown.
    """
    check_one_of("on_bad_example", policy, POLICIES)
    self.counts: collections.Counter[str] = collections.Counter()
    self.first: BadExample | None = None
    self._policy = policy
    # The line of each file's last bad example. A file's records always come in order.
    self._last_lines: dict[str, int] = {}

  def add(self, bad: BadExample) -> None:
    """Counts a bad example.

    Raises:
      ValueError: the policy is to refuse bad examples.
    """
    if self._policy == "refuse":
      raise ValueError(f'{bad}. Correct it, or set on_bad_example = "skip" to leave it out.')
    with self._lock:
      if bad.line <= self._last_lines.get(bad.file, 0):
        return
      self._last_lines[bad.file] = bad.line
      self.counts[bad.reason] += 1
      self.first = self.first or bad
      BadExamples.total_in_process += 1
      total = self.counts.total()
      is_new = self.counts[bad.reason] == 1 and len(self.counts) <= _LOGGED_REASONS
    if is_new or (total > _MAX_BAD_START and total.bit_count() == 1):
      logging.warning("Bad example %d is left out: %s", total, bad)

  def raise_if_all_bad(self, path: str, good: int, bad: int, is_end: bool) -> None:
    """Checks the numbers of good and bad examples that a file has had so far.

    Raises:
      ValueError: there is no good example in the whole file or in its first thousand records.
    """
    if good or not bad or not (is_end or bad >= _MAX_BAD_START):
      return
    raise ValueError(
      f"None of the {'' if is_end else 'first '}{bad} records of {path} can be used. The first bad "
      f"one: {self.first}"
    )

  def summary(self) -> str:
    """Returns one line with the number of bad examples, the reasons, and the first example."""
    if not self.first:
      return "no bad examples"
    reasons = ", ".join(f"{count} × {reason}" for reason, count in self.counts.most_common(5))
    return f"{self.counts.total()} bad examples left out ({reasons}); the first: {self.first}"
