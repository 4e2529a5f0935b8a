"""`model-info.txt`: every array of a train state with its size, its axes and how it is split."""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import traverse_util

_log = logging.getLogger(__name__)


def model_info(full_train_state: Any, partitioner: Any) -> str:
  """Returns T5X's listing of a train state: parameters, their number, then the rest of the state.

  Args:
    full_train_state: a train state of arrays or of their shapes.
    partitioner: gives each array's logical axes (`get_logical_axes`) and mesh axes
      (`get_mesh_axes`).
  """
  arrays = _flat(full_train_state)
  axes = _flat(partitioner.get_logical_axes(full_train_state))
  splits = _flat(partitioner.get_mesh_axes(full_train_state))
  sections: dict[str, list[str]] = {"target": [], "state": [], "flax_mutables": []}
  total = 0
  for path, array in sorted(arrays.items()):
    section, *names = path
    if section == "flax_mutables":
      names = [section, *names]
    sections[section].append(_line("/".join(names), array, axes.get(path), splits.get(path)))
    total += _size(array) if section == "target" else 0
  rest = [*sections["state"], *sections["flax_mutables"]]
  lines = [*sections["target"], f"Total number of parameters: {total}", "", *rest]
  return "".join(f"{line}\n" for line in lines)


def log_model_info(
  log_file: str | os.PathLike[str] | None, full_train_state: Any, partitioner: Any
) -> None:
  """Writes `model_info` to `log_file`, on the first process only; with None, to the log."""
  if jax.process_index() != 0:
    return
  text = model_info(full_train_state, partitioner)
  if log_file is None:
    _log.info("%s", text)
    return
  path = pathlib.Path(log_file)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)


def count_parameters(params: Any) -> int:
  """Returns the number of scalars in a tree of arrays or shapes."""
  return sum(_size(leaf) for leaf in jax.tree.leaves(params))


def _flat(train_state: Any) -> Mapping[tuple[str, ...], Any]:
  leaves = traverse_util.flatten_dict(train_state.state_dict())
  return {path: leaf for path, leaf in leaves.items() if leaf is not None}


def _line(name: str, array: Any, axes: Any, split: Any) -> str:
  """Returns one array's line, as T5X writes it."""
  shape = f"({', '.join(_dims(array.shape, axes))})" if axes else str(tuple(array.shape))
  # An array without logical axes lies whole on each device; T5X writes None for its split.
  spec = tuple(split) if axes else None
  return f"Variable {name:80} size {_size(array):<12} shape {shape:40} partition spec {spec}"


def _dims(shape: tuple[int, ...], axes: Any) -> Iterator[str]:
  return (f"{axis}={size}" for axis, size in zip(axes, shape, strict=True))


def _size(array: Any) -> int:
  return int(np.prod(array.shape, dtype=np.int64))
