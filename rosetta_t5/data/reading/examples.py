"""Converts records to examples, in blocks of a fixed number of consecutive records, and counts bad ones.

tf.data can save and restore a position only if the data is a function of a number. For that reason
`BlockReader.read(path, n)` always returns the same block. Reading blocks in order is fast, because the
file remains open after each block. To find any other block, the file is read from its start.
"""

import collections
import dataclasses
import hashlib
import itertools
import re
import string
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from absl import logging

from rosetta_t5.argument_types import check_one_of, near_hint
from rosetta_t5.data.reading.files import DEFAULT_OPTIONS, ReadOptions
from rosetta_t5.data.reading.records import Located, read_records

RECORDS_PER_BLOCK = 256
POLICIES = ("skip", "refuse")
_MAX_OPEN_FILES = 64
_LOGGED_REASONS = 10  # For each of the first reasons, the first bad example is logged.
# Characters that show text of another encoding than UTF-8. Escapes in JSON can yield them, too.
_SURROGATE = re.compile("[\ud800-\udfff]")

Fields = Mapping[str, str]
# Converts a record to an example's texts, or returns the reason why that is impossible.
Convert = Callable[[Mapping[str, Any]], "Fields | str"]


class BadExamples:
  """Counts and logs bad examples, or refuses them; thread-safe.

  Each example is counted once, no matter how often its file is read. The first of each reason is logged.

  Attributes:
    counts: number of bad examples by reason.
    first: where the first one is, and why it is bad; or None.
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
    self.first: str | None = None
    self._policy = policy
    # The line of each file's last bad example. A file's records always come in order.
    self._last_lines: dict[str, int] = {}

  def add(self, path: str, line: int, reason: str) -> None:
    """Counts a bad example: its file, its line (or its row in files without lines), and why it is bad.

    Raises:
      ValueError: the policy is to refuse bad examples.
    """
    text = f"{path}, line {line}: {reason}"
    if self._policy == "refuse":
      raise ValueError(f'{text}. Correct it, or set on_bad_example = "skip" to leave it out.')
    with self._lock:
      if line <= self._last_lines.get(path, 0):
        return
      self._last_lines[path] = line
      self.counts[reason] += 1
      self.first = self.first or text
      BadExamples.total_in_process += 1
      total = self.counts.total()
      is_new = self.counts[reason] == 1 and len(self.counts) <= _LOGGED_REASONS
    if is_new:
      logging.warning("Bad example %d is left out: %s", total, text)


@dataclasses.dataclass(eq=False)
class BlockReader:
  """Reads blocks of examples; thread-safe.

  Attributes:
    convert: converts a record to an example's texts, or returns the reason why it cannot.
    options: how the files' bytes become records.
    is_kept: whether to return an example.
    bad_examples: counts or refuses the bad examples.
    read_records: reads the records of a file.
  """

  convert: Convert
  options: ReadOptions = DEFAULT_OPTIONS
  is_kept: Callable[[Fields], bool] = lambda fields: True
  bad_examples: BadExamples = dataclasses.field(default_factory=BadExamples)
  read_records: Callable[[str, ReadOptions], Iterator[Located]] = read_records
  # The remaining records of open files by path and number of the next block; the first is the oldest.
  _open: dict[tuple[str, int], Iterator[Located]] = dataclasses.field(default_factory=dict)
  _lock: Any = dataclasses.field(default_factory=threading.Lock)

  def read(self, path: str, block: int) -> tuple[list[Fields], bool]:
    """Returns the examples of a block, and whether another block follows.

    Raises:
      ValueError: a bad example is refused, or all examples of the file's first block are bad, because it
        is the wrong file or read in the wrong way.
    """
    with self._lock:
      records = self._open.pop((path, block), None)
    if records is None:
      records = self.read_records(path, self.options)
      records = itertools.islice(records, block * RECORDS_PER_BLOCK, None)
    found = list(itertools.islice(records, RECORDS_PER_BLOCK))
    examples = [(n, x if isinstance(x, str) else self.convert(x)) for n, x in found]
    bad = [(line, reason) for line, reason in examples if isinstance(reason, str)]
    good = [fields for _, fields in examples if not isinstance(fields, str)]
    has_more = len(found) == RECORDS_PER_BLOCK
    if block == 0 and found and not good:
      line, reason = bad[0]
      raise ValueError(
        f"None of the {'first ' if has_more else ''}{len(found)} records of {path} can be used. The first "
        f"bad one: {path}, line {line}: {reason}"
      )
    for line, reason in bad:
      self.bad_examples.add(path, line, reason)
    if has_more:
      with self._lock:
        self._open[path, block + 1] = records
        if len(self._open) > _MAX_OPEN_FILES:
          del self._open[next(iter(self._open))]
    return list(filter(self.is_kept, good)), has_more

  def examples(self, path: str) -> Iterator[Fields]:
    """Yields all examples of a file."""
    for block in itertools.count():
      examples, has_more = self.read(path, block)
      yield from examples
      if not has_more:
        return


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


def make_converter(templates: Mapping[str, str]) -> Convert:
  """Returns a function that converts a record to {feature: text}, or returns why it cannot.

  Args:
    templates: for each feature the name of a column, or a text with columns in braces such as
      "{a} and {b}". A literal brace is doubled. `a.b` is the entry b of the objects in a column a.

  Raises:
    ValueError: the braces of a template do not match, or it contains no column.
  """
  parsed = {feature: _parse(feature, template) for feature, template in templates.items()}

  def convert(record: Mapping[str, Any]) -> Fields | str:
    fields = {}
    for feature, parts in parsed.items():
      names = " and ".join(column for _, column in parts if column is not None)
      try:
        values = ["" if column is None else _text_of(record, column) for _, column in parts]
      except KeyError as error:
        hint = near_hint(str(error.args[0]), map(str, record))
        return f"no column {error}{hint} among {', '.join(map(repr, record))}"[:200]
      except TypeError as error:
        return f"{names} {error}"
      if not any(value and not value.isspace() for value in values):
        return f"{names} is empty"
      text = "".join(before + value for (before, _), value in zip(parts, values, strict=True))
      if "\0" in text or (not text.isascii() and _SURROGATE.search(text)):
        return f"{names} contains a NUL character or is not text in UTF-8"
      fields[feature] = text
    return fields

  return convert


def _parse(feature: str, template: str) -> list[tuple[str, str | None]]:
  """Returns pairs of literal text and the column that follows it, or None at the end."""
  if "{" not in template and "}" not in template:
    return [("", template)]
  problem = "braces contain only the name of a column, such as {text}"
  try:
    parsed = list(string.Formatter().parse(template))
  except ValueError as error:
    parsed, problem = [], str(error)
  has_format = any(specification or conversion for _, _, specification, conversion in parsed)
  if has_format or not any(column for _, column, _, _ in parsed):
    raise ValueError(f'{feature} = "{template}" is not a valid template: {problem}')
  return [(text, column) for text, column, _, _ in parsed]


def _text_of(record: Mapping[str, Any], column: str) -> str:
  """Returns the text in a column; `a.b` is the entry b of the objects in column a, if that is no column."""
  outer, _, inner = column.partition(".")
  entries: Any = record.get(outer)
  is_entry = column not in record and isinstance(entries, Mapping) and inner in entries
  return _as_text(entries[inner] if is_entry else record[column])


def _as_text(value: Any) -> str:
  if isinstance(value, Mapping):
    raise TypeError(f"is an object, not text (COLUMN.ENTRY names an entry): {value}"[:120])
  if isinstance(value, (list, tuple)):
    return " ".join(map(_as_text, value))
  if isinstance(value, bytes):  # Parquet files of some programs have texts of this type
    return value.decode(errors="surrogateescape")
  is_missing = value is None or value != value  # pandas stores a missing value as NaN
  return "" if is_missing else str(value)
