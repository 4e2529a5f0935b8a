"""Renames weights between Transformers and this project, by a table of both names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rosetta_t5.checkpoints.arrays.lazy_arrays import Index, StoredArray, transpose

_NAMES_SHOWN = 8


class WeightMapping(NamedTuple):
  """One weight of Transformers and the parameters that it holds.

  Attributes:
    theirs: Transformers' name.
    ours: flat names of our parameters; the weight is several of them joined along the last axis.
    is_transposed: whether the weight is the transpose of our matrix, as in PyTorch's Linear.
  """

  theirs: str
  ours: tuple[str, ...]
  is_transposed: bool = False


def count_layers(names: Iterable[str], prefix: str) -> int:
  """Returns 1 + the highest number that follows the regular expression `prefix` in `names`."""
  pattern = re.compile(rf"{prefix}(\d+)")
  return 1 + max((int(match[1]) for name in names if (match := pattern.match(name))), default=-1)


def from_transformers(
  weights: Mapping[str, StoredArray], table: Sequence[WeightMapping], family: str
) -> dict[str, StoredArray]:
  """Returns {our name: array} for {Transformers' name: array}; the values are read later.

  Args:
    weights: may lack some rows of the table.
    table: the weights that the architecture may have.
    family: its name in messages.

  Raises:
    ValueError: a weight is not in the table.
  """
  unexpected = weights.keys() - {row.theirs for row in table}
  if unexpected:
    raise ValueError(f"weights that {family} does not have: {_list_names(unexpected)}")
  arrays: dict[str, StoredArray] = {}
  for row in table:
    if row.theirs in weights:
      arrays |= _split(row, weights[row.theirs])
  return arrays


def to_transformers(
  arrays: Mapping[str, StoredArray], table: Sequence[WeightMapping], family: str
) -> dict[str, StoredArray]:
  """Returns {Transformers' name: array} for {our name: array}; the values are read later.

  Args:
    arrays: may lack some rows of the table.
    table: the weights that the architecture may have.
    family: its name in messages.

  Raises:
    ValueError: an array is not in the table.
  """
  unexpected = arrays.keys() - {name for row in table for name in row.ours}
  if unexpected:
    raise ValueError(
      f"Transformers' {family} cannot hold these parameters: {_list_names(unexpected)}"
    )
  weights = {}
  for row in table:
    if row.ours[0] in arrays:
      joined = _concatenate([arrays[name] for name in row.ours])
      weights[row.theirs] = transpose(joined) if row.is_transposed else joined
  return weights


def _list_names(names: Iterable[str]) -> str:
  in_order = sorted(names)
  more = len(in_order) - _NAMES_SHOWN
  return ", ".join(in_order[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _split(row: WeightMapping, weight: StoredArray) -> dict[str, StoredArray]:
  array = transpose(weight) if row.is_transposed else weight
  if len(row.ours) == 1:
    return {row.ours[0]: array}
  size = array.shape[-1] // len(row.ours)
  return {name: _columns(array, number * size, size) for number, name in enumerate(row.ours)}


def _columns(array: StoredArray, start: int, size: int) -> StoredArray:
  """Returns `size` columns of a matrix, or elements of a vector."""

  def read(index: Index) -> np.ndarray:
    last = slice(index[-1].start + start, index[-1].stop + start)
    return array.read((*index[:-1], last))

  return StoredArray((*array.shape[:-1], size), array.dtype, read, array.sliceable)


def _concatenate(parts: Sequence[StoredArray]) -> StoredArray:
  """Returns arrays joined along the last axis."""
  if len(parts) == 1:
    return parts[0]

  def read(index: Index) -> np.ndarray:
    return np.concatenate([part.get() for part in parts], axis=-1)[index]

  size = sum(part.shape[-1] for part in parts)
  return StoredArray((*parts[0].shape[:-1], size), parts[0].dtype, read, sliceable=False)
