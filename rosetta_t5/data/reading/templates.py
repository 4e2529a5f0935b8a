"""Converts the columns of a record to the texts of an example, as templates specify."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Mapping
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")  # Escapes in JSON can yield unpaired ones.


def make_converter(templates: Mapping[str, str]) -> Any:
  """Returns a function that converts a record to {feature: text}, or returns why it cannot.

  Args:
    templates: for each feature the name of a column, or a text with columns in braces such as
      "{a} and {b}". A literal brace is doubled.

  Raises:
    ValueError: the braces of a template do not match, or it contains no column.
  """
  parsed = {feature: _parse(feature, template) for feature, template in templates.items()}
  names = {
    feature: " and ".join(column for _, column in parts if column is not None)
    for feature, parts in parsed.items()
  }

  def convert(record: Mapping[str, Any]) -> dict[str, str] | str:
    fields = {}
    for feature, parts in parsed.items():
      try:
        values = ["" if column is None else _as_text(record[column]) for _, column in parts]
      except KeyError as error:
        return f"no column {error} among {', '.join(map(repr, record))}"[:200]
      except TypeError as error:
        return f"{names[feature]} {error}"
      if not any(value and not value.isspace() for value in values):
        return f"{names[feature]} is empty"
      text = "".join(before + value for (before, _), value in zip(parts, values, strict=True))
      if "\0" in text:
        return f"a NUL character in {names[feature]}"
      if not text.isascii() and _SURROGATE.search(text):
        return f"an unpaired surrogate in {names[feature]}, which UTF-8 cannot encode"
      fields[feature] = text
    return fields

  return convert


def _parse(feature: str, template: str) -> list[tuple[str, str | None]]:
  """Returns pairs of literal text and the column that follows it, or None at the end."""
  if "{" not in template and "}" not in template:
    return [("", template)]
  try:
    parsed = list(string.Formatter().parse(template))
  except ValueError as error:
    raise ValueError(f'{feature} = "{template}" is not a valid template: {error}') from error
  if any(specification or conversion for _, _, specification, conversion in parsed):
    raise ValueError(
      f'{feature} = "{template}" is not a valid template: braces contain only the name of a column'
    )
  parts = [(text, column) for text, column, _, _ in parsed]
  if not any(column for _, column in parts):
    raise ValueError(f'{feature} = "{template}" contains no column, such as {{text}}')
  return parts


def _as_text(value: Any) -> str:
  if isinstance(value, Mapping):
    raise TypeError(f"is an object, not text: {value}"[:120])
  if isinstance(value, (list, tuple)):
    return " ".join(map(_as_text, value))
  if isinstance(value, bytes):  # Parquet files of some programs have texts of this type
    try:
      return value.decode()
    except UnicodeDecodeError:
      raise TypeError("contains bytes that are not text in UTF-8") from None
  if isinstance(value, float) and math.isinf(value):
    raise TypeError(f"is the number {value}, not text")
  is_missing = value is None or value != value  # pandas stores a missing value as NaN
  return "" if is_missing else str(value)
