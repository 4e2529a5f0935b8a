"""Protocol buffers taken apart without their definitions: field numbers and raw values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
  """Yields (field number, value) of a message: numbers, and bytes for what is nested or fixed in width."""
  place = 0
  while place < len(message):
    tag, place = varint(message, place)
    number, kind = tag >> 3, tag & 7
    if kind == 0:
      value, place = varint(message, place)
      yield number, value
    elif kind == 2:
      length, place = varint(message, place)
      yield number, message[place : place + length]
      place += length
    else:
      width = {1: 8, 5: 4}[kind]
      yield number, message[place : place + width]
      place += width


def varint(data: bytes, place: int) -> tuple[int, int]:
  """Returns the variable-length number at `place` and the place after it."""
  value, shift = 0, 0
  while True:
    byte = data[place]
    value |= (byte & 0x7F) << shift
    place, shift = place + 1, shift + 7
    if byte < 0x80:
      return value, place
