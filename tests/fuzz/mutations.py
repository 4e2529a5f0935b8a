"""Hypothesis strategies for damaged copies of a file: of its bytes, and of its structure."""

from __future__ import annotations

import dataclasses
import io
import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
from hypothesis import strategies as st
from tensorboard.summary.writer.record_writer import RecordWriter

# A path to a value inside nested dicts and lists.
Path = tuple[Any, ...]

_STRANGE = (
  *(None, True, False, 0, 1, -1, -5, 2, 3, 10**9, 2**31, 2**62, 2**63 - 1, 1.5, 1e300),
  *(float("nan"), float("-inf"), "", "x", "../../etc/passwd", "/", "\0", "9" * 5000, "é" * 300),
  *([], {}, [0], [10**9, 10**9], [-1], ["x"], {"x": 1}),
)
_STRANGE_BYTES = (
  *(
    b"",
    b"\0" * 8,
    b"\xff" * 8,
    b"\xff" * 4,
    b"\x7f",
    b"\x80" * 10,
    b"-1",
    b"NaN",
    b"1e9",
    b"null",
  ),
  *(b"9" * 30, b"{", b"}", b'"', b"[" * 20_000, b"(" * 300, b'{"a":' * 20_000, b"\xed\xa0\x80"),
  *(struct.pack("<Q", 2**62), struct.pack("<I", 2**31), struct.pack(">I", 2**31), b"../../x\0"),
)


class Content(bytes):
  """The content of a file, of which messages show the beginning."""

  def __repr__(self) -> str:
    return f"{bytes(self[:200])!r}… ({len(self)} bytes)"


def damaged(original: bytes, structure: Structure | None) -> st.SearchStrategy[Content]:
  """Returns a strategy for damaged copies of a file."""
  ways = [_replaced(original), _spliced(original)]
  if structure is not None:
    tree = structure.decode(original)
    changed = _spliced(tree) if isinstance(tree, bytes) else _changed_values(tree)
    ways.insert(0, changed.map(lambda new: structure.encode(original, new)))
  return st.one_of(*ways).map(Content)


def _replaced(original: bytes) -> st.SearchStrategy[bytes]:
  return st.one_of(
    st.binary(max_size=64), st.integers(0, len(original)).map(lambda n: original[:n])
  )


@st.composite
def _spliced(draw: Callable[..., Any], original: bytes) -> bytes:
  """Replaces a few bytes with others, of the same or another number."""
  data = original
  for _ in range(draw(st.integers(1, 4))):
    start = draw(st.integers(0, len(data)))
    removed = draw(st.sampled_from((0, 1, 1, 2, 4, 8, 64, len(data))))
    new = draw(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from(_STRANGE_BYTES)))
    data = data[:start] + new + data[start + removed :]
  return data


@st.composite
def _changed_values(draw: Callable[..., Any], tree: Any) -> Any:
  """Returns a copy of nested dicts and lists in which values are replaced, removed or moved."""
  for _ in range(draw(st.integers(1, 3))):
    paths = list(_paths(tree))
    path = draw(st.sampled_from(paths))
    value = draw(st.sampled_from((*_STRANGE, _REMOVED, *(_value_at(tree, p) for p in paths[:50]))))
    tree = _with_value(tree, path, value)
  return tree


_REMOVED = object()


def _paths(tree: Any, path: Path = ()) -> Iterator[Path]:
  yield path
  items = (
    tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
  )
  for key, value in items:
    yield from _paths(value, (*path, key))


def _value_at(tree: Any, path: Path) -> Any:
  for key in path:
    tree = tree[key]
  return tree


def _with_value(tree: Any, path: Path, value: Any) -> Any:
  if not path:
    return None if value is _REMOVED else value
  key, *rest = path
  copy = tree.copy()
  if not rest and value is _REMOVED:
    del copy[key]
  else:
    copy[key] = _with_value(tree[key], tuple(rest), value)
  return copy


@dataclasses.dataclass(frozen=True)
class Structure:
  """Changes what is inside a format while its lengths and checksums stay right.

  Attributes:
    decode: returns nested dicts and lists, or bytes.
    encode: returns a file, given the original one and what replaces its inside.
  """

  decode: Callable[[bytes], Any]
  encode: Callable[[bytes, Any], bytes]


def _decode_safetensors(data: bytes) -> Any:
  (length,) = struct.unpack_from("<Q", data)
  return json.loads(data[8 : 8 + length])


def _encode_safetensors(original: bytes, tree: Any) -> bytes:
  (length,) = struct.unpack_from("<Q", original)
  header = json.dumps(tree).encode()
  return struct.pack("<Q", len(header)) + header + original[8 + length :]


def _decode_records(data: bytes) -> list[bytes]:
  """Returns the records of a TFRecord file, which event files are too."""
  records, position = [], 0
  while position < len(data):
    (length,) = struct.unpack_from("<Q", data, position)
    records.append(data[position + 12 : position + 12 + length])
    position += length + 16
  return records


def _encode_records(_: bytes, content: bytes) -> bytes:
  """Returns a TFRecord file of one record whose checksums are right."""
  file = io.BytesIO()
  RecordWriter(file).write(content)
  return file.getvalue()


JSON = Structure(json.loads, lambda _, tree: json.dumps(tree).encode())
MSGPACK = Structure(
  lambda data: msgpack.unpackb(data, strict_map_key=False),
  lambda _, tree: bytes(msgpack.packb(tree)),
)
SAFETENSORS = Structure(_decode_safetensors, _encode_safetensors)
# The last record is damaged.
RECORDS = Structure(lambda data: _decode_records(data)[-1], _encode_records)
