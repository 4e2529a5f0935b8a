"""The devices for which a program is traced, and how arrays are split over them.

This is the only state that layers and kernels read besides their arguments, and only this module reads and sets
it. It decides how results are computed, which changes them by no more than rounding. It consists of jax's mesh,
flax's axis rules, which users' networks read too, and the settings of pipelines.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from flax.linen import partitioning as flax_partitioning
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from rosetta_t5.parallel.axis_rules import LogicalAxisRules, count_parts
from rosetta_t5.parallel.mesh import BATCH_AXES, CONTEXT_AXIS, axis_names

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class PipelineSettings:
  """What a user can set about pipelines.

  Attributes:
    microbatches: the number of microbatches of a pipeline, a multiple of its stages; None for the
      largest number that divides the batch, up to four times the number of stages.
    rounds: how often a microbatch passes through all stages (interleaving). With more rounds, stages
      have fewer layers at a time, and the bubble is shorter.
  """

  microbatches: int | None = None
  rounds: int = 1


class Placement(NamedTuple):
  """The devices for which a program is traced, and how arrays are split over them.

  Attributes:
    mesh: the sizes of the mesh's axes, and the kind of its devices; empty for a single device.
    rules: which logical axes are split over which mesh axes.
    pipeline: how layers are computed on a mesh with the axis `pipeline`.
  """

  mesh: AbstractMesh
  rules: LogicalAxisRules
  pipeline: PipelineSettings

  @property
  def is_split(self) -> bool:
    """Whether there are rules and a mesh."""
    return bool(self.rules) and not self.mesh.empty


_pipeline: contextvars.ContextVar[PipelineSettings] = contextvars.ContextVar("pipeline")


def current() -> Placement:
  """Returns the placement of the program that is being traced."""
  mesh = jax.sharding.get_abstract_mesh()
  return Placement(mesh, flax_partitioning.get_axis_rules(), _pipeline.get(PipelineSettings()))


@contextlib.contextmanager
def use_placement(
  mesh: Mesh | AbstractMesh | None = None,
  rules: LogicalAxisRules | None = None,
  pipeline: PipelineSettings | None = None,
) -> Iterator[None]:
  """Inside the `with`, programs are traced for this placement; None keeps the present value."""
  with contextlib.ExitStack() as stack:
    if mesh is not None:
      use: Any = jax.set_mesh if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh
      stack.enter_context(use(mesh))
    if rules is not None:
      stack.enter_context(flax_partitioning.axis_rules(rules))
    if pipeline is not None:
      stack.callback(_pipeline.reset, _pipeline.set(pipeline))
    yield


def without_batch_axes() -> contextlib.AbstractContextManager[None]:
  """Returns a placement in which no axis rule splits anything over the axes of the batch.

  In a pipeline the batch has these axes, so that no other dimension of an activation can have them. A rule
  like `embed` → (fsdp, context) must not apply either: it would take `context` from positions.
  """
  rules = [
    (name, axes) for name, axes in current().rules if not set(axis_names(axes)) & set(BATCH_AXES)
  ]
  return use_placement(rules=[*rules, ("batch", None)])


def constrain(x: jax.Array, names: Sequence[str | None]) -> jax.Array:
  """Returns `x`, split as the axis rules specify; without rules or a mesh, returns it unchanged.

  It differs from flax's `with_sharding_constraint` in one case: a dimension that its mesh axes do not
  divide is not split, such as the single position of a decoding step under sequence parallelism.

  Args:
    x: an activation.
    names: the logical axis of each dimension, or None.
  """
  if not current().is_split:
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*dividing_axes(names, x.shape)))


def dividing_axes(names: Sequence[str | None], shape: Sequence[int]) -> tuple[Any, ...]:
  """Returns the mesh axes over which the axis rules split each dimension, as in a PartitionSpec.

  They are None for a dimension that is not split, for example because they do not divide it.

  Args:
    names: the logical axis of each dimension of an activation or a matmul, or None.
    shape: its sizes.
  """
  placement = current()
  if not placement.is_split:
    return (None,) * len(shape)
  spec = flax_partitioning.logical_to_mesh_axes(tuple(names), placement.rules) or ()
  counts = [count_parts(axes, placement.mesh.shape) for axes in spec]
  return tuple(
    axes if count > 1 and size % count == 0 else None
    for axes, size, count in zip(spec, shape, counts, strict=True)
  )


def map_over_batch(fn: Callable[[jax.Array], _Result], x: jax.Array) -> _Result:
  """Returns fn(x), where each device computes its own rows of the batch.

  Use it for operations that XLA cannot partition, such as top-k, and would otherwise compute on every
  device after an all-gather. Without axis rules or a mesh, or if these do not split the batch, it
  just calls `fn`.

  Args:
    fn: a function that treats each row independently, and returns arrays whose first dimension is the batch.
    x: [batch, ...].
  """
  (axes,) = dividing_axes(("batch",), x.shape[:1])
  if axes is None:
    return fn(x)
  rows = PartitionSpec(axes)
  mapped: _Result = jax.shard_map(fn, in_specs=rows, out_specs=rows)(x)
  return mapped


def count_shards(name: str) -> int:
  """Returns into how many parts the axis rules split the logical axis `name`; 1 without a mesh."""
  (axes,) = dividing_axes((name,), (0,))
  return count_parts(axes, current().mesh.shape)


def context_shards(*lengths: int) -> int:
  """Returns into how many parts the mesh axis `context` splits rows; 1 without a mesh.

  The result is 1 if it does not divide one of the lengths. Training refuses such lengths.
  """
  shards = current().mesh.shape.get(CONTEXT_AXIS, 1)
  return 1 if any(length % shards for length in lengths) else shards


def target_device() -> Any:
  """Returns a device of the mesh in use, or else jax's first device.

  The result has a `platform`, such as "gpu", and a `device_kind`. Code that asks for jax's default
  backend instead is wrong when it traces a GPU program on a machine without a GPU.
  """
  return current().mesh.abstract_device or jax.devices()[0]
