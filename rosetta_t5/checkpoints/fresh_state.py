"""What a checkpoint lacks and a run can make itself: optimizer state, counters, fp8's scales."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rosetta_t5.checkpoints.arrays.state_dicts import flatten_state_dict, unflatten_state_dict
from rosetta_t5.checkpoints.fit import FP8_COLLECTIONS, OPTIMIZER_STATE

_log = logging.getLogger(__name__)

_STEP = "state/step"


def completed(
  restored: Mapping[str, Any], train_state: Any, shardings: Mapping[str, Any], path: Any
) -> dict[str, Any]:
  """Returns a restored state dict with a fresh optimizer state, step and fp8 state where it has none.

  Args:
    restored: nested state dict; parameters are complete.
    train_state: the run's train state, or its shapes.
    shardings: flat dict of each leaf's sharding.
    path: the checkpoint, for what is said.
  """
  expected = train_state.state_dict()
  flat = flatten_state_dict(restored, keep_empty_nodes=True)
  leaves = {n: x for n, x in flatten_state_dict(expected).items() if hasattr(x, "shape")}
  missing = {name: leaf for name, leaf in leaves.items() if name not in flat}
  fresh = {n: _fp8_value(n, x) for n, x in missing.items() if n.startswith(FP8_COLLECTIONS)}
  if _STEP in missing:
    fresh[_STEP] = np.zeros(leaves[_STEP].shape, leaves[_STEP].dtype)
  placed = {name: jax.device_put(value, shardings[name]) for name, value in fresh.items()}
  states = [name for name in missing if name.startswith(OPTIMIZER_STATE)]
  if states:
    placed |= _optimizer_state(restored["target"], train_state, shardings, states)
  if missing:
    kinds = {_kind(name) for name in missing}
    _log.warning("checkpoint %s lacks %s, which starts afresh", path, " and ".join(sorted(kinds)))
  return unflatten_state_dict({**flat, **placed})


def _kind(name: str) -> str:
  if name == _STEP:
    return "the step"
  return "optimizer state" if name.startswith(OPTIMIZER_STATE) else "fp8 state"


def _optimizer_state(
  params: Any, train_state: Any, shardings: Mapping[str, Any], names: list[str]
) -> dict[str, jax.Array]:
  """Returns the named leaves of the optimizer's state of step 0, computed where they live."""

  def initial(params: Any) -> dict[str, jax.Array]:
    state = train_state.optimizer_def.init_state(params)
    fresh = train_state.replace(params=params, step=state.step, param_states=state.param_states)
    flat = flatten_state_dict(fresh.state_dict())
    return {name: jnp.asarray(flat[name]) for name in names}

  return jax.jit(initial, out_shardings={name: shardings[name] for name in names})(params)


def _fp8_value(name: str, leaf: Any) -> np.ndarray:
  """A scale begins at 1, a history of largest values at 0."""
  fill = 1 if name.rpartition("/")[2].endswith(("scale", "scale_inv")) else 0
  return np.full(leaf.shape, fill, leaf.dtype)
