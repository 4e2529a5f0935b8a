"""Reads files in blocks of a fixed number of consecutive records.

tf.data can save and restore a position only if the data is a function of a number. For that reason
`BlockReader.read(path, n)` always returns the same block. Reading blocks in order is fast, because the
file remains open after each block. To find any other block, the file is read from its start.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rosetta_t5.data.reading.bad_examples import BadExample, BadExamples
from rosetta_t5.data.reading.file_formats import DEFAULT_LAYOUT, Layout
from rosetta_t5.data.reading.records import Located, read_records

RECORDS_PER_BLOCK = 256
_MAX_OPEN_FILES = 64

Fields = Mapping[str, str]
# Converts a record to an example's texts, or returns the reason why that is impossible.
Convert = Callable[[Mapping[str, Any]], "Fields | str"]


def is_in_validation(fields: Fields, validation_percent: float) -> bool:
  """Returns whether an example is in the validation split, by the hash of its texts.

  Args:
    fields: the example's texts; equal examples are in the same split.
    validation_percent: percentage of the examples that are in the validation split.
  """
  if validation_percent <= 0:
    return False
  digest = hashlib.blake2b("\x1f".join(fields.values()).encode(), digest_size=8).digest()
  return int.from_bytes(digest, "big") / 2**64 < validation_percent / 100


class BlockReader:
  """Reads blocks of examples; thread-safe."""

  def __init__(
    self,
    convert: Convert,
    layout: Layout = DEFAULT_LAYOUT,
    is_kept: Callable[[Fields], bool] | None = None,
    bad_examples: BadExamples | None = None,
    read: Callable[[str, Layout], Iterator[Located]] = read_records,
  ):
    """Builds a reader.

    Args:
      convert: converts a record to an example's texts, or returns the reason why it cannot.
      layout: how the files' bytes become records.
      is_kept: whether to return an example; None returns all.
      bad_examples: counts or refuses the bad examples; None counts them.
      read: reads the records of a file.
    """
    self._convert = convert
    self._layout = layout
    self._is_kept = is_kept or (lambda fields: True)
    self._read = read
    self.bad_examples = bad_examples or BadExamples()
    # Open files by their path and the number of their next block, the least recently used first.
    self._open: collections.OrderedDict[tuple[str, int], _OpenFile] = collections.OrderedDict()
    self._lock = threading.Lock()

  def read(self, path: str, block: int) -> tuple[list[Fields], bool]:
    """Returns the examples of a block, and whether another block follows.

    Raises:
      ValueError: a bad example is refused, or all of the file's examples are bad.
    """
    with self._lock:
      file = self._open.pop((path, block), None)
    if file is None:
      records = self._read(path, self._layout)
      records = itertools.islice(records, block * RECORDS_PER_BLOCK, None)
      # A good example in earlier blocks is assumed, because those were checked when they were read.
      file = _OpenFile(path, records, good=block)
    examples, is_end = self._next_block(file)
    if not is_end:
      with self._lock:
        self._open[path, block + 1] = file
        if len(self._open) > _MAX_OPEN_FILES:
          self._open.popitem(last=False)
    return examples, not is_end

  def examples(self, path: str) -> Iterator[Fields]:
    """Yields all examples of a file."""
    for block in itertools.count():
      examples, has_more = self.read(path, block)
      yield from examples
      if not has_more:
        return

  def line_of(self, path: str, number: int) -> int:
    """Returns the line, from 1, of example `number`, from 0, among those that `examples` yields."""
    converted = self._converted(path, self._read(path, self._layout))
    lines = (
      line
      for line, fields in converted
      if not isinstance(fields, BadExample) and self._is_kept(fields)
    )
    return next(itertools.islice(lines, number, None))

  def _converted(
    self, path: str, records: Iterable[Located]
  ) -> Iterator[tuple[int, Fields | BadExample]]:
    """Yields the line of each record, and its texts or the reason why it cannot be used."""
    for line, record in records:
      fields = record if isinstance(record, BadExample) else self._convert(record)
      yield line, BadExample(path, line, fields) if isinstance(fields, str) else fields

  def _next_block(self, file: _OpenFile) -> tuple[list[Fields], bool]:
    examples: list[Fields] = []
    records = list(itertools.islice(file.records, RECORDS_PER_BLOCK))
    for _, fields in self._converted(file.path, records):
      if isinstance(fields, BadExample):
        self.bad_examples.add(fields)
        file.bad += 1
        continue
      file.good += 1
      if self._is_kept(fields):
        examples.append(fields)
    is_end = len(records) < RECORDS_PER_BLOCK
    self.bad_examples.raise_if_all_bad(file.path, file.good, file.bad, is_end)
    return examples, is_end


@dataclasses.dataclass
class _OpenFile:
  """An open file: its remaining records, and the numbers of good and bad examples so far."""

  path: str
  records: Iterator[Located]
  good: int
  bad: int = 0
