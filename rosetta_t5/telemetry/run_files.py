"""The files about a run in MODEL_DIR: model-info.txt and run-log.jsonl."""

from __future__ import annotations

import json
import logging
import math
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from rosetta_t5.terminal import optional_output

RUN_LOG = "run-log.jsonl"
_log = logging.getLogger(__name__)


def log_event(model_dir: str | os.PathLike[str], event: str, **fields: Any) -> None:
  """Appends a JSON object to MODEL_DIR/run-log.jsonl, on the first process only.

  Args:
    event: `start`, `end` or `restored`.
    **fields: numbers, texts, and lists and dictionaries of them.
  """
  import jax  # The report reads the log on machines without it, and faster.

  if jax.process_index() != 0:
    return
  folder = pathlib.Path(model_dir)
  with optional_output(RUN_LOG):
    if event == "start":  # A folder that was moved during the run is not created again.
      folder.mkdir(parents=True, exist_ok=True)
    with (folder / RUN_LOG).open("a", encoding="utf-8") as file:
      file.write(json.dumps({"event": event, "time": time.time(), **fields}) + "\n")


def log_model_info(
  log_file: str | os.PathLike[str] | None, full_train_state: Any, partitioner: Any
) -> None:
  """Writes `model_info` to `log_file`, or to the log if it is None, on the first process only."""
  import jax

  if jax.process_index() != 0:
    return
  text = model_info(full_train_state, partitioner)
  if log_file is None:
    _log.info("%s", text)
    return
  path = pathlib.Path(log_file)
  with optional_output(path.name):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def model_info(full_train_state: Any, partitioner: Any) -> str:
  """Lists a train state in T5X's format: parameters, their number, then the rest of the state.

  Args:
    full_train_state: a train state of arrays or of their shapes.
    partitioner: its `get_logical_axes` and `get_mesh_axes` return the axes of each array.
  """
  arrays = _flatten(full_train_state)
  logical_axes = _flatten(partitioner.get_logical_axes(full_train_state))
  mesh_axes = _flatten(partitioner.get_mesh_axes(full_train_state))
  sections: dict[str, list[str]] = {"target": [], "state": [], "flax_mutables": []}
  for path, array in sorted(arrays.items()):
    section, *names = path
    if section == "flax_mutables":
      names = [section, *names]
    line = _format_array("/".join(names), array, logical_axes.get(path), mesh_axes.get(path))
    sections[section].append(line)
  total = count_parameters(full_train_state.params)
  rest = [*sections["state"], *sections["flax_mutables"]]
  lines = [*sections["target"], f"Total number of parameters: {total}", "", *rest]
  return "".join(f"{line}\n" for line in lines)


def count_parameters(params: Any) -> int:
  """Returns the number of scalars in a tree of arrays or shapes."""
  import jax

  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _flatten(train_state: Any) -> Mapping[tuple[str, ...], Any]:
  from flax import traverse_util

  leaves = traverse_util.flatten_dict(train_state.state_dict())
  return {path: leaf for path, leaf in leaves.items() if leaf is not None}


def _format_array(name: str, array: Any, logical_axes: Any, mesh_axes: Any) -> str:
  # T5X prints None as the partition spec of an array without logical axes, which is replicated.
  size, shape = math.prod(array.shape), str(tuple(array.shape))
  spec = tuple(mesh_axes) if logical_axes else None
  if logical_axes and len(logical_axes) == len(array.shape):  # They may be fewer, as in T5X.
    dims = (f"{axis}={size}" for axis, size in zip(logical_axes, array.shape, strict=True))
    shape = f"({', '.join(dims)})"
  return f"Variable {name:80} size {size:<12} shape {shape:40} partition spec {spec}"
