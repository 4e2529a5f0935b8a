"""Reads the rows of csv and tsv files, and finds out whether quotes in a tsv file are part of the text."""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

# The columns and their values, or the reason why the row cannot be used.
Row = tuple[list[str], list[str]] | str

_WINDOW = 1 << 20  # characters after the first quote that show how a tsv file is quoted
# A field in quotes, in which quotes are doubled. It may contain tabs and line breaks.
_OPEN = r'(?:(?<=[\t\n])|\A)"[^"]*+(?:""[^"]*+)*+'
_QUOTED = re.compile(_OPEN + r'"(?=[\t\n]|\r\n|\Z)')
_UNFINISHED = re.compile(_OPEN + r"\Z")


class UnclearQuotesError(ValueError):
  """A tsv file can be read in neither of the two ways, so that its rows are not known."""


def table_rows(
  text: io.TextIOBase,
  path: str,
  columns: Iterable[str] | None,
  is_tsv: bool,
  is_quoted: bool | None,
  longest: int,
) -> Iterator[tuple[int, Row]]:
  """Yields the rows of a table, with the line at which each begins.

  Args:
    text: the opened file, without translation of line breaks.
    path: its name, for errors.
    columns: the names of the columns; None if the first row contains them.
    is_tsv: whether tabs separate the fields, instead of commas.
    is_quoted: whether a field may be in quotes, as pandas and spreadsheets write it. If False, quotes are
      ordinary characters, as in the tsv files of public data sets. None finds it out for a tsv file.
    longest: the largest size of a field, in characters.

  Raises:
    UnclearQuotesError: the tsv file can be read neither with quoted fields nor without.
  """
  csv.field_size_limit(longest)
  # A line that is too long becomes several, of which csv refuses a field that is too long.
  lines = iter(lambda: text.readline(longest + 1), "")
  if is_tsv and is_quoted is None:
    rows = _rows_of_unknown_tsv(lines, path, columns)
  else:
    rows = _rows(lines, 1, "\t" if is_tsv else ",", is_quoted is not False)
  names = list(columns or ())
  for line, row in rows:
    if isinstance(row, list) and not names:
      names = row
    elif row:
      yield line, row if isinstance(row, str) else (names, row)


def _rows(
  lines: Iterable[str], first_line: int, delimiter: str, is_quoted: bool
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
  lines: Iterator[str], path: str, columns: Iterable[str] | None
) -> Iterator[tuple[int, list[str] | str]]:
  """Reads rows until the first quote, where both ways are equal, and then decides between them."""
  window: list[str] = []

  def until_quote() -> Iterator[str]:
    for line in lines:
      if '"' in line:
        window.append(line)
        return
      yield line

  number, width = 0, len(list(columns or ()))
  for number, row in _rows(until_quote(), 1, "\t", is_quoted=False):
    width = width or len(row)
    yield number, row
  if not window:
    return
  size = len(window[0])
  for line in lines:
    window.append(line)
    size += len(line)
    if size > _WINDOW:
      break
  width = width or window[0].count("\t") + 1
  is_quoted = _is_quoted("".join(window), width, size <= _WINDOW, f"{path}, line {number + 1}")
  yield from _rows(itertools.chain(window, lines), number + 1, "\t", is_quoted)


def _is_quoted(text: str, width: int, is_whole: bool, where: str) -> bool:
  """Returns whether fields of a tsv file are in quotes.

  Args:
    text: lines of the file; the first contains a quote.
    width: the number of columns.
    is_whole: whether the text ends where the file ends, so that the last row is complete.
    where: the place of the first line, for errors.
  """
  unquoted = _QUOTED.sub("", text)
  if not is_whole and (field := _UNFINISHED.search(unquoted)):
    unquoted = unquoted[: unquoted.rfind("\n", 0, field.start()) + 1]
  fits_quoted = '"' not in unquoted and _has_width(unquoted.split("\n"), width)
  fits_plain = _has_width([line for line in text.split("\n") if '"' in line], width)
  if not fits_quoted and not fits_plain:
    raise UnclearQuotesError(
      f"{where}: here are quotes, and neither as quoted fields (with quotes inside them doubled) nor as "
      f"ordinary characters do they give {width} columns in every row. Set data.file_task.quoted = "
      "True if the fields are quoted, or False to read each line as a row. (For other commands: --quoted, "
      "--no-quoted.)"
    )
  # If both fit, doubled quotes or a first row in quotes show that a program has quoted the fields.
  first = text.partition("\n")[0].rstrip("\r")
  is_all_quoted = first.count('"') == 2 * width and not _QUOTED.sub("", first).strip()
  return fits_quoted and (not fits_plain or '""' in text or is_all_quoted)


def _has_width(lines: Iterable[str], width: int) -> bool:
  return all(line.count("\t") == width - 1 for line in lines if line.strip("\r"))
