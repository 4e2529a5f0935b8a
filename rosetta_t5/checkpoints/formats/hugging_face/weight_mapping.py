"""Renames weights between Transformers and this project, by a table of both names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rosetta_t5.checkpoints.arrays import lazy_arrays
from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray

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
  """Returns the number of layers: how many numbers, from 0 on, follow the pattern `prefix` in `names`.

  Raises:
    ValueError: a number is missing.
  """
  pattern = re.compile(rf"{prefix}(\d{{1,9}})\b")
  layers = {int(match[1]) for name in names if (match := pattern.match(name))}
  if missing := layers.symmetric_difference(range(len(layers))):
    raise ValueError(f"the layers must be numbered from 0 on, but layer {min(missing)} is missing")
  return len(layers)


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
    raise ValueError(f"weights that {family} does not have: {list_names(unexpected)}")
  arrays: dict[str, StoredArray] = {}
  for row in table:
    if row.theirs in weights:
      arrays |= _split(row, weights[row.theirs])
  return arrays


def check_complete(
  weights: Mapping[str, StoredArray], table: Sequence[WeightMapping], family: str
) -> None:
  """Raises ValueError unless `weights` contains every weight of a table."""
  missing = [row.theirs for row in table if row.theirs not in weights]
  if missing:
    raise ValueError(
      f"the folder lacks {len(missing)} of the {len(table)} weights of its {family}: "
      f"{', '.join(missing[:_NAMES_SHOWN])}"
    )


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
      f"Transformers' {family} cannot hold these parameters: {list_names(unexpected)}"
    )
  weights = {}
  for row in table:
    if row.ours[0] in arrays:
      parts = [arrays[name] for name in row.ours]
      joined = parts[0] if len(parts) == 1 else lazy_arrays.concatenate(parts, -1)
      weights[row.theirs] = lazy_arrays.transpose(joined) if row.is_transposed else joined
  return weights


def list_names(names: Iterable[str]) -> str:
  """Returns the first names, and how many more there are."""
  in_order = sorted(names)
  more = len(in_order) - _NAMES_SHOWN
  return ", ".join(in_order[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _split(row: WeightMapping, weight: StoredArray) -> dict[str, StoredArray]:
  array = lazy_arrays.transpose(weight) if row.is_transposed else weight
  if len(row.ours) == 1:
    return {row.ours[0]: array}
  size = array.shape[-1] // len(row.ours)
  return {
    name: lazy_arrays.slice_axis(array, -1, number * size, (number + 1) * size)
    for number, name in enumerate(row.ours)
  }


def are_equal(a: StoredArray, b: StoredArray) -> bool:
  """Compares two matrices in parts, so that tables of gigabytes are never in memory as a whole."""
  if a is b:
    return True
  return a.shape == b.shape and all(np.array_equal(a.read(p), b.read(p)) for p in a.parts())
