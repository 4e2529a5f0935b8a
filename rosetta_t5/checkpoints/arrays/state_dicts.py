"""State dicts, nested or flat with names like `target/encoder/norm/scale`, and changes of a checkpoint's.

A checkpoint's arrays can be renamed (`apply_assignment_map`), repeated for experts (`upcycle`), given
another number of tokens (`resize_vocabulary`) or replaced by their averages (`with_averages`).
"""

from __future__ import annotations

import difflib
import functools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from flax import serialization, traverse_util
from flax.core import unfreeze

from rosetta_t5.checkpoints.arrays.lazy_arrays import (
  Index,
  StoredArray,
  as_stored_array,
  concatenate,
  repeat,
  slice_axis,
)

_SPEC_KEYS = frozenset({"driver", "kvstore", "metadata"})
AssignmentMap = Sequence[tuple[str, str | None]]

_EXPERT = re.compile(r"target/.*/expert/.*")
# The parameters with a row or a column for each token, and the axis of the tokens.
TOKEN_AXES = {
  re.compile(r"target/(.*/)?token_embedder/embedding"): 0,
  re.compile(r"target/(.*/)?logits_dense/kernel"): -1,
}

_log = logging.getLogger(__name__)
_AVERAGE = re.compile(r"state/param_states/(?:.*/)?parameter_average/(.+)")
_SCHEDULE_FREE = re.compile(r"(state/param_states/(?:.*/)?)weight_sum")


def tensorstore_leaf(_: Any, value: Mapping[str, Any]) -> bool:
  """Returns whether a dict is a TensorStore spec, which is a leaf, and not a level of names."""
  return set(value) >= _SPEC_KEYS


def flatten_state_dict(
  state_dict: Mapping[str, Any], keep_empty_nodes: bool = False
) -> dict[str, Any]:
  """Returns {"outer/inner": leaf} for a nested dict.

  Args:
    state_dict: nested dicts with string keys.
    keep_empty_nodes: keep empty dicts as leaves, so that unflattening restores them.
  """
  return traverse_util.flatten_dict(
    unfreeze(dict(state_dict)), sep="/", keep_empty_nodes=keep_empty_nodes, is_leaf=tensorstore_leaf
  )


def read_state_dict(file: epath.Path) -> dict[str, Any]:
  """Returns the nested dict in a msgpack file of flax.

  Raises:
    ValueError: the file is damaged.
  """
  content = file.read_bytes()
  try:
    state: dict[str, Any] = serialization.msgpack_restore(content)
    return dict(state)
  except Exception as error:  # flax raises whatever its functions on arrays do.
    raise ValueError(f"{file} is damaged: {str(error) or type(error).__name__}") from error


def unflatten_state_dict(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the nested dict that `flatten_state_dict` flattened."""
  return traverse_util.unflatten_dict(dict(flat), sep="/")


def flatten_arrays(state_dict: Mapping[str, Any]) -> dict[str, Any]:
  """Returns {"outer/inner": leaf} for the leaves with a shape. Optimizer states also have others."""
  leaves = flatten_state_dict(state_dict)
  return {name: leaf for name, leaf in leaves.items() if hasattr(leaf, "shape")}


def merge_state(
  state_dict: Mapping[str, Any], from_scratch_state: Mapping[str, Any], overwrite: bool = False
) -> dict[str, Any]:
  """Returns the union of two state dicts.

  Args:
    state_dict: the state whose leaves are preferred.
    from_scratch_state: the state that provides the missing leaves.
    overwrite: prefer the leaves of `from_scratch_state`.
  """
  state = flatten_state_dict(state_dict, keep_empty_nodes=True)
  scratch = flatten_state_dict(from_scratch_state, keep_empty_nodes=True)
  return unflatten_state_dict(state | scratch if overwrite else scratch | state)


def apply_assignment_map(
  ckpt_optimizer_state: Mapping[str, Any],
  optimizer_state: Mapping[str, Any],
  assignment_map: AssignmentMap,
  require_all_rules_match: bool = True,
  *,
  is_resuming: bool = False,
) -> dict[str, Any]:
  """Returns a checkpoint's state dict under the model's names (T5X's function and rules).

  For each name of the model, the first pattern that matches the whole name applies. The name gets
  the checkpoint's value that the replacement names (\\1 is the first group), or no value if the
  replacement is None. The other names of the model, and the checkpoint's values that are not used,
  are left as they are.

  Args:
    ckpt_optimizer_state: the checkpoint's nested state dict.
    optimizer_state: the model's nested state dict.
    assignment_map: pairs of a pattern for the model's names and a replacement or None.
    require_all_rules_match: raise an error for a pattern that matches no name.
    is_resuming: whether the checkpoint is the run's own, whose names need no renaming.

  Raises:
    ValueError: a replacement names a value that the checkpoint lacks, or a pattern matches no name.
  """
  if is_resuming:
    return dict(ckpt_optimizer_state)
  stored = flatten_state_dict(ckpt_optimizer_state)
  names = list(flatten_state_dict(optimizer_state))
  sources, unused = _find_sources(names, assignment_map, stored)
  if require_all_rules_match and unused:
    raise ValueError(_unused_rules_text(unused, names))
  moved = {name: stored[source] for name, source in sources.items() if source is not None}
  for name in moved:
    _log.info("assignment_map: %s takes the value of %s", name, sources[name])
  removed = set(sources.values()) | {name for name, source in sources.items() if source is None}
  kept = {name: leaf for name, leaf in stored.items() if name not in removed}
  # A name of the model that no rule matches keeps its value, even if another name uses it as well.
  unmatched = {name: stored[name] for name in names if name in stored and name not in sources}
  return unflatten_state_dict({**kept, **unmatched, **moved})


def _find_sources(
  names: Sequence[str], assignment_map: AssignmentMap, stored: Mapping[str, Any]
) -> tuple[dict[str, str | None], list[tuple[str, str | None]]]:
  """Returns {name: the stored name that a rule assigns to it, or None}, and the unused rules."""
  sources: dict[str, str | None] = {}
  unused = []
  for rule in assignment_map:
    pattern, replacement = rule
    remaining = [name for name in names if name not in sources]
    try:
      matches = list(filter(None, (re.fullmatch(pattern, name) for name in remaining)))
      expanded = [None if replacement is None else match.expand(replacement) for match in matches]
    except re.error as error:
      raise ValueError(
        f"RestoreCheckpointConfig.assignment_map: the rule {rule!r} is wrong: {error}"
      ) from None
    for match, source in zip(matches, expanded, strict=True):
      name = match.string
      if source is not None and source not in stored:
        raise ValueError(_missing_source_text(name, source, rule, stored))
      sources[name] = source
    if not matches:
      unused.append(rule)
  return sources, unused


def _missing_source_text(name: str, source: str, rule: Any, stored: Mapping[str, Any]) -> str:
  near = difflib.get_close_matches(source, stored, n=3)
  hint = f"similar names in it: {', '.join(near)}" if near else f"it has {len(stored)} others"
  return (
    f"RestoreCheckpointConfig.assignment_map: the rule {rule!r} assigns {source!r} to {name!r}, but "
    f"the checkpoint has no {source!r}; {hint}. Correct the replacement, or set it to None and set "
    "fallback_to_scratch = True"
  )


def _unused_rules_text(unused: Sequence[Any], names: Sequence[str]) -> str:
  near = difflib.get_close_matches(str(unused[0][0]), names, n=3, cutoff=0.4)
  hint = f"; names similar to the first: {', '.join(near)}" if near else ""
  return (
    f"RestoreCheckpointConfig.assignment_map: Unused patterns {[pattern for pattern, _ in unused]}: "
    f"each pattern must match a whole name of the model, such as {names[0]!r}{hint}"
  )


def upcycle(
  stored: Mapping[str, Any], expected: Mapping[str, Any], *, is_resuming: bool = False
) -> dict[str, Any]:
  """Returns a checkpoint's state dict in which arrays of dense blocks are repeated for each expert.

  Args:
    stored: the checkpoint's nested state dict, under the model's names (see `assignment_map`).
    expected: the model's nested state dict of leaves with `shape`.
    is_resuming: whether the checkpoint is the run's own, which has experts.
  """
  if is_resuming:
    return dict(stored)
  flat, wanted = flatten_state_dict(stored), flatten_state_dict(expected)
  for name in filter(_EXPERT.fullmatch, flat.keys() & wanted.keys()):
    shape = wanted[name].shape
    if flat[name].shape == shape[1:]:
      flat[name] = repeat(as_stored_array(flat[name]), shape[0])
  return unflatten_state_dict(flat)


def resize_vocabulary(
  stored: Mapping[str, Any], expected: Mapping[str, Any], *, is_resuming: bool = False
) -> dict[str, Any]:
  """Returns a checkpoint's state dict in which the tables of tokens have the model's number of rows.

  New rows are the mean of the old ones. The last rows are left out if there are too many.

  Args:
    stored: the checkpoint's nested state dict.
    expected: the model's.
    is_resuming: whether the checkpoint is the run's own, whose tables have the right size.
  """
  del is_resuming
  arrays, wanted = flatten_arrays(stored), flatten_arrays(expected)
  for name in arrays.keys() & wanted.keys():
    for pattern, axis in TOKEN_AXES.items():
      if pattern.fullmatch(name):
        arrays[name] = _resize(name, as_stored_array(arrays[name]), wanted[name].shape, axis)
  return unflatten_state_dict(arrays)


def _resize(name: str, array: StoredArray, shape: tuple[int, ...], axis: int) -> StoredArray:
  rows, needed = array.shape[axis], shape[axis]
  if rows == needed:
    return array
  change = f"the last {rows - needed} of its {rows} rows are left out"
  if rows < needed:
    change = f"{needed - rows} rows are added to its {rows}, with their mean as values"
  _log.warning("%s: %s (resize_vocabulary)", name, change)
  if rows > needed:
    return slice_axis(array, axis, 0, needed)
  mean = array.get().astype(np.float32).mean(axis, keepdims=True).astype(array.dtype)
  added = as_stored_array(np.repeat(mean, needed - rows, axis))
  return concatenate([array, added], axis)


def with_averages(arrays: Mapping[str, StoredArray]) -> dict[str, StoredArray]:
  """Returns a checkpoint's arrays with averages of the parameters, if it has any, in their place.

  They are those of `average_parameters`, or of a schedule-free optimizer: (y − (1 − b1)·z) / b1 for
  the stored parameters y.
  """
  averaged = dict(arrays)
  for prefix in [match[1] for match in map(_SCHEDULE_FREE.fullmatch, arrays) if match]:
    b1 = float(arrays[f"{prefix}b1"].get())
    for name in [name for name in arrays if name.startswith(f"{prefix}z/")]:
      target = f"target/{name.removeprefix(f'{prefix}z/')}"
      y, z = arrays[target], arrays[name]
      read = functools.partial(_extrapolate, y, z, b1)
      averaged[target] = StoredArray(y.shape, y.dtype, read, y.sliceable and z.sliceable)
  averages = ((match[1], match[0]) for match in map(_AVERAGE.fullmatch, arrays) if match)
  return averaged | {f"target/{parameter}": arrays[name] for parameter, name in averages}


def _extrapolate(y: StoredArray, z: StoredArray, b1: float, index: Index) -> np.ndarray:
  return (y.read(index) - (1 - b1) * z.read(index)) / b1
