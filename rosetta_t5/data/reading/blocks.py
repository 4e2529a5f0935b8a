"""Files read in blocks: each block is a fixed number of consecutive records.

tf.data can save and restore a position only in functions of a number, so `BlockReader.read(path, n)`
is one: it returns the same block whenever it is called. Reading blocks in order is fast, because the
file stays open after each block; any other block is found by reading the file up to it.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rosetta_t5.data.reading.bad_examples import BadExample, BadExamples
from rosetta_t5.data.reading.file_formats import Layout
from rosetta_t5.data.reading.records import Located, read_records

RECORDS_PER_BLOCK = 256
_MAX_OPEN_FILES = 64

Fields = Mapping[str, str]
# From a record to the texts of an example, or to the reason why the record has none.
Convert = Callable[[Mapping[str, Any]], "Fields | str"]


@dataclasses.dataclass(frozen=True)
class HashSplit:
  """One part of the examples, which are split into training and validation by a hash.

  Attributes:
    validation_percent: percentage of the examples in the validation part.
    validation: whether this is the validation part.
  """

  validation_percent: float
  validation: bool

  def contains(self, fields: Fields) -> bool:
    """Returns whether an example is in this part; equal examples are in the same part."""
    if self.validation_percent <= 0:
      return not self.validation
    digest = hashlib.blake2b("\x1f".join(fields.values()).encode(), digest_size=8).digest()
    fraction = int.from_bytes(digest, "big") / 2**64
    return (fraction < self.validation_percent / 100) == self.validation


class BlockReader:
  """Reads blocks of examples; thread-safe."""

  def __init__(
    self,
    convert: Convert,
    layout: Layout | None = None,
    split: HashSplit | None = None,
    bad_examples: BadExamples | None = None,
    read: Callable[[str, Layout], Iterator[Located]] = read_records,
  ):
    """Builds a reader.

    Args:
      convert: makes examples of records.
      layout: how the files' bytes become records.
      split: which examples to keep; None keeps all.
      bad_examples: receives the bad examples.
      read: reads the records of a file.
    """
    self._convert = convert
    self._layout = layout or Layout()
    self._split = split
    self._read = read
    self.bad_examples = bad_examples or BadExamples()
    # Open files by path and the number of the next block, the least recently used first.
    self._open: collections.OrderedDict[tuple[str, int], _OpenFile] = collections.OrderedDict()
    self._lock = threading.Lock()

  def read(self, path: str, block: int) -> tuple[list[Fields], bool]:
    """Returns the examples of a block, and whether another block follows.

    Raises:
      ValueError: there is a bad example and they are refused, or the file has only bad ones.
    """
    with self._lock:
      file = self._open.pop((path, block), None)
    if file is None:
      records = self._read(path, self._layout)
      # Earlier records count as good, because they were checked when they were read.
      file = _OpenFile(path, itertools.islice(records, block * RECORDS_PER_BLOCK, None), block)
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

  def _next_block(self, file: _OpenFile) -> tuple[list[Fields], bool]:
    examples: list[Fields] = []
    records = list(itertools.islice(file.records, RECORDS_PER_BLOCK))
    for line, record in records:
      fields = record if isinstance(record, BadExample) else self._convert(record)
      if isinstance(fields, str):
        fields = BadExample(file.path, line, fields)
      if isinstance(fields, BadExample):
        self.bad_examples.add(fields)
        file.bad += 1
        continue
      file.good += 1
      if self._split is None or self._split.contains(fields):
        examples.append(fields)
    is_end = len(records) < RECORDS_PER_BLOCK
    self.bad_examples.raise_if_all_bad(file.path, file.good, file.bad, is_end)
    return examples, is_end


@dataclasses.dataclass
class _OpenFile:
  path: str
  records: Iterator[Located]
  good: int
  bad: int = 0
