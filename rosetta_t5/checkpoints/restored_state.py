"""The train state of a checkpoint: its arrays on the devices, and initial values for missing state."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding

from rosetta_t5 import terminal
from rosetta_t5.checkpoints.arrays.averages import with_averages
from rosetta_t5.checkpoints.arrays.lazy_arrays import (
  StoredArray,
  as_stored_array,
  start_device_transfer,
)
from rosetta_t5.checkpoints.arrays.state_dicts import (
  flatten_arrays,
  flatten_state_dict,
  merge_state,
  unflatten_state_dict,
)
from rosetta_t5.checkpoints.arrays.tree_layouts import LayoutError, convert_layout
from rosetta_t5.checkpoints.arrays.vocabulary_rows import resize_vocabulary
from rosetta_t5.checkpoints.mismatch import (
  CheckpointMismatchError,
  find_restorable,
  is_optimizer_state,
)
from rosetta_t5.checkpoints.reading import DAMAGE_ERRORS, read_arrays, unreadable_error
from rosetta_t5.checkpoints.saved_state import leaf_dtype
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.parallel.partition_specs import partition_specs_of

PyTree = Any
RestoreTransformation = Callable[..., Any]

# Arrays are read concurrently up to this size, which bounds the host memory of a restore.
MAX_BYTES_IN_FLIGHT = 2 << 30

_log = logging.getLogger(__name__)


def restore_train_state(
  path: epath.PathLike,
  train_state: Any,
  partitioner: BasePartitioner,
  *,
  fallback_state: Mapping[str, Any] | None = None,
  **reading: Any,
) -> Any:
  """Returns the train state stored at `path`, sharded as the partitioner specifies.

  Args:
    train_state: the run's train state, or its shapes.
    fallback_state: nested state dict that provides what the checkpoint lacks. It also replaces
      optimizer state that does not match.
    **reading: arguments of `read_state`.
  """
  specs = flatten_state_dict(partition_specs_of(partitioner, train_state).state_dict())
  shardings = {name: NamedSharding(partitioner.mesh, spec) for name, spec in specs.items()}
  allow_missing = fallback_state is not None
  expected = train_state.state_dict()
  state_dict = read_state(path, expected, shardings, allow_missing=allow_missing, **reading)
  if fallback_state is not None:
    # `shardings` has a name for each array of the train state. Leaves without a value, which an
    # optimizer may have, come from `state_dict`.
    merged = flatten_state_dict(merge_state(state_dict, fallback_state))
    sharded = {name: jax.device_put(merged[name], shardings[name]) for name in shardings}
    state_dict = merge_state(unflatten_state_dict(sharded), state_dict)
  return train_state.restore_state(add_missing_state(state_dict, train_state, shardings, path))


def read_state(
  path: epath.PathLike,
  expected: Mapping[str, Any],
  shardings: Mapping[str, Any],
  *,
  params_dtype: Any = None,
  **matching: Any,
) -> dict[str, Any]:
  """Returns the nested state dict stored at `path`, each array on its devices.

  Names, shapes and dtypes are compared first, so a checkpoint that does not match costs no memory.

  Args:
    expected: nested state dict of the train state's leaves (`shape`, `dtype`).
    shardings: flat dict of the sharding of each leaf.
    params_dtype: the dtype of the floating-point parameters; None for the train state's.
    **matching: arguments of `find_matching_arrays`.

  Raises:
    CheckpointMismatchError: the checkpoint does not match.
    UnreadableCheckpointError: files are missing or damaged.
  """
  flat = flatten_state_dict(expected, keep_empty_nodes=True)
  # Optimizers have leaves without a value (None, empty states), which are not stored.
  valueless = {name: leaf for name, leaf in flat.items() if not hasattr(leaf, "shape")}
  arrays = {
    name: array.astype(leaf_dtype(name, flat[name].dtype, params_dtype))
    for name, array in find_matching_arrays(path, expected, **matching).items()
  }
  try:
    return unflatten_state_dict({**valueless, **_transfer_to_devices(arrays, shardings)})
  except DAMAGE_ERRORS as error:
    raise unreadable_error(path, error) from error


def find_matching_arrays(
  path: epath.PathLike,
  expected: Mapping[str, Any],
  *,
  arrays: Mapping[str, Any] | None = None,
  transformations: Sequence[RestoreTransformation] = (),
  allow_missing: bool = False,
  allow_unexpected: bool = False,
) -> dict[str, StoredArray]:
  """Returns the arrays of a checkpoint that a train state needs, by the train state's flat names.

  No value of a parameter is read. If the train state has no optimizer's state, as in inference, averages
  of the parameters take their place (see `with_averages`).

  Args:
    path: a checkpoint of any layout.
    expected: nested state dict of the train state's leaves (`shape`, `dtype`).
    arrays: the checkpoint's arrays by flat name, if they are open already.
    transformations: `fn(checkpoint's nested state dict, expected)` returns the first one renamed or
      changed. Its leaves are lazy arrays, which numpy functions read.
    allow_missing: leave out names that the checkpoint lacks and optimizer state that does not match.
    allow_unexpected: ignore names that only the checkpoint has.

  Raises:
    CheckpointMismatchError: the checkpoint does not match.
    UnreadableCheckpointError: files are missing or damaged.
  """
  wanted = flatten_arrays(expected)
  found = dict(read_arrays(path) if arrays is None else arrays)
  if not any(map(is_optimizer_state, wanted)):
    found = with_averages(found)
  if transformations:
    state: Any = unflatten_state_dict(found)
    for transform in transformations:
      state = transform(state, expected)
    found = flatten_arrays(state)
  try:
    converted = convert_layout({name: as_stored_array(x) for name, x in found.items()}, wanted)
  except LayoutError as error:
    raise CheckpointMismatchError(f"checkpoint {path}: {error}") from error
  # As in T5X, values that the user's transformations do not use are ignored.
  allow_unexpected = allow_unexpected or any(fn is not resize_vocabulary for fn in transformations)
  restorable = find_restorable(path, converted, wanted, allow_missing, allow_unexpected)
  return {name: converted[name] for name in wanted if name in restorable}


def add_missing_state(
  restored: Mapping[str, Any], train_state: Any, shardings: Mapping[str, Any], path: epath.PathLike
) -> dict[str, Any]:
  """Returns a restored state dict with initial optimizer state, step and fp8 state where it has none.

  Args:
    restored: nested state dict with all parameters.
    shardings: flat dict of the sharding of each leaf.
  """
  flat = flatten_state_dict(restored, keep_empty_nodes=True)
  leaves = flatten_arrays(train_state.state_dict())
  missing = {name: leaf for name, leaf in leaves.items() if name not in flat}
  if not missing:
    return dict(restored)
  states = list(filter(is_optimizer_state, missing))
  initial = {
    name: jax.device_put(_initial_value(name, leaf), shardings[name])
    for name, leaf in missing.items()
    if not is_optimizer_state(name)
  }
  if states:
    initial |= _initial_optimizer_state(restored["target"], train_state, shardings, states)
  kinds = " and ".join(sorted(set(map(_kind_of_state, missing))))
  # A folder of Hugging Face has no step, and inference needs none.
  level = logging.INFO if kinds == "step" and not states else logging.WARNING
  _log.log(level, "checkpoint %s has no %s, which is initialized", path, kinds)
  return unflatten_state_dict({**flat, **initial})


def _transfer_to_devices(
  arrays: Mapping[str, StoredArray], shardings: Mapping[str, Any]
) -> dict[str, jax.Array]:
  """Reads arrays onto their devices, several at a time within a limit of host memory."""
  transferred: dict[str, jax.Array] = {}
  pending: collections.deque[tuple[str, Callable[[], jax.Array]]] = collections.deque()
  bytes_in_flight = 0
  with terminal.progress_bar(
    "restoring", sum(x.nbytes for x in arrays.values()) / 1e9, "GB"
  ) as bar:

    def finish_first() -> int:
      name, finish = pending.popleft()
      transferred[name] = finish()
      bar.advance(arrays[name].nbytes / 1e9)
      return arrays[name].nbytes

    for name, array in arrays.items():
      while pending and bytes_in_flight + array.nbytes > MAX_BYTES_IN_FLIGHT:
        bytes_in_flight -= finish_first()
      pending.append((name, start_device_transfer(array, shardings[name])))
      bytes_in_flight += array.nbytes
    while pending:
      finish_first()
  return transferred


def _initial_optimizer_state(
  params: PyTree, train_state: Any, shardings: Mapping[str, Any], names: list[str]
) -> dict[str, jax.Array]:
  """Returns the named leaves of the optimizer's state at step 0, computed on their devices."""

  def init(params: PyTree) -> dict[str, jax.Array]:
    state = train_state.optimizer_def.init_state(params)
    fresh = train_state.replace(params=params, step=state.step, param_states=state.param_states)
    flat = flatten_state_dict(fresh.state_dict())
    return {name: jnp.asarray(flat[name]) for name in names}

  return jax.jit(init, out_shardings={name: shardings[name] for name in names})(params)


def _initial_value(name: str, leaf: Any) -> np.ndarray:
  """Returns 1 for a scale of fp8, and 0 for a history of maxima and for the step."""
  is_scale = name.rpartition("/")[2].endswith(("scale", "scale_inv"))
  return np.full(leaf.shape, 1 if is_scale else 0, leaf.dtype)


def _kind_of_state(name: str) -> str:
  if name == "state/step":
    return "step"
  return "optimizer state" if is_optimizer_state(name) else "fp8 state"
