"""What of a train state is stored, and in which dtypes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from rosetta_t5.checkpoints.arrays.state_dicts import flatten_state_dict, unflatten_state_dict
from rosetta_t5.parallel import BasePartitioner

PyTree = Any
SaveTransformation = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


@dataclasses.dataclass(frozen=True)
class ParameterInfo:
  """What a save-time state transformation is told of each leaf, beside its value.

  Attributes:
    name: the flat name in the train state.
    shape: the whole array's shape; None where it is not known.
    axes: how it is split over the mesh; None for not at all.
    ts_spec: its place in TensorStore, if it has one yet.
  """

  name: str
  shape: tuple[int, ...] | None = None
  axes: PartitionSpec | None = None
  ts_spec: Any = None

  @property
  def mesh_axes(self) -> PartitionSpec | None:
    """`axes`, by the name that T5X's Orbax manager has for it."""
    return self.axes


def get_local_data(x: Any) -> Any:
  """Returns the part of `x` that this process holds, as a numpy array if `x` is a jax array."""
  return np.asarray(x.addressable_data(0)) if isinstance(x, jax.Array) else x


def step_number(train_state: Any) -> int:
  """Returns the step of a train state as a Python integer."""
  step = train_state.step
  return int(step.get() if hasattr(step, "get_async") else get_local_data(step))


def transformed_state(
  train_state: Any,
  partitioner: BasePartitioner,
  transformations: Sequence[SaveTransformation],
) -> PyTree:
  """Returns the train state's nested dict after T5X's save-time `state_transformation_fns`.

  Args:
    train_state: what is saved.
    partitioner: knows how it is split.
    transformations: `fn(state_dict, parameter_infos)` returns both, changed.
  """
  state_dict = train_state.state_dict()
  if not transformations:
    return state_dict
  axes = flatten_state_dict(partitioner.get_mesh_axes(train_state).state_dict())
  flat = flatten_state_dict(state_dict)
  infos = unflatten_state_dict(
    {name: ParameterInfo(name, np.shape(leaf), axes.get(name)) for name, leaf in flat.items()}
  )
  for transform in transformations:
    state_dict, infos = transform(state_dict, infos)
  return state_dict


def stored_leaves(state_dict: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the flat dict of what is stored; as in T5X, leaves without an array are not."""
  flat = flatten_state_dict(state_dict)
  return {name: leaf for name, leaf in flat.items() if hasattr(leaf, "shape")}


def stored_dtype(name: str, leaf: Any, save_dtype: Any) -> Any:
  """Returns the dtype of a leaf on disk: only floating-point parameters are converted."""
  converts = name.startswith("target/") and jnp.issubdtype(leaf.dtype, jnp.floating)
  return save_dtype if converts and save_dtype is not None else leaf.dtype


def float_dtype(dtype: Any, field: str) -> Any:
  """Returns `dtype` (a name or a dtype) as a dtype; None stays None.

  Raises:
    ValueError: it is none of floating point.
  """
  if dtype is None:
    return None
  try:
    found = jnp.dtype(dtype)
  except TypeError:
    found = None
  if found is None or not jnp.issubdtype(found, jnp.floating):
    raise ValueError(f"{field} = {dtype!r} is no floating-point dtype: set 'float32' or 'bfloat16'")
  return found
