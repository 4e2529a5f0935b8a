"""Restores a checkpoint of any layout: renames its arrays, compares them with a train state's, and puts them on the devices."""

import collections
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding

from rosetta_t5 import terminal
from rosetta_t5.checkpoints import adapter_checkpoints, checkpoint_folders
from rosetta_t5.checkpoints.arrays import lazy_arrays, state_dicts
from rosetta_t5.checkpoints.arrays.lazy_arrays import Arrays, StoredArray
from rosetta_t5.checkpoints.arrays.parameter_trees import CheckpointMismatchError, convert_tree
from rosetta_t5.checkpoints.saved_items import leaf_dtype
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.parallel.axis_rules import partition_specs_of
from rosetta_t5.training.train_state import TrainState

RestoreTransformation = Callable[..., Any]

# Arrays are read concurrently up to this size, which bounds the host memory of a restore.
_MAX_CONCURRENT_BYTES = 2 << 30
# The collections in which flax's and Transformer Engine's fp8 layers keep their scales.
_FP8_COLLECTIONS = ("flax_mutables/_overwrite_with_gradient/", "flax_mutables/fp8_metas/")
_OPTIMIZER_STATE = "state/param_states/"
_MAX_ROWS = 20

_log = logging.getLogger(__name__)


class Mismatch(NamedTuple):
  """One difference between a checkpoint and a train state.

  Attributes:
    problem: "missing", "unexpected", "wrong shape" or "wrong dtype".
    name: the array's name.
    stored: its shape and dtype in the checkpoint.
    expected: its shape and dtype in the train state.
  """

  problem: str
  name: str
  stored: str = "-"
  expected: str = "-"


def restore_train_state(
  path: epath.PathLike,
  train_state: Any,
  partitioner: BasePartitioner,
  *,
  transformations: Sequence[RestoreTransformation] = (),
  params_dtype: Any = None,
  fallback_state: Mapping[str, Any] | None = None,
  allow_unexpected: bool = False,
) -> Any:
  """Returns the train state stored at `path`, sharded as the partitioner specifies.

  Names, shapes and dtypes are compared first, so a checkpoint that does not match costs no memory.

  Args:
    path: a checkpoint of any layout.
    train_state: the run's train state, or its shapes.
    transformations: see `find_matching_arrays`.
    params_dtype: the dtype of the floating-point parameters; None for the train state's.
    fallback_state: nested state dict that provides what the checkpoint lacks. It also replaces
      optimizer state that does not match.
    allow_unexpected: ignore names that only the checkpoint has.

  Raises:
    CheckpointMismatchError: the checkpoint does not match.
    UnreadableCheckpointError: files are missing or damaged.
  """
  specs = state_dicts.flatten_state_dict(partition_specs_of(partitioner, train_state).state_dict())
  shardings = {name: NamedSharding(partitioner.mesh, spec) for name, spec in specs.items()}
  expected = train_state.state_dict()
  flat = state_dicts.flatten_state_dict(expected, keep_empty_nodes=True)
  matching = find_matching_arrays(
    path,
    expected,
    transformations=transformations,
    allow_missing=fallback_state is not None,
    allow_unexpected=allow_unexpected,
    may_lack=_added_names(train_state),
  )
  converted = {
    # Frozen parameters may have a narrower dtype, which is kept.
    name: array.astype(leaf_dtype(name, own, params_dtype if own == jnp.float32 else None))
    for name, array in matching.items()
    for own in [flat[name].dtype]
  }
  # Optimizers have leaves without a value (None, empty states), which are not stored.
  restored = {name: leaf for name, leaf in flat.items() if not hasattr(leaf, "shape")}
  try:
    restored |= _transfer_to_devices(converted, shardings)
  except checkpoint_folders.DAMAGE_ERRORS as error:
    if base := checkpoint_folders.adapter_fact(path).get("base"):
      # The files of `path` itself have been compared with their checksums, so this is not damage of `path`.
      raise ValueError(
        f"the base {base} of the adapter in {path} cannot be read: {error}"
      ) from error
    raise checkpoint_folders.unreadable_error(path, error) from error
  for name, leaf in state_dicts.flatten_state_dict(fallback_state or {}).items():
    if name in shardings and name not in restored:
      restored[name] = jax.device_put(leaf, shardings[name])
  restored |= _initialize_missing(restored, train_state, shardings)
  if not transformations:  # They may change the base's values.
    adapter_checkpoints.check_base(path, checkpoint_folders.adapter_fact(path), restored)
  return train_state.restore_state(state_dicts.unflatten_state_dict(restored))


def find_matching_arrays(
  path: epath.PathLike,
  expected: Mapping[str, Any],
  *,
  arrays: Mapping[str, Any] | None = None,
  transformations: Sequence[RestoreTransformation] = (),
  allow_missing: bool = False,
  allow_unexpected: bool = False,
  may_lack: Collection[str] = (),
) -> dict[str, StoredArray]:
  """Returns the arrays of a checkpoint that a train state needs, by the train state's flat names.

  No value of a parameter is read. If the train state has no optimizer state, as in inference, averages
  of the parameters take their place (see `with_averages`).

  Args:
    path: a checkpoint of any layout.
    expected: nested state dict of the train state's leaves (`shape`, `dtype`).
    arrays: the checkpoint's arrays by flat name, if they are open already.
    transformations: `fn(checkpoint's nested state dict, expected)` returns the first one renamed or
      changed. Its leaves are lazy arrays, which numpy functions read.
    allow_missing: leave out names that the checkpoint lacks and optimizer state that does not match.
    allow_unexpected: ignore names that only the checkpoint has.
    may_lack: names that the checkpoint may lack.

  Raises:
    CheckpointMismatchError: the checkpoint does not match.
    UnreadableCheckpointError: files are missing or damaged.
  """
  wanted = state_dicts.flatten_arrays(expected)
  found = dict(checkpoint_folders.read_arrays(path) if arrays is None else arrays)
  fact = checkpoint_folders.adapter_fact(path)
  if adapter_checkpoints.is_merged(wanted, fact):
    found = adapter_checkpoints.merge(found, fact)
  if not any(map(_is_optimizer_state, wanted)):
    found = state_dicts.with_averages(found)
  if transformations:
    state: Any = state_dicts.unflatten_state_dict(found)
    for transform in transformations:
      state = transform(state, expected)
    found = state_dicts.flatten_arrays(state)
  converted = convert_tree({n: lazy_arrays.as_stored_array(x) for n, x in found.items()}, wanted)
  converted = adapter_checkpoints.quantize(converted, wanted)
  # As in T5X, values that the user's transformations do not use are ignored.
  changes_names = any(fn is not state_dicts.resize_vocabulary for fn in transformations)
  allowed = {"missing": allow_missing, "unexpected": allow_unexpected or changes_names}
  expected_here = {n: x for n, x in wanted.items() if n in converted or n not in may_lack}
  restorable = _find_restorable(path, converted, expected_here, allowed)
  return {name: converted[name] for name in wanted if name in restorable}


def _is_optimizer_state(name: str) -> bool:
  """Returns whether an array of a train state belongs to the optimizer."""
  return name.startswith(_OPTIMIZER_STATE)


def find_mismatches(stored: Mapping[str, Any], expected: Mapping[str, Any]) -> list[Mismatch]:
  """Returns all differences between two flat dicts of leaves with `shape` and `dtype`.

  Args:
    stored: the checkpoint's arrays, by name.
    expected: the train state's, by name. If it has no optimizer state at all, as in inference, the
      checkpoint's optimizer state is ignored.
  """
  missing = sorted(set(expected) - set(stored))
  unexpected = sorted(set(stored) - set(expected))
  if not any(map(_is_optimizer_state, expected)):
    unexpected = [name for name in unexpected if not _is_optimizer_state(name)]
  mismatches = [Mismatch("missing", name, expected=_describe(expected[name])) for name in missing]
  mismatches += [Mismatch("unexpected", n, stored=_describe(stored[n])) for n in unexpected]
  for name in sorted(set(stored) & set(expected)):
    found, wanted = stored[name], expected[name]
    if tuple(found.shape) != tuple(wanted.shape):
      mismatches.append(Mismatch("wrong shape", name, _describe(found), _describe(wanted)))
    elif _dtype_kind(found.dtype) != _dtype_kind(wanted.dtype):
      mismatches.append(Mismatch("wrong dtype", name, _describe(found), _describe(wanted)))
  return mismatches


def _find_restorable(
  path: Any, stored: Mapping[str, Any], expected: Mapping[str, Any], allowed: Mapping[str, bool]
) -> set[str]:
  """Returns the names of `expected` that can be restored from `stored`.

  `allowed` says which differences are accepted, "missing" and "unexpected" names. With "missing", optimizer
  state that does not match is left out. Otherwise, if nothing but optimizer state differs, all of it is left out.

  Raises:
    CheckpointMismatchError: there is another difference.
  """
  has_state = any(map(_is_optimizer_state, stored))
  mismatches = find_mismatches(stored, expected)
  omitted = {mismatch.name for mismatch in mismatches}
  only_state_differs = has_state and omitted and all(map(_is_optimizer_state, omitted))
  if only_state_differs and not allowed["missing"]:
    _log.warning(
      f"checkpoint {path} was written with a different OPTIMIZER, or with layers stacked differently: "
      f"its optimizer state is not used, and this run's is initialized\n{_table(mismatches)}"
    )
    return set(itertools.filterfalse(_is_optimizer_state, expected))
  # The beginnings of the names that are initialized wherever the checkpoint differs.
  prefixes = {_OPTIMIZER_STATE: allowed["missing"] or not has_state, "state/step": not has_state}
  initialized = (*_FP8_COLLECTIONS, *filter(prefixes.get, prefixes))
  if refused := [
    m for m in mismatches if not (allowed.get(m.problem) or m.name.startswith(initialized))
  ]:
    raise mismatch_error(path, refused)
  # A Hugging Face folder has neither a step nor optimizer state, and inference needs none.
  usual = ("state/step", *(() if has_state else (_OPTIMIZER_STATE,)))
  if shown := [mismatch for mismatch in mismatches if not mismatch.name.startswith(usual)]:
    _log.warning(
      f"checkpoint {path} does not match: what it lacks is initialized, and what only it has is not used "
      f"({_summary(shown)}, such as {shown[0].name})"
    )
  # A parameter's optimizer state is restored as a whole or not at all.
  incomplete = {name.rpartition("/")[0] for name in filter(_is_optimizer_state, omitted)}
  return {n for n in expected.keys() - omitted if n.rpartition("/")[0] not in incomplete}


def mismatch_error(path: Any, mismatches: Sequence[Mismatch]) -> CheckpointMismatchError:
  """Returns the error that shows the mismatches of the checkpoint at `path` in one table."""
  options = {
    "missing": " RestoreCheckpointConfig.fallback_to_scratch = True initializes what is missing.",
    "unexpected": " RestoreCheckpointConfig.strict = False ignores what only the checkpoint has.",
    "no decoder": " It may be an encoder without a decoder, of which `rosetta-t5 embed` makes vectors.",
    "tokens": " RestoreCheckpointConfig.resize_vocabulary = True adds rows for tokens (the mean of the "
    "others), or leaves out the last ones.",
  }
  kinds = {mismatch.problem for mismatch in mismatches}
  wrong = (m.name for m in mismatches if m.problem == "wrong shape")
  kinds |= {"tokens" for name in wrong if state_dicts.token_axis(name) is not None}
  lacked = [m.name for m in mismatches if m.problem == "missing" and "/decoder/" in m.name]
  if len(lacked) == len(mismatches) and any("/decoder_norm/" in name for name in lacked):
    kinds |= {"no decoder"}
  return CheckpointMismatchError(
    f"checkpoint {path} does not match this run's model: {_summary(mismatches)}\n{_table(mismatches)}\n"
    f"To use the checkpoint, give the gin file with which it was trained (see config.gin beside {path}). To "
    "train from scratch instead, set an empty folder (--gin.MODEL_DIR=\"'...'\") and no "
    f"INITIAL_CHECKPOINT_PATH.{''.join(text for kind, text in options.items() if kind in kinds)}"
  )


def _summary(mismatches: Sequence[Mismatch]) -> str:
  counts = collections.Counter(mismatch.problem for mismatch in mismatches)
  return ", ".join(f"{count} {problem}" for problem, count in counts.items())


def _table(mismatches: Sequence[Mismatch]) -> str:
  # Parameters come first: they identify the model better than the optimizer's state does.
  ordered = sorted(mismatches, key=lambda mismatch: _is_optimizer_state(mismatch.name))
  rows = [Mismatch("problem", "name", "checkpoint", "model"), *ordered[:_MAX_ROWS]]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  template = "".join(f"  {{:<{width}}}" for width in widths)
  lines = [template.format(*row).rstrip() for row in rows]
  if len(mismatches) > _MAX_ROWS:
    lines.append(f"  ... and {len(mismatches) - _MAX_ROWS} more")
  return "\n".join(lines)


def _describe(leaf: Any) -> str:
  return f"{tuple(leaf.shape)} {np.dtype(leaf.dtype).name}"


def _dtype_kind(dtype: Any) -> str:
  """Returns the kind of a dtype: floats of any width convert into each other, as do integers."""
  if jnp.issubdtype(dtype, jnp.floating):
    return "float"
  return "int" if jnp.issubdtype(dtype, jnp.integer) else np.dtype(dtype).name


def _transfer_to_devices(arrays: Arrays, shardings: Mapping[str, Any]) -> dict[str, jax.Array]:
  """Reads arrays onto their devices, several at a time within a limit of host memory."""
  transferred: dict[str, jax.Array] = {}
  pending: collections.deque[tuple[str, Callable[[], jax.Array]]] = collections.deque()
  total = sum(array.nbytes for array in arrays.values())
  with terminal.progress_bar("restoring", total / 1e9, "GB") as bar:

    def finish_first(limit: int) -> None:
      while pending and sum(arrays[name].nbytes for name, _ in pending) > limit:
        name, finish = pending.popleft()
        transferred[name] = finish()
        bar.advance(arrays[name].nbytes / 1e9)

    for name, array in arrays.items():
      finish_first(_MAX_CONCURRENT_BYTES - array.nbytes)
      pending.append((name, lazy_arrays.start_device_transfer(array, shardings[name])))
    finish_first(-1)
  return transferred


def _added_names(train_state: Any) -> list[str]:
  """Returns the names of the parameters that an adapter adds, which a checkpoint of its base lacks."""
  if not isinstance(train_state, TrainState):
    return []
  params = state_dicts.flatten_state_dict(train_state.params)
  added = jax.eval_shape(train_state.optimizer_def.added_values, params)
  return [f"target/{name}" for name in added]


def _initialize_missing(
  restored: Mapping[str, Any], train_state: Any, shardings: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns what an adapter adds, optimizer state, step and fp8 state, by flat name, where a checkpoint has none.

  Args:
    restored: flat dict with all parameters of the network itself.
    shardings: flat dict of the sharding of each leaf.
  """
  leaves, added = state_dicts.flatten_arrays(train_state.state_dict()), _added_names(train_state)
  initial, computed = {}, []
  for name in (name for name in leaves if name not in restored):
    if name in added or _is_optimizer_state(name):
      computed.append(name)
      continue
    # fp8 scales start at 1; the step and the amax histories at 0.
    is_scale = name.rpartition("/")[2].endswith(("scale", "scale_inv"))
    value = np.full(leaves[name].shape, 1 if is_scale else 0, leaves[name].dtype)
    initial[name] = jax.device_put(value, shardings[name])

  def init(own: Any) -> dict[str, jax.Array]:
    optimizer = train_state.optimizer_def
    params = state_dicts.unflatten_state_dict({**optimizer.added_values(own), **own})
    state = optimizer.init_state(params)
    fresh = train_state.replace(params=params, step=state.step, param_states=state.param_states)
    flat = state_dicts.flatten_state_dict(fresh.state_dict())
    return {name: jnp.asarray(flat[name]) for name in computed}

  if computed:
    own = {n.removeprefix("target/"): x for n, x in restored.items() if n.startswith("target/")}
    initial |= jax.jit(init, out_shardings={name: shardings[name] for name in computed})(own)
  return initial
