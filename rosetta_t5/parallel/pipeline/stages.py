"""The program of a pipeline: each device of the mesh axis `pipeline` computes a part of the layers.

Outside, the axis splits the batch. Inside, microbatches pass from stage to stage in a ring of permutations,
together with the arrays that belong to their examples. The network is only known as a function.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rosetta_t5.parallel.mesh import BATCH_AXES, PIPELINE_AXIS
from rosetta_t5.parallel.pipeline.schedule import PipelineSchedule, Work

PyTree = Any
# (parameters, random keys) of consecutive layers, [L, ...], the numbers of a microbatch's rows in the whole
# batch, the microbatch, and what all microbatches share → the activations after these layers.
ApplyLayers = Callable[[PyTree, jax.Array, "StageInput", PyTree], jax.Array]

# The name of a layer's input, which every policy keeps (`jax.ad_checkpoint.checkpoint_name`).
LAYER_INPUT = "layer input"
# The primitives that select layers and convert their parameters to the compute dtype.
_SELECTIONS = ("dynamic_slice", "squeeze", "convert_element_type")


class StageInput(NamedTuple):
  """The arguments of a stage that have a row for each example: those of a microbatch or of several.

  Attributes:
    activations: the activations before the stage's layers.
    per_example: the other arguments, such as masks, which every stage needs.
  """

  activations: Any
  per_example: PyTree


@dataclasses.dataclass(frozen=True)
class _Stage:
  """What one device has of a pipeline.

  Attributes:
    index: the index of the stage.
    replica_index: the index of this copy of the pipeline; each copy computes different examples.
    layers: parameters and random keys of the layers, [R, ...].
    queue: this device's part of the batch, arrays of [groups, ...].
    shared: what all microbatches share.
  """

  index: jax.Array
  replica_index: jax.Array
  layers: PyTree
  queue: StageInput
  shared: PyTree


class _Flow(NamedTuple):
  """What one device passes from tick to tick.

  Attributes:
    arrived: the microbatch that the previous stage has computed.
    entering: a microbatch that has not been computed; at the first stage, the next one that enters.
    outputs: the activations after the last round, [S, groups, ...]. Every stage has such an array, and only
      that of the last stage is used.
  """

  arrived: StageInput
  entering: StageInput
  outputs: jax.Array


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """A stack of layers on several devices.

  Attributes:
    schedule: when which stage computes which microbatch.
    apply_layers: the layers.
    batch_size: the number of examples of the whole batch.
    batch_dims: a `StageInput` with the dimension of the examples in place of each array.
    remat_policy: the rematerialization policy of the layers (`jax.checkpoint_policies`); None saves everything.
  """

  schedule: PipelineSchedule
  apply_layers: ApplyLayers
  batch_size: int
  batch_dims: StageInput
  remat_policy: Callable[..., bool] | None = None

  def _round_policy(self, primitive: Any, *arrays: Any, **parameters: Any) -> bool:
    """Returns whether a result is kept for the backward pass if there are several rounds.

    The layers that a round selects are not, because they would be kept once per tick.
    """
    if primitive.name == "name":
      return bool(parameters["name"] == LAYER_INPUT)
    if primitive.name in _SELECTIONS:
      return False
    policy = self.remat_policy
    return policy is None or bool(policy(primitive, *arrays, **parameters))

  def __call__(self, params: PyTree, keys: PyTree, batch: StageInput, shared: PyTree) -> jax.Array:
    """Returns the activations of the whole batch after all layers.

    Args:
      params: the stacked parameters, [L, ...].
      keys: the random keys of the layers, [L, ...]; None if there are none.
      batch: the whole batch.
      shared: what all microbatches share.
    """
    mesh = jax.sharding.get_abstract_mesh().shape
    batch_axes = tuple(axis for axis in BATCH_AXES if axis in mesh)
    replica_axes = batch_axes[1:]
    replicas = math.prod(mesh[axis] for axis in replica_axes)
    on_stages, on_replicas = PartitionSpec(PIPELINE_AXIS), PartitionSpec(replica_axes)
    specs = jax.tree.map(lambda dim: PartitionSpec(*[None] * dim, batch_axes), self.batch_dims)
    mapped = jax.shard_map(
      self._run_stage,
      in_specs=(on_stages, on_replicas, on_stages, PartitionSpec(), specs, PartitionSpec()),
      out_specs=specs.activations,
      # All batch axes are manual, so that XLA sums gradients and gathers fsdp's shards once per step
      # instead of once per tick.
      axis_names=set(batch_axes),
      check_vma=False,
    )
    stage, replica = (jnp.arange(n, dtype=jnp.int32) for n in (self.schedule.stages, replicas))
    result: jax.Array = mapped(stage, replica, params, keys, batch, shared)
    return result

  def _run_stage(
    self,
    stage_1: jax.Array,
    replica_1: jax.Array,
    params: PyTree,
    keys: PyTree,
    batch: StageInput,
    shared: PyTree,
  ) -> jax.Array:
    """Returns the activations of this device's part of the batch after all layers."""
    schedule, index = self.schedule, stage_1[0]
    layers = (
      jax.tree.map(lambda p: _chunks_by_round(p, index, schedule), params),
      jax.tree.map(
        lambda k: k.reshape(schedule.rounds, schedule.stages, -1, *k.shape[1:])[:, index], keys
      ),
    )
    split = functools.partial(_split_groups, groups=schedule.groups)
    queue = jax.tree.map(split, batch, self.batch_dims)
    nothing = jax.tree.map(lambda array: jnp.zeros_like(array[0]), queue)
    outputs = jnp.zeros((schedule.stages, *queue.activations.shape), queue.activations.dtype)
    tick = functools.partial(_tick, self, _Stage(index, replica_1[0], layers, queue, shared))
    ticks = jnp.arange(schedule.ticks, dtype=jnp.int32)
    flow, _ = jax.lax.scan(tick, _Flow(nothing, nothing, outputs), ticks)
    # The last stage sends each part of the batch to the device that continues with it.
    received = jax.lax.all_to_all(flow.outputs, PIPELINE_AXIS, 0, 0, tiled=True)[-1]
    return _join_groups(received, self.batch_dims.activations)


def _tick(pipeline: Pipeline, stage: _Stage, flow: _Flow, tick: jax.Array) -> tuple[_Flow, None]:
  """Computes one microbatch and passes it on."""
  schedule = pipeline.schedule
  first, work = schedule.work_at(tick, 0), schedule.work_at(tick, stage.index)
  # When the first stage begins a group, each device has one of its microbatches. They move towards it.
  is_new_group = (first.round == 0) & (first.position == 0)
  entering = _select(is_new_group, _at(stage.queue, first.group), flow.entering)
  microbatch = _select((stage.index == 0) & (first.round == 0), entering, flow.arrived)
  rows = _row_numbers(pipeline, work, stage.replica_index, stage.queue)

  def compute(layers: PyTree, microbatch: StageInput) -> jax.Array:
    # For the backward pass, a loop keeps what it computes in each tick, but a constant selection only once.
    selected = _at(layers, 0 if schedule.rounds == 1 else work.round)
    return pipeline.apply_layers(selected, rows, microbatch, stage.shared)

  if schedule.rounds > 1:
    compute = jax.checkpoint(compute, prevent_cse=False, policy=pipeline._round_policy)
  activations = compute(stage.layers, microbatch)
  slot = (work.position, work.group)
  is_output = work.is_computed & (work.round == schedule.rounds - 1)
  outputs = flow.outputs.at[slot].set(jnp.where(is_output, activations, flow.outputs[slot]))
  arrived = _rotate(microbatch._replace(activations=activations), 1, schedule.stages)
  return _Flow(arrived, _rotate(entering, -1, schedule.stages), outputs), None


def _row_numbers(
  pipeline: Pipeline, work: Work, replica_index: jax.Array, queue: StageInput
) -> jax.Array:
  """Returns the numbers that the rows of a microbatch have in the whole batch."""
  groups = pipeline.schedule.groups
  rows = queue.activations.shape[1 + pipeline.batch_dims.activations]
  replicas = pipeline.batch_size // (pipeline.schedule.microbatches * rows)
  # The batch is split over stages, then over replicas, and each part over groups (`_split_groups`).
  first = (work.position * replicas + replica_index) * rows * groups + work.group
  return first + groups * jnp.arange(rows, dtype=jnp.int32)


def _chunks_by_round(stored: jax.Array, stage: jax.Array, schedule: PipelineSchedule) -> jax.Array:
  """Returns a parameter of the layers that a stage computes in each round, [R, ...].

  Args:
    stored: the parameter of the layers that the stage stores, stacked.
    stage: the index of the stage.
    schedule: the schedule.
  """
  chunks = stored.reshape(schedule.rounds, -1, *stored.shape[1:])
  if schedule.rounds == 1:
    return chunks
  received = jnp.zeros_like(chunks)
  for moves in schedule.chunk_permutations():
    sent_slot = jnp.asarray([chunk % schedule.rounds for chunk, _ in moves])[stage]
    rounds = {target: chunk // schedule.stages for chunk, target in moves}
    round_of = jnp.asarray([rounds[target] for target in range(schedule.stages)])[stage]
    pairs = [(chunk // schedule.rounds, target) for chunk, target in moves]
    chunk = jax.lax.ppermute(_at(chunks, sent_slot), PIPELINE_AXIS, pairs)
    received = received.at[round_of].set(chunk)
  return received


def _rotate(tree: PyTree, by: int, stages: int) -> PyTree:
  """Sends arrays to the stage `by` further on in the ring."""
  ring = [(stage, (stage + by) % stages) for stage in range(stages)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, PIPELINE_AXIS, ring), tree)


def _split_groups(x: jax.Array, dim: int, groups: int) -> jax.Array:
  """Returns a device's part of the batch as [groups, ...]; row i is in group i mod groups."""
  x = x.reshape(*x.shape[:dim], -1, groups, *x.shape[dim + 1 :])
  return jnp.moveaxis(x, dim + 1, 0)


def _join_groups(x: jax.Array, dim: int) -> jax.Array:
  """Undoes `_split_groups`."""
  x = jnp.moveaxis(x, 0, dim + 1)
  return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def _at(tree: PyTree, index: jax.Array | int) -> PyTree:
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def _select(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
