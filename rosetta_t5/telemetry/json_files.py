"""Reads JSON files, which may be damaged or written by other programs, and computes checksums of JSON."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import xxhash
from etils import epath


def read_json_object(path: epath.PathLike) -> dict[str, Any]:
  """Returns the object that a JSON file contains.

  Raises:
    ValueError: the file contains something else, or an object in it has a key twice.
    OSError: the file cannot be read.
  """
  if pathlib.Path(path).is_fifo():
    raise ValueError(f"{path} is a pipe, not a file")
  content = epath.Path(path).read_bytes()
  try:
    # json.loads would accept surrogates in the bytes.
    value = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_object_of_pairs)
    if rb"\ud" in content.lower():  # An escaped lone surrogate cannot be encoded as UTF-8 either.
      json.dumps(value, ensure_ascii=False).encode()
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} is not valid JSON: {error}") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path} must contain a JSON object, got a {type(value).__name__}")
  return value


def json_checksum(value: Any) -> str:
  """Returns the XXH3 checksum of a value that JSON can store."""
  return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())


@contextlib.contextmanager
def expect_content(path: epath.PathLike, what: str) -> Iterator[None]:
  """Turns the errors of a body that reads unexpected parsed values into a ValueError with the path.

  Args:
    what: what the file must describe.
  """
  try:
    yield
  except (AttributeError, LookupError, TypeError) as error:
    reason = f"{type(error).__name__}: {error}"
    raise ValueError(f"{path} is damaged: it must describe {what} ({reason})") from error


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  value = dict(pairs)
  if len(value) < len(pairs):
    [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
    raise ValueError(f"the key {key!r} occurs more than once")
  return value
