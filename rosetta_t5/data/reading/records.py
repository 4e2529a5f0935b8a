"""Records out of files: one dictionary of columns each, or what is wrong with it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

from rosetta_t5.data.reading.bad_examples import BadExample
from rosetta_t5.data.reading.file_formats import Layout, format_of, open_bytes

Record = Mapping[str, Any]
# The place (a line's number, or a row's) and the record.
Located = tuple[int, Record | BadExample]

# A longer line or document is no example but another kind of file, and would fill the memory.
LONGEST = 64 << 20  # bytes
_TOO_LONG = f"more than {LONGEST >> 20} MB in one example"
_BROKEN_FILE = (OSError, EOFError, ValueError)  # pyarrow's and lzma's errors are of these kinds


def read_records(path: str, layout: Layout | None = None) -> Iterator[Located]:
  """Yields the records of a file in order, bad ones as `BadExample`.

  Text has the one column "text". A file that is cut off or damaged gives what comes before, then
  one bad example.

  Raises:
    ValueError: the file's format is not known.
  """
  layout = layout or Layout()
  read = _READERS[format_of(path, layout)]
  place = 0
  try:
    for place, record in read(path, layout):
      yield place, record
  except _BROKEN_FILE as error:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    yield place + 1, BadExample(path, place + 1, f"the file breaks off here: {reason[0][:200]}")
  except Exception as error:
    module = type(error).__module__.split(".")[0]
    if module not in ("lzma", "_lzma", "zlib", "pyarrow", "csv", "_csv"):
      raise
    yield place + 1, BadExample(path, place + 1, f"the file breaks off here: {error}"[:300])


def _lines(file: BinaryIO) -> Iterator[bytes]:
  """Yields lines; of one that is too long its beginning, which is too long as well."""
  while line := file.readline(LONGEST + 1):
    yield line
    while len(line) > LONGEST and not line.endswith(b"\n"):
      line = file.readline(LONGEST + 1)


def _decoded(path: str, place: int, line: bytes) -> str | BadExample:
  if len(line) > LONGEST:
    return BadExample(path, place, _TOO_LONG)
  try:
    text = line.decode("utf-8")
  except UnicodeDecodeError as error:
    return BadExample(path, place, f"no UTF-8 at byte {error.start} ({error.reason})")
  return BadExample(path, place, "a NUL byte") if "\0" in text else text


def _text(path: str, layout: Layout) -> Iterator[Located]:
  with open_bytes(path) as file:
    if layout.text_unit == "file":
      units: Iterator[tuple[int, bytes]] = iter([(1, file.read(LONGEST + 1))])
    elif layout.text_unit == "paragraph":
      units = _paragraphs(file)
    else:
      units = enumerate(_lines(file), start=1)
    for place, raw in units:
      text = _decoded(path, place, raw)
      if isinstance(text, BadExample):
        yield place, text
      elif text.strip():  # empty lines are layout, not examples
        yield place, {"text": text.strip("\r\n")}


def _paragraphs(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
  start = 1
  lines: list[bytes] = []
  size = 0
  for number, line in enumerate(_lines(file), start=1):
    if line.strip():
      start = number if not lines else start
      if size <= LONGEST:  # what is longer need not be whole to be refused
        lines.append(line)
        size += len(line)
    elif lines:
      yield start, b"".join(lines)
      lines, size = [], 0
  if lines:
    yield start, b"".join(lines)


def _jsonl(path: str, layout: Layout) -> Iterator[Located]:
  with open_bytes(path) as file:
    for place, raw in enumerate(_lines(file), start=1):
      if not raw.strip():
        continue
      yield place, _json_record(path, place, raw)


def _json_record(path: str, place: int, raw: bytes) -> Record | BadExample:
  text = _decoded(path, place, raw)
  if isinstance(text, BadExample):
    return text
  try:
    record = json.loads(text)
  except (ValueError, RecursionError) as error:
    cut = "" if raw.endswith(b"\n") else " (the file's last line has no end)"
    return BadExample(path, place, f"no JSON: {str(error)[:80]}{cut}")
  if isinstance(record, dict):
    return record
  return BadExample(path, place, f"a JSON {type(record).__name__}, not an object with columns")


def _table(delimiter: str) -> Callable[[str, Layout], Iterator[Located]]:
  def read(path: str, layout: Layout) -> Iterator[Located]:
    with open_bytes(path) as file:
      text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
      # tsv files as they are handed out (GLUE's, MNLI's) have quotes that are only characters
      quoting: Any = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
      csv.field_size_limit(LONGEST)
      rows = csv.reader(text, delimiter=delimiter, quoting=quoting)
      names = list(layout.columns or next(rows, []))
      for row in rows:
        if row:
          yield rows.line_num, _row(path, rows.line_num, names, row)

  return read


def _row(path: str, place: int, names: list[str], row: list[str]) -> Record | BadExample:
  if len(row) != len(names):
    return BadExample(path, place, f"{len(row)} columns where {len(names)} are named")
  for value in row:
    if "\0" in value:
      return BadExample(path, place, "a NUL byte")
    if any("\udc80" <= character <= "\udcff" for character in value):
      return BadExample(path, place, "no UTF-8")
  return dict(zip(names, row, strict=True))


def _parquet(path: str, layout: Layout) -> Iterator[Located]:
  from pyarrow import parquet

  with parquet.ParquetFile(path) as file:
    yield from _rows(file.iter_batches(batch_size=64))


def _arrow(path: str, layout: Layout) -> Iterator[Located]:
  """Hugging Face's files on disk: Arrow's stream format; Arrow's file format too."""
  import pyarrow

  with pyarrow.memory_map(path) as file:
    if file.read(6) == b"ARROW1":
      with pyarrow.ipc.open_file(file) as batches:
        yield from _rows(batches.get_batch(i) for i in range(batches.num_record_batches))
      return
    file.seek(0)
    with pyarrow.ipc.open_stream(file) as stream:
      yield from _rows(stream)


def _rows(batches: Any) -> Iterator[Located]:
  place = 0
  for batch in batches:
    for record in batch.to_pylist():
      place += 1
      yield place, record


_READERS: dict[str, Callable[[str, Layout], Iterator[Located]]] = {
  "text": _text,
  "jsonl": _jsonl,
  "csv": _table(","),
  "tsv": _table("\t"),
  "parquet": _parquet,
  "arrow": _arrow,
}
