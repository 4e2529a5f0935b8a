"""Reads the records of files. Each is a dictionary of columns, or a `BadExample` with a reason."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rosetta_t5.data.reading.files import DEFAULT_OPTIONS, ReadOptions, open_bytes

Record = Mapping[str, Any]

# Exceptions of Python's readers if a file is truncated or damaged. pyarrow has its own.
_DAMAGE = (OSError, EOFError, ValueError, RecursionError, lzma.LZMAError, zlib.error, csv.Error)
_SEPARATORS = re.compile(r"[\s,]*")  # between the elements of a JSON array
# A field in quotes, in which quotes are doubled. It may contain tabs and line breaks.
_OPEN = r'(?:(?<=[\t\n])|\A)"[^"]*+(?:""[^"]*+)*+'
_QUOTED = re.compile(_OPEN + r'"(?=[\t\n]|\r\n|\Z)')
_UNFINISHED = re.compile(_OPEN + r"\Z")
_WINDOW = 2000  # lines after the first quote that show how a tsv file is quoted


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


# The number of a line (or row), and the record that begins there.
Located = tuple[int, Record | BadExample]
# What the readers of this file yield: the record, or the reason why it cannot be used.
_Unit = tuple[int, Record | str]


class UnclearQuotesError(ValueError):
  """A tsv file can be read in neither of the two ways, so that its rows are not known."""


def read_records(path: str, options: ReadOptions = DEFAULT_OPTIONS) -> Iterator[Located]:
  """Yields the records of a file in order, with a `BadExample` in place of each that cannot be used.

  Records of text files have the single column "text". A truncated or damaged file yields the records
  before the damage and then one bad example. Invalid UTF-8 is read as surrogates, which
  `make_converter` refuses.

  Raises:
    ValueError: the file's format is unknown, or the meaning of quotes in a tsv file.
  """
  read = _READERS[options.format_of(path)]
  line = 0
  try:
    for line, unit in read(path, options):
      yield line, BadExample(path, line, unit) if isinstance(unit, str) else unit
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


def _open_text(path: str, newline: str = "\n") -> io.TextIOWrapper:
  return io.TextIOWrapper(open_bytes(path), "utf-8-sig", errors="surrogateescape", newline=newline)


def _text_records(path: str, options: ReadOptions) -> Iterator[_Unit]:
  with _open_text(path) as file:
    if options.text_unit == "file":
      units: Iterable[tuple[int, str]] = [(1, file.read())]
    elif options.text_unit == "paragraph":
      units = _paragraphs(file)
    else:
      units = enumerate(file, 1)
    for line, text in units:
      if text.strip():  # An empty line only separates examples.
        yield line, {"text": text.strip("\r\n")}


def _paragraphs(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
  numbered = enumerate(lines, 1)
  for _, group in itertools.groupby(numbered, lambda item: not item[1].strip()):
    (start, first), *rest = group
    yield start, first + "".join(line for _, line in rest)


def _json_records(path: str, options: ReadOptions) -> Iterator[_Unit]:
  """Yields the objects that the lines of a file contain, or the elements of the one array that it is."""
  with _open_text(path) as file:
    is_array = file.read(64).lstrip().startswith("[")
  with _open_text(path) as file:
    if is_array:
      yield from ((line, _object(value)) for line, value in _array_elements(file.read()))
    else:
      lines = enumerate(file, 1)
      yield from ((number, _parse_line(line)) for number, line in lines if line.strip())


def _parse_line(line: str) -> Record | str:
  try:
    return _object(json.loads(line))
  except (ValueError, RecursionError) as error:
    if line.strip() == "{":
      return "an object over several lines; expected one in each line, or one array of all objects"
    truncated = "" if line.endswith("\n") else " (the file's last line has no line break)"
    return f"invalid JSON: {str(error)[:80]}{truncated}"


def _object(value: Any) -> Record | str:
  is_object = isinstance(value, dict)
  return value if is_object else f"a JSON {type(value).__name__}, not an object with columns"


def _array_elements(text: str) -> Iterator[tuple[int, Any]]:
  """Yields the elements of a JSON array, and the lines where they begin."""
  decode = json.JSONDecoder().raw_decode
  line, counted, end = 1, 0, text.index("[") + 1
  while True:
    start = _SEPARATORS.match(text, end).end()  # type: ignore[union-attr]
    if text.startswith("]", start):
      break
    line, counted = line + text.count("\n", counted, start), start
    element, end = decode(text, start)
    yield line, element
  if text[start + 1 :].strip():
    raise ValueError("there is more after the end of the array")


def _table_records(path: str, options: ReadOptions) -> Iterator[_Unit]:
  """Yields the rows of a csv or tsv file, with the line at which each begins."""
  csv.field_size_limit(64 << 20)  # characters; the default is too small for a document
  columns = list(options.columns or ())
  with _open_text(path, newline="") as file:
    if options.format_of(path) == "csv" or options.quoted is not None:
      delimiter = "," if options.format_of(path) == "csv" else "\t"
      rows = _rows(file, delimiter, options.quoted is not False)
    else:
      rows = _rows_of_unknown_tsv(file, path, len(columns))
    for line, row in rows:
      if isinstance(row, str):
        yield line, row
      elif not columns:
        columns = row
      elif len(row) == len(columns):
        yield line, dict(zip(columns, row, strict=True))
      elif row:  # csv reads an empty line as an empty row.
        yield line, f"{len(row)} columns instead of {len(columns)}"


def _rows(
  lines: Iterable[str], delimiter: str, is_quoted: bool, first_line: int = 1
) -> Iterator[tuple[int, list[str] | str]]:
  """Yields the line of each row, and its fields or the reason why it has none."""
  quoting: Any = csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE
  # Without `strict`, a field with a quote in the wrong place would lose this quote.
  reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
  while True:
    line = first_line + reader.line_num
    try:
      yield line, next(reader)
    except StopIteration:
      return
    except csv.Error as error:
      if "field larger" in str(error):
        raise
      yield line, f"quotes in the wrong place ({error}); a quote in a quoted field must be doubled"


def _rows_of_unknown_tsv(
  lines: Iterator[str], path: str, width: int
) -> Iterator[tuple[int, list[str] | str]]:
  """Reads rows until the first quote, where both ways are equal, and then decides between them.

  Args:
    lines: the lines of the file.
    path: its name, for errors.
    width: the number of columns; 0 for that of the first row.
  """
  number = 0
  window: list[str] = []
  for number, line in enumerate(lines, 1):
    if '"' in line:
      window = [line, *itertools.islice(lines, _WINDOW)]
      break
    row = line.rstrip("\r\n").split("\t") if line.strip("\r\n") else []
    width = width or len(row)
    yield number, row
  if window:
    is_quoted = _is_quoted(window, width or window[0].count("\t") + 1, f"{path}, line {number}")
    yield from _rows(itertools.chain(window, lines), "\t", is_quoted, number)


def _is_quoted(lines: list[str], width: int, where: str) -> bool:
  """Returns whether fields of a tsv file are in quotes, by lines of which the first has a quote."""
  unquoted = _QUOTED.sub("", "".join(lines))
  if field := _UNFINISHED.search(unquoted):  # The last row goes on after these lines.
    unquoted = unquoted[: unquoted.rfind("\n", 0, field.start()) + 1]
  fits_quoted = '"' not in unquoted and _has_width(unquoted.split("\n"), width)
  fits_plain = _has_width([line for line in lines if '"' in line], width)
  if not fits_quoted and not fits_plain:
    raise UnclearQuotesError(
      f"{where}: here are quotes, and neither as quoted fields (with quotes inside them doubled) nor as "
      f"ordinary characters do they give {width} columns in every row. Set data.file_task.quoted = "
      "True if the fields are quoted, or False to read each line as a row. (For other commands: --quoted, "
      "--no-quoted.)"
    )
  if fits_quoted and fits_plain:
    # Doubled quotes, or a first row in quotes, show that a program has quoted the fields.
    fields = lines[0].rstrip("\r\n").split("\t")
    is_first_quoted = all(field.startswith('"') and field.endswith('"') for field in fields)
    return is_first_quoted or any('""' in line for line in lines)
  return fits_quoted


def _has_width(lines: Iterable[str], width: int) -> bool:
  return all(line.count("\t") == width - 1 for line in lines if line.strip("\r"))


def _parquet_records(path: str, options: ReadOptions) -> Iterator[_Unit]:
  from pyarrow import parquet

  with parquet.ParquetFile(path) as file:
    yield from _batch_rows(file.iter_batches(batch_size=64))


def _arrow_records(path: str, options: ReadOptions) -> Iterator[_Unit]:
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


def _batch_rows(batches: Iterable[Any]) -> Iterator[_Unit]:
  numbers = itertools.count(1)
  for batch in batches:
    batch.validate(full=True)  # To read a damaged offset would end the process.
    yield from ((next(numbers), record) for record in batch.to_pylist())


_READERS: Mapping[str, Callable[[str, ReadOptions], Iterator[_Unit]]] = {
  "text": _text_records,
  "jsonl": _json_records,
  "csv": _table_records,
  "tsv": _table_records,
  "parquet": _parquet_records,
  "arrow": _arrow_records,
}
