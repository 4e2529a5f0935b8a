"""The rows of `rosetta-t5 infer --input`: lines of text, JSON objects, or the records of a data file."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

_LINES = ("text", "jsonl")  # Formats whose empty lines are rows too.


class Row(NamedTuple):
  """A row of the input.

  Attributes:
    inputs: its text or fields, as JSON can represent them.
    example: {"input": text, "target": text}; None for an empty line.
  """

  inputs: str | dict[str, Any]
  example: dict[str, str] | None


def read_rows(
  path: str, template: str | None, targets: str | None, quoted: bool | None
) -> Iterator[Row]:
  """Yields the rows of a file, or of standard input if the path is -.

  Args:
    path: a file of any format of `data.reading`; a file with another suffix has one row in each line.
    template: makes the model's input of a record; None if each line is a text.
    targets: makes the target.
    quoted: see `ReadOptions`.

  Raises:
    ValueError: there is no such file, its records need a template, or a row cannot be used.
  """
  from rosetta_t5.data.reading import ReadOptions, make_converter

  name = _format(path)
  if template is None and (targets is not None or name != "text"):
    raise ValueError(
      f"The rows of {path} have columns, which need a template for the model's input: give --template, "
      "such as --template 'question: {question} context: {context}'"
    )
  templates = {"input": template, "target": targets}
  convert = make_converter({key: text for key, text in templates.items() if text is not None})
  rows = (
    _lines(path, template)
    if _has_row_per_line(path)
    else _records(path, ReadOptions(name, quoted=quoted))
  )
  _check_exists(path)
  return (_row(number, content, template, convert) for number, content in rows)


def count_lines(path: str) -> int | None:
  """Returns the number of lines of a file that has a row in each; None for others, and for pipes."""
  if not os.path.isfile(path) or not _has_row_per_line(path):
    return None
  from rosetta_t5.data.reading.files import open_bytes

  with open_bytes(path) as file:
    return sum(1 for _ in file)


def _format(path: str) -> str:
  from rosetta_t5.data.reading import DEFAULT_OPTIONS

  with contextlib.suppress(ValueError):
    return DEFAULT_OPTIONS.format_of(path)
  return "text"


def _has_row_per_line(path: str) -> bool:
  # A .json file may contain one array of all records.
  return _format(path) in _LINES and ".json" not in pathlib.PurePath(path).suffixes


def _row(number: int, content: Any, template: str | None, convert: Any) -> Row:
  if template is None or content == "":
    is_empty = not content.strip()
    return Row(content, None if is_empty else {"input": content, "target": ""})
  example = convert(content)
  if isinstance(example, str):
    raise ValueError(f"Line {number} of the input cannot be used: {example}")
  return Row(json.loads(json.dumps(content, default=_as_text)), {"target": "", **example})


def _as_text(value: Any) -> str:
  return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _records(path: str, options: Any) -> Iterator[tuple[int, Any]]:
  from rosetta_t5.data.reading import BadExample, read_records

  for number, record in read_records(path, options):
    if isinstance(record, BadExample):
      raise ValueError(f"Line {number} of the input cannot be used: {record.reason}")
    yield number, record


def _lines(path: str, template: str | None) -> Iterator[tuple[int, Any]]:
  """Yields the lines, as JSON objects if there is a template; an empty line is an empty text."""
  for number, line in enumerate(_open(path), 1):
    if not line.isascii() and any("\udc80" <= letter <= "\udcff" for letter in line):
      raise ValueError(f"Line {number} of the input is invalid UTF-8: {line[:80]!r}")
    text = line.rstrip("\n")
    if template is None or not text.strip():
      yield number, text if template is None else ""
      continue
    try:
      fields = json.loads(text)
    except (ValueError, RecursionError) as error:
      raise ValueError(
        f"Line {number} of the input is invalid JSON ({error}): {text[:80]}"
      ) from error
    if not isinstance(fields, dict):
      raise ValueError(f"Line {number} of the input is not a JSON object: {text[:80]}")
    yield number, fields


def _open(path: str) -> Iterator[str]:
  from rosetta_t5.data.reading.files import open_bytes

  # Invalid UTF-8 becomes surrogates, so that its line is reported after the lines before it.
  encoding, errors = "utf-8-sig", "surrogateescape"
  if path != "-":
    with io.TextIOWrapper(open_bytes(path), encoding, errors) as file:
      yield from file
    return
  if isinstance(sys.stdin, io.TextIOWrapper):
    sys.stdin.reconfigure(encoding=encoding, errors=errors)
  yield from sys.stdin


def _check_exists(path: str) -> None:
  """Raises ValueError if there is nothing to read."""
  if path == "-" and sys.stdin is None:
    raise ValueError("Standard input is closed: give a file as --input, or text on standard input")
  if path != "-" and (not os.path.exists(path) or pathlib.Path(path).is_dir()):
    raise ValueError(f"There is no file {path!r}: give a file as --input, or - for standard input")
