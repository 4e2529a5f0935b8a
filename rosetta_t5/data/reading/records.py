"""Reads the records of files. Each is a dictionary of columns, or a `BadExample` with a reason."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO

from rosetta_t5.data.reading.bad_examples import BadExample
from rosetta_t5.data.reading.file_formats import DEFAULT_LAYOUT, Layout, format_of, open_bytes
from rosetta_t5.data.reading.tables import Row, UnclearQuotesError, table_rows

Record = Mapping[str, Any]
# The number of a line (or row), and the record that begins there.
Located = tuple[int, Record | BadExample]

# The largest size of a line or document in bytes. A larger one is not an example, but shows that the
# file is of another kind. It could fill the memory.
LONGEST = 64 << 20
# A line of so many times this size is not skipped: the file is not read further.
_MAX_PARTS = 16
# Exceptions of Python's readers if a file is truncated or damaged. pyarrow has its own.
_DAMAGE = (OSError, EOFError, ValueError, RecursionError, lzma.LZMAError, zlib.error, csv.Error)
_SEPARATORS = re.compile(r"[\s,]*")  # between the elements of a JSON array
_PART = 1 << 20  # characters of an array that are read at a time


class _BadRecordError(Exception):
  """The record cannot be used; the text is the reason."""


def read_records(path: str, layout: Layout = DEFAULT_LAYOUT) -> Iterator[Located]:
  """Yields the records of a file in order, with a `BadExample` in place of each that cannot be used.

  Records of text files have the single column "text". A truncated or damaged file yields the records
  before the damage and then one bad example.

  Raises:
    ValueError: the file's format is unknown, or the meaning of quotes in a tsv file.
  """
  read_units, parse = _FORMATS[format_of(path, layout)]
  line = 0
  record: Record | BadExample | None
  try:
    for line, unit in read_units(path, layout):
      try:
        record = parse(unit)
      except _BadRecordError as error:
        record = BadExample(path, line, str(error))
      if record is not None:
        yield line, record
  except UnclearQuotesError:
    raise
  except Exception as error:
    if not isinstance(error, _DAMAGE) and not type(error).__module__.startswith("pyarrow"):
      raise
    if isinstance(error, OSError) and error.strerror:
      reason = f"the file cannot be read: {error.strerror}"
    else:
      text = [*str(error).strip().splitlines(), type(error).__name__][0]
      reason = f"the file is damaged here: {text[:200]}"
    yield line + 1, BadExample(path, line + 1, reason)


def _text_units(path: str, layout: Layout) -> Iterator[tuple[int, bytes]]:
  with open_bytes(path) as file:
    if layout.text_unit == "file":
      yield 1, file.read(LONGEST + 1)
    elif layout.text_unit == "paragraph":
      yield from _paragraphs(file)
    else:
      yield from enumerate(_lines(file), 1)


def _json_units(path: str, layout: Layout) -> Iterator[tuple[int, Any]]:
  """Yields the lines of a file as bytes, or the elements of the one array that it holds."""
  with open_bytes(path) as file:
    is_array = file.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
  if is_array:
    with io.TextIOWrapper(open_bytes(path), "utf-8-sig") as text:
      yield from _array_elements(text)
    return
  with open_bytes(path) as file:
    yield from ((number, line) for number, line in enumerate(_lines(file), 1) if line.strip())


def _array_elements(file: io.TextIOBase) -> Iterator[tuple[int, Any]]:
  """Yields the elements of a JSON array, which is not read as a whole, and the lines where they begin."""
  decoder = json.JSONDecoder()
  text = file.read(_PART)
  position, line = text.index("[") + 1, 1 + text.count("\n", 0, text.index("["))
  while True:
    start, position = position, _SEPARATORS.match(text, position).end()  # type: ignore[union-attr]
    line += text.count("\n", start, position)
    if text.startswith("]", position):
      break
    try:
      element, end = decoder.raw_decode(text, position)
    except ValueError:
      more = file.read(max(_PART, len(text)))
      if not more or len(text) - position > LONGEST:
        raise
      text, position = text[position:] + more, 0
      continue
    yield line, element
    line += text.count("\n", position, end)
    position = end
  if (text[position + 1 :] + file.read(_PART)).strip():
    raise ValueError("there is more after the end of the array")


def _lines(file: BinaryIO) -> Iterator[bytes]:
  """Yields the lines of a file. Of a line that is too long, it yields just enough to show that.

  Raises:
    ValueError: the line is endless, as in an archive made to fill the memory or the time.
  """
  while line := file.readline(LONGEST + 1):
    yield line
    parts = 1
    while len(line) > LONGEST and not line.endswith(b"\n"):
      line = file.readline(LONGEST + 1)
      parts += 1
      if parts > _MAX_PARTS:
        raise ValueError(f"a line has more than {_MAX_PARTS * LONGEST >> 20} MB")


def _paragraphs(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
  numbered_lines = enumerate(_lines(file), 1)
  for is_empty, lines in itertools.groupby(numbered_lines, lambda item: not item[1].strip()):
    if is_empty:
      continue
    start, paragraph = 0, bytearray()
    for number, line in lines:
      start = start or number
      if len(paragraph) <= LONGEST:  # A longer one will be refused, so its rest is not needed.
        paragraph += line
    yield start, bytes(paragraph)


def _parse_text(unit: bytes) -> Record | None:
  """Returns None for an empty line, because it only separates examples."""
  text = _decode(unit)
  return {"text": text.strip("\r\n")} if text.strip() else None


def _parse_json(unit: Any) -> Record:
  record = _loads(unit) if isinstance(unit, bytes) else unit
  if not isinstance(record, dict):
    raise _BadRecordError(f"a JSON {type(record).__name__}, not an object with columns")
  return record


def _loads(line: bytes) -> Any:
  try:
    return json.loads(_decode(line))
  except (ValueError, RecursionError) as error:
    if line.strip() == b"{":
      reason = (
        "an object over several lines; expected one in each line, or one array of all objects"
      )
      raise _BadRecordError(reason) from error
    truncated = "" if line.endswith(b"\n") else " (the file's last line has no line break)"
    raise _BadRecordError(f"invalid JSON: {str(error)[:80]}{truncated}") from error


def _decode(unit: bytes) -> str:
  if len(unit) > LONGEST:
    raise _BadRecordError(f"more than {LONGEST >> 20} MB in one example")
  try:
    text = unit.removeprefix(codecs.BOM_UTF8).decode("utf-8")
  except UnicodeDecodeError as error:
    reason = f"invalid UTF-8 at byte {error.start} ({error.reason})"
    raise _BadRecordError(reason) from error
  if "\0" in text:
    raise _BadRecordError("a NUL byte")
  return text


def _table_rows(path: str, layout: Layout) -> Iterator[tuple[int, Row]]:
  is_tsv = format_of(path, layout) == "tsv"
  file = open_bytes(path)
  with io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="") as text:
    yield from table_rows(text, path, layout.columns, is_tsv, layout.quoted, LONGEST)


def _parse_row(unit: Row) -> Record:
  if isinstance(unit, str):
    raise _BadRecordError(unit)
  columns, row = unit
  if len(row) != len(columns):
    raise _BadRecordError(f"{len(row)} columns instead of {len(columns)}")
  text = "".join(row)
  if "\0" in text:
    raise _BadRecordError("a NUL byte")
  if any("\udc80" <= character <= "\udcff" for character in text):
    raise _BadRecordError("invalid UTF-8")
  return dict(zip(columns, row, strict=True))


def _parquet_rows(path: str, layout: Layout) -> Iterator[tuple[int, Record]]:
  from pyarrow import parquet

  with parquet.ParquetFile(path) as file:
    yield from _batch_rows(file.iter_batches(batch_size=64))


def _arrow_rows(path: str, layout: Layout) -> Iterator[tuple[int, Record]]:
  """Reads Arrow's stream format, in which Hugging Face stores datasets, or its file format."""
  import pyarrow

  with pyarrow.memory_map(path) as file:
    is_file_format = file.read(6) == b"ARROW1"
    file.seek(0)
    if is_file_format:
      reader = pyarrow.ipc.open_file(file)
      batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
      batches = pyarrow.ipc.open_stream(file)
    yield from _batch_rows(batches)


def _batch_rows(batches: Iterable[Any]) -> Iterator[tuple[int, Record]]:
  def records() -> Iterator[Record]:
    for batch in batches:
      batch.validate(full=True)  # To read a damaged offset would end the process.
      yield from batch.to_pylist()

  return enumerate(records(), 1)


# For each format, a function that reads the units of a file, and one that parses a unit.
_FORMATS: dict[str, tuple[Callable[..., Iterator[tuple[int, Any]]], Callable[..., Any]]] = {
  "text": (_text_units, _parse_text),
  "jsonl": (_json_units, _parse_json),
  "csv": (_table_rows, _parse_row),
  "tsv": (_table_rows, _parse_row),
  "parquet": (_parquet_rows, dict),
  "arrow": (_arrow_rows, dict),
}
