"""Reads the records of files. Each is a dictionary of columns, or the reason why there is none."""

import codecs
import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rosetta_t5.data.reading.files import DEFAULT_OPTIONS, ReadOptions, open_bytes

Record = Mapping[str, Any]

# A field in quotes, in which quotes are doubled. It may contain tabs and line breaks.
_OPEN = r'(?:(?<=[\t\n])|\A)"[^"]*+(?:""[^"]*+)*+'
_QUOTED = re.compile(_OPEN + r'"(?=[\t\n]|\r\n|\Z)')
_UNFINISHED = re.compile(_OPEN + r"\Z")
_WINDOW = 2000  # lines after the first quote that show how a tsv file is quoted
# The number of a line (or row), and the record that begins there or the reason why it cannot be used.
Located = tuple[int, Record | str]


class UnclearTableError(ValueError):
  """A file has another encoding, quotes without a clear meaning, or two columns of the same name."""


def read_records(path: str, options: ReadOptions = DEFAULT_OPTIONS) -> Iterator[Located]:
  """Yields the records of a file in order, with a reason in place of each that cannot be used.

  Records of text files have the single column "text". A truncated or damaged file yields the records
  before the damage and then one reason. Invalid UTF-8 is read as surrogates, which
  `make_converter` refuses.

  Raises:
    ValueError: the file's format is unknown, or it is a table without a clear meaning.
  """
  read = _READERS[options.format_of(path)]
  line = 0
  try:
    with open_bytes(path) as file:
      if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise UnclearTableError(f"{path} is encoded in UTF-16: save it as UTF-8")
    for line, record in read(path, options):
      yield line, record
  except (UnclearTableError, MemoryError):
    raise
  except Exception as error:  # of Python's readers or pyarrow
    if isinstance(error, OSError) and error.strerror:
      reason = f"the file cannot be read: {error.strerror}"
    else:
      text = [*str(error).strip().splitlines(), type(error).__name__][0]
      reason = f"the file is damaged here: {text[:200]}"
    yield line + 1, reason


def _open_text(path: str, newline: str = "\n") -> io.TextIOWrapper:
  return io.TextIOWrapper(open_bytes(path), "utf-8-sig", errors="surrogateescape", newline=newline)


def _text_records(path: str, options: ReadOptions) -> Iterator[Located]:
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


def _json_records(path: str, options: ReadOptions) -> Iterator[Located]:
  """Yields the objects that the lines of a file contain, or the elements of the one array that it is."""
  with _open_text(path) as file:
    is_array = file.read(64).lstrip().startswith("[")
  with _open_text(path) as file:
    if is_array:
      text = file.read().strip()
      array, end = json.JSONDecoder().raw_decode(text)
      if end < len(text):
        raise ValueError("expected an object in each line, or one array of all objects")
      yield from enumerate(map(_object, array), 1)
    else:
      lines = enumerate(file, 1)
      yield from ((number, parse_json_line(line)) for number, line in lines if line.strip())


def parse_json_line(line: str) -> Record | str:
  """Returns the object that a line of JSON contains, or the reason why there is none."""
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


def _table_records(path: str, options: ReadOptions) -> Iterator[Located]:
  """Yields the rows of a csv or tsv file, with the line at which each begins."""
  csv.field_size_limit(64 << 20)  # characters; the default is too small for a document
  columns = list(options.columns or ())
  is_csv, is_quoted = options.format_of(path) == "csv", options.quoted
  if is_quoted is None:
    is_quoted = is_csv or _is_quoted(path, len(columns))
  quoting: Any = csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE
  with _open_text(path, newline="") as file:
    first = file.readline()
    # Programs in countries with a decimal comma separate the columns of csv files by semicolons.
    used = "," if columns else next((character for character in ",;\t" if character in first), ",")
    delimiter, lines = used if is_csv else "\t", itertools.chain([first], file)
    # Without `strict`, a field with a quote in the wrong place would lose this quote.
    rows = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    while True:
      line = rows.line_num + 1
      try:
        row = next(rows)
      except StopIteration:
        return
      except csv.Error as error:
        reason = f"quotes in the wrong place ({error}); a quote in a quoted field must be doubled"
        # A field whose quote is never closed extends to the end of the file, or to the limit.
        if is_quoted and re.search("end of data|field larger", str(error)):
          reason = (
            "this row opens a quote that is never closed, so the rest of the file cannot be read. Correct "
            "the row, or set data.file_task.quoted = False if quotes are ordinary characters"
          )
        elif columns:
          yield line, reason
          continue
        raise UnclearTableError(f"{path}, line {line}: {reason}") from error
      if not columns:
        columns = row
        if twice := [name for name in columns if name and columns.count(name) > 1]:
          raise UnclearTableError(f"{path} has two columns {twice[0]!r}: rename one of them")
      elif len(row) == len(columns):
        yield line, dict(zip(columns, row, strict=True))
      elif row:  # csv reads an empty line as an empty row.
        yield line, f"{len(row)} columns instead of {len(columns)}"


def _is_quoted(path: str, width: int) -> bool:
  """Returns whether fields of a tsv file are in quotes, by the lines that follow its first quote.

  Args:
    path: the file.
    width: the number of columns; 0 for that of the first row.
  """
  with _open_text(path, newline="") as file:
    for number, line in enumerate(file, 1):
      if not width and line.strip("\r\n"):
        width = line.count("\t") + 1
      if '"' in line:
        where = f"{path}, line {number}"
        break
    else:
      return False
    lines = [line, *itertools.islice(file, _WINDOW)]
  unquoted = _QUOTED.sub("", "".join(lines))
  if field := _UNFINISHED.search(unquoted):  # The last row goes on after these lines.
    unquoted = unquoted[: unquoted.rfind("\n", 0, field.start()) + 1]
  fits_quoted = '"' not in unquoted and _has_width(unquoted.split("\n"), width)
  fits_plain = _has_width([line for line in lines if '"' in line], width)
  if fits_quoted != fits_plain:
    return fits_quoted
  if not fits_plain:
    raise UnclearTableError(
      f"{where}: every row must have {width} columns, but some have another number, whether the quotes enclose "
      "fields (and are doubled inside them) or are ordinary characters. Set data.file_task.quoted = True if "
      "the fields are quoted, or False to read each line as a row. For other commands, write the file as csv"
    )
  # Doubled quotes, or a first row in quotes, show that a program has quoted the fields.
  fields = line.rstrip("\r\n").split("\t")
  is_first_quoted = all(field[:1] == field[-1:] == '"' for field in fields)
  return is_first_quoted or any('""' in line for line in lines)


def _has_width(lines: Iterable[str], width: int) -> bool:
  return all(line.count("\t") == width - 1 for line in lines if line.strip("\r"))


def _parquet_records(path: str, options: ReadOptions) -> Iterator[Located]:
  from pyarrow import parquet

  with parquet.ParquetFile(path) as file:
    yield from _batch_rows(file.iter_batches(batch_size=64))


def _arrow_records(path: str, options: ReadOptions) -> Iterator[Located]:
  """Reads Arrow's stream format, in which Hugging Face stores datasets, or its file format."""
  import pyarrow

  with pyarrow.memory_map(path) as file:
    is_stream = file.read(6) != b"ARROW1"
    file.seek(0)
    reader = (pyarrow.ipc.open_stream if is_stream else pyarrow.ipc.open_file)(file)
    batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
    yield from _batch_rows(batches)


def _batch_rows(batches: Iterable[Any]) -> Iterator[Located]:
  numbers = itertools.count(1)
  for batch in batches:
    batch.validate(full=True)  # Without this, a damaged offset would end the process.
    yield from ((next(numbers), record) for record in batch.to_pylist())


_READERS: Mapping[str, Callable[[str, ReadOptions], Iterator[Located]]] = {
  "text": _text_records,
  "jsonl": _json_records,
  "csv": _table_records,
  "tsv": _table_records,
  "parquet": _parquet_records,
  "arrow": _arrow_records,
}
