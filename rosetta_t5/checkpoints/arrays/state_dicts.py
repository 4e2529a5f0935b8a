"""State dicts, nested or flat with names like `target/encoder/norm/scale`, and changes of a checkpoint's.

A checkpoint's arrays can be renamed (`apply_assignment_map`), repeated for experts (`upcycle`), given
another number of tokens (`resize_vocabulary`) or replaced by their averages (`with_averages`).
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flax import traverse_util
from flax.core import unfreeze

from rosetta_t5.argument_types import near_hint
from rosetta_t5.checkpoints.arrays import lazy_arrays
from rosetta_t5.checkpoints.arrays.lazy_arrays import Arrays, StoredArray, as_stored_array

_SPEC_KEYS = frozenset({"driver", "kvstore", "metadata"})
AssignmentMap = Sequence[tuple[str, str | None]]

_EXPERT = re.compile(r"target/.*/expert/.*")
# The parameters with a row or a column for each token, and the axis of the tokens.
_TOKEN_AXES = {
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
  both = (state_dict, from_scratch_state)
  state, scratch = (flatten_state_dict(each, keep_empty_nodes=True) for each in both)
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
  sources, unused = _find_sources(names, assignment_map)
  if require_all_rules_match and unused:
    raise ValueError(
      f"RestoreCheckpointConfig.assignment_map: Unused patterns {unused}: each pattern must match a whole "
      f"name of the model, such as {names[0]!r}{near_hint(unused[0], names, cutoff=0.4)}"
    )
  assigned = {name: source for name, source in sources.items() if source is not None}
  for name, source in assigned.items():
    if source not in stored:
      raise ValueError(
        f"RestoreCheckpointConfig.assignment_map assigns {source!r} to {name!r}, but the checkpoint has no "
        f"{source!r}{near_hint(source, stored)}. Correct the replacement, or set it to None and set "
        "fallback_to_scratch = True"
      )
  removed = {source or name for name, source in sources.items()}
  # A name of the model that no rule matches keeps its value, even if another name uses it as well.
  unmatched = set(names) - sources.keys()
  kept = {n: leaf for n, leaf in stored.items() if n in unmatched or n not in removed}
  moved = {name: stored[source] for name, source in assigned.items()}
  return unflatten_state_dict({**kept, **moved})


def _find_sources(
  names: Sequence[str], assignment_map: AssignmentMap
) -> tuple[dict[str, str | None], list[str]]:
  """Returns {name: the stored name that the first matching rule assigns, or None}, and unused patterns."""
  sources: dict[str, str | None] = {}
  unused = []
  for pattern, replacement in assignment_map:
    try:
      matches = filter(None, (re.fullmatch(pattern, n) for n in names if n not in sources))
      found = {m.string: None if replacement is None else m.expand(replacement) for m in matches}
    except re.error as error:
      raise ValueError(
        f"RestoreCheckpointConfig.assignment_map: the rule {(pattern, replacement)!r} is wrong: {error}"
      ) from None
    sources |= found
    unused += [] if found else [pattern]
  return sources, unused


def upcycle(stored: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a checkpoint's state dict in which arrays of dense blocks are repeated for each expert.

  Args:
    stored: the checkpoint's nested state dict, under the model's names (see `assignment_map`).
    expected: the model's nested state dict of leaves with `shape`.
  """
  flat, wanted = flatten_state_dict(stored), flatten_state_dict(expected)
  for name in filter(_EXPERT.fullmatch, flat.keys() & wanted.keys()):
    shape = wanted[name].shape
    if flat[name].shape == shape[1:]:
      flat[name] = lazy_arrays.repeat(as_stored_array(flat[name]), shape[0])
  return unflatten_state_dict(flat)


def token_axis(name: str) -> int | None:
  """Returns the axis of a parameter that has an entry for each token; None if there is no such axis."""
  return next((axis for pattern, axis in _TOKEN_AXES.items() if pattern.fullmatch(name)), None)


def resize_vocabulary(stored: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a checkpoint's state dict in which the tables of tokens have the model's number of rows.

  New rows are the mean of the old ones. The last rows are left out if there are too many.

  Args:
    stored: the checkpoint's nested state dict.
    expected: the model's.
  """
  arrays, wanted = flatten_arrays(stored), flatten_arrays(expected)
  for name in arrays.keys() & wanted.keys():
    if (axis := token_axis(name)) is not None:
      arrays[name] = _resize(name, as_stored_array(arrays[name]), wanted[name].shape, axis)
  return unflatten_state_dict(arrays)


def _resize(name: str, array: StoredArray, shape: tuple[int, ...], axis: int) -> StoredArray:
  rows, needed = array.shape[axis], shape[axis]
  if rows == needed:
    return array
  _log.warning("%s: %d rows instead of %d (resize_vocabulary)", name, needed, rows)
  if rows > needed:
    return lazy_arrays.slice_axis(array, axis, 0, needed)
  mean = array.get().astype(np.float32).mean(axis, keepdims=True).astype(array.dtype)
  added = as_stored_array(np.repeat(mean, needed - rows, axis))
  return lazy_arrays.concatenate([array, added], axis)


def with_averages(arrays: Arrays) -> dict[str, StoredArray]:
  """Returns a checkpoint's arrays with averages of the parameters, if it has any, in their place.

  They are those of `average_parameters`, or of a schedule-free optimizer: (y − (1 − b1)·z) / b1 for
  the stored parameters y.
  """
  averaged = dict(arrays)
  for prefix in [match[1] for match in map(_SCHEDULE_FREE.fullmatch, arrays) if match]:
    b1 = float(arrays[f"{prefix}b1"].get())
    for name in [name for name in arrays if name.startswith(f"{prefix}z/")]:
      target = f"target/{name.removeprefix(f'{prefix}z/')}"
      averaged[target] = lazy_arrays.elementwise(
        lambda y, z, b1=b1: (y - (1 - b1) * z) / b1, arrays[target], arrays[name]
      )
  averages = ((match[1], match[0]) for match in map(_AVERAGE.fullmatch, arrays) if match)
  return averaged | {f"target/{parameter}": arrays[name] for parameter, name in averages}
