"""Files in numbered blocks of records: any block again at any time, the next one at once.

tf.data can save and restore a position only in what is a function of a number. `read(path, n)` is:
the same block whenever it is asked for. A block in order costs only itself, for the file stays open
where the last one ended; any other is reached by reading the file up to it.
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

RECORDS_A_BLOCK = 256
_OPEN_FILES = 64

Fields = Mapping[str, str]
# From a record to the texts of an example, or why it has none.
Convert = Callable[[Mapping[str, Any]], "Fields | str"]


@dataclasses.dataclass(frozen=True)
class HashSplit:
  """Which part of the records belongs to a split that is made by hash.

  Attributes:
    validation_percent: of the records, by the hash of their texts.
    validation: whether this is the validation part.
  """

  validation_percent: float
  validation: bool

  def takes(self, fields: Fields) -> bool:
    """Whether an example is of this part; equal examples always are of the same one."""
    if self.validation_percent <= 0:
      return not self.validation
    digest = hashlib.blake2b("\x1f".join(fields.values()).encode(), digest_size=8).digest()
    share = int.from_bytes(digest, "big") / 2**64
    return (share < self.validation_percent / 100) == self.validation


class BlockReader:
  """Reads blocks of examples; several threads may do so at once."""

  def __init__(
    self,
    convert: Convert,
    layout: Layout | None = None,
    split: HashSplit | None = None,
    bad_examples: BadExamples | None = None,
    read: Callable[[str, Layout], Iterator[Located]] = read_records,
  ):
    """Args are as in `file_task`; `read` takes the place of `read_records` for files of one's own."""
    self._convert = convert
    self._layout = layout or Layout()
    self._split = split
    self._read = read
    self.bad_examples = bad_examples or BadExamples()
    # Files open between two blocks, by path and the number of the block that comes next.
    self._waiting: collections.OrderedDict[tuple[str, int], _OpenFile] = collections.OrderedDict()
    self._lock = threading.Lock()

  def read(self, path: str, block: int) -> tuple[list[Fields], bool]:
    """Returns the examples of a block, none if all were left out, and whether another follows.

    Raises:
      ValueError: a bad example, if they are to be refused; or nothing in the file can be used.
    """
    with self._lock:
      file = self._waiting.pop((path, block), None)
    if file is None:
      file = _OpenFile(path, self._read(path, self._layout))
      for _ in itertools.islice(file.records, block * RECORDS_A_BLOCK):
        pass
      file.good = block  # what lies before was judged when it was read
    examples, is_end = self._next(file)
    if not is_end:
      with self._lock:
        self._waiting[path, block + 1] = file
        if len(self._waiting) > _OPEN_FILES:
          self._waiting.popitem(last=False)
    return examples, not is_end

  def examples(self, path: str) -> Iterator[Fields]:
    """Yields all examples of a file."""
    for block in itertools.count():
      examples, more = self.read(path, block)
      yield from examples
      if not more:
        return

  def _next(self, file: _OpenFile) -> tuple[list[Fields], bool]:
    examples, seen = [], 0
    for place, record in itertools.islice(file.records, RECORDS_A_BLOCK):
      seen += 1
      fields = record if isinstance(record, BadExample) else self._convert(record)
      if isinstance(fields, str):
        fields = BadExample(file.path, place, fields)
      if isinstance(fields, BadExample):
        self.bad_examples.add(fields)
        file.bad += 1
      else:
        file.good += 1
        if self._split is None or self._split.takes(fields):
          examples.append(fields)
    is_end = seen < RECORDS_A_BLOCK
    self.bad_examples.check_hope(file.path, file.good, file.bad, is_end)
    return examples, is_end


@dataclasses.dataclass
class _OpenFile:
  path: str
  records: Iterator[Located]
  good: int = 0
  bad: int = 0
