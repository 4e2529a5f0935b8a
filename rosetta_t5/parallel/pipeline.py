"""Pipelines: each device of the mesh axis `pipeline` computes a part of the layers.

The schedule says which stage computes which microbatch when: microbatches pass through the stages once per round.
Outside of the program, the axis splits the batch. Inside, microbatches pass from stage to stage in a ring of
permutations, together with the arrays that belong to their examples. The network is only known as a function.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rosetta_t5.parallel.mesh import BATCH_AXES, PIPELINE_AXIS
from rosetta_t5.parallel.placement import PipelineSettings, current

PyTree = Any
_SETTING = "partitioning.PjitPartitioner"
# By default, a pipeline of S stages has at most this times S microbatches.
_MICROBATCHES_PER_STAGE = 4
# The name of a layer's input, which every policy keeps (`jax.ad_checkpoint.checkpoint_name`).
LAYER_INPUT = "layer input"
# The primitives that select layers and convert their parameters to the compute dtype.
_SELECTIONS = ("dynamic_slice", "squeeze", "convert_element_type")
# (parameters, random keys) of consecutive layers, [L, ...], the numbers of a microbatch's rows in the whole
# batch, the microbatch, and what all microbatches share → the activations after these layers.
ApplyLayers = Callable[[PyTree, jax.Array, "StageInput", PyTree], jax.Array]


class Work(NamedTuple):
  """What a stage computes in one tick. Each field may be an array.

  Attributes:
    group: the number of the group of microbatches.
    position: the number of the microbatch in its group.
    round: how often the microbatch has passed through all stages before.
    is_computed: whether the stage has a microbatch; in the bubble it computes zeros or old numbers.
  """

  group: Any
  position: Any
  round: Any
  is_computed: Any


@dataclasses.dataclass(frozen=True)
class PipelineSchedule:
  """How microbatches pass through the stages of one stack of layers.

  Microbatches enter in groups of as many as there are stages. A group passes through all rounds before
  the next one enters, so the first stage is never idle while there is work, and no stage stores
  microbatches that wait. A tick is the time in which a stage computes one microbatch in one round.

  There are S stages, M microbatches (a multiple of S) and R rounds.
  """

  stages: int
  microbatches: int
  rounds: int = 1

  @property
  def groups(self) -> int:
    """The number of groups of microbatches."""
    return self.microbatches // self.stages

  @property
  def ticks(self) -> int:
    """The number of ticks: M·R, and S − 1 more until the last stage has worked too."""
    return self.microbatches * self.rounds + self.stages - 1

  @property
  def bubble(self) -> float:
    """The share of the ticks in which a stage has no microbatch: (S − 1) / (M·R + S − 1)."""
    return (self.stages - 1) / self.ticks

  def work_at(self, tick: Any, stage: Any) -> Work:
    """Returns what a stage computes in a tick; both may be arrays.

    A stage begins one tick after the stage before it. It computes the microbatches of a group one after
    another, in one round after another.
    """
    done = tick - stage
    passes = done // self.stages
    return Work(
      group=jnp.clip(passes // self.rounds, 0, self.groups - 1),
      position=done % self.stages,
      round=passes % self.rounds,
      is_computed=(done >= 0) & (done < self.microbatches * self.rounds),
    )

  def __str__(self) -> str:
    """Returns the schedule as text for a run's header."""
    rounds = f" in {self.rounds} rounds" if self.rounds > 1 else ""
    return (
      f"{self.stages} stages, {self.microbatches} microbatches{rounds}: a stage is idle for "
      f"{self.bubble:.1%} of the time (the bubble)"
    )

  def chunk_permutations(self) -> list[list[tuple[int, int]]]:
    """Returns how chunks of layers move from where they are stored to the stages that compute them.

    The layers are S·R chunks. Each stage stores R chunks that follow each other; but chunk c is computed
    by stage c mod S, in round c // S. In each of the R permutations, every stage sends one chunk and
    receives one. They are lists of (chunk, target stage), one for each sending stage, in their order.
    """
    stages, rounds = self.stages, self.rounds
    cycle = math.lcm(stages, rounds)
    steps: list[list[tuple[int, int]]] = [[] for _ in range(rounds)]
    for chunk in range(stages * rounds):
      # In a block of `rounds` chunks these numbers differ, and so they do among chunks of one stage.
      steps[(chunk + chunk // cycle) % rounds].append((chunk, chunk % stages))
    return steps


def choose_schedule(
  mesh_shape: Mapping[str, int], batch_size: int, num_layers: int, settings: PipelineSettings
) -> PipelineSchedule:
  """Returns the schedule of one stack of layers.

  Args:
    mesh_shape: the size of each mesh axis.
    batch_size: the examples in one pass, on all devices together.
    num_layers: the layers of the stack.
    settings: the user's.

  Raises:
    ValueError: the layers or the batch cannot be divided as the settings require.
  """
  stages, rounds = mesh_shape.get(PIPELINE_AXIS, 1), settings.rounds
  replicas = math.prod(mesh_shape.get(axis, 1) for axis in BATCH_AXES) // stages
  layers, rest = divmod(num_layers, stages)
  if rest:
    raise ValueError(
      f"{num_layers} layers cannot be split into the {stages} stages of {_SETTING}.mesh's 'pipeline': "
      f"set it to a divisor of {num_layers}"
    )
  if rounds < 1 or layers % rounds:
    raise ValueError(
      f"{_SETTING}.pipeline_rounds must divide the {layers} layers of each device ({num_layers} layers "
      f"in {stages} stages), got {rounds}"
    )
  if batch_size % (stages * replicas):
    raise ValueError(
      f"a pipeline of {stages} stages and {replicas} replicas needs a multiple of {stages * replicas} "
      f"examples in each pass, got {batch_size}: change BATCH_SIZE, or trainer.Trainer.num_microbatches, "
      f"or {_SETTING}.mesh"
    )
  rows, number = batch_size // replicas, settings.microbatches
  possible = [n for n in range(stages, rows + 1, stages) if rows % n == 0]
  if number is None:
    number = max(n for n in possible if n <= _MICROBATCHES_PER_STAGE * stages)
  if number not in possible:
    raise ValueError(
      f"{_SETTING}.pipeline_microbatches must be a multiple of the {stages} stages that divides the "
      f"{rows} examples of a replica, got {number}: set it to one of {possible}, or None"
    )
  return PipelineSchedule(stages, number, rounds)


class StageInput(NamedTuple):
  """The arguments of a stage that have a row for each example: those of a microbatch or of several.

  Attributes:
    activations: the activations before the stage's layers.
    per_example: the other arguments, such as masks, which every stage needs.
  """

  activations: Any
  per_example: PyTree


class _Stage(NamedTuple):
  """What one device has of a pipeline."""

  stage_index: jax.Array
  replica_index: jax.Array  # Each copy of the pipeline computes different examples.
  layers: PyTree  # parameters and random keys of the layers, [R, ...]
  queue: StageInput  # this device's part of the batch, arrays of [groups, ...]
  shared: PyTree  # what all microbatches share


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
    mesh = current().mesh.shape
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
    # Undoes `_split_groups`.
    dim = self.batch_dims.activations
    joined = jnp.moveaxis(received, 0, dim + 1)
    return joined.reshape(*joined.shape[:dim], -1, *joined.shape[dim + 2 :])


def _tick(pipeline: Pipeline, stage: _Stage, flow: _Flow, tick: jax.Array) -> tuple[_Flow, None]:
  """Computes one microbatch and passes it on."""
  schedule = pipeline.schedule
  first, work = schedule.work_at(tick, 0), schedule.work_at(tick, stage.stage_index)
  # When the first stage begins a group, each device has one of its microbatches. They move towards it.
  is_new_group = (first.round == 0) & (first.position == 0)
  entering = _select(is_new_group, _at(stage.queue, first.group), flow.entering)
  microbatch = _select((stage.stage_index == 0) & (first.round == 0), entering, flow.arrived)
  # The numbers of the microbatch's rows in the whole batch, which is split over stages, then over replicas,
  # and each part over groups (`_split_groups`).
  count = stage.queue.activations.shape[1 + pipeline.batch_dims.activations]
  replicas = pipeline.batch_size // (schedule.microbatches * count)
  part = work.position * replicas + stage.replica_index
  first_row = part * count * schedule.groups + work.group
  rows = first_row + schedule.groups * jnp.arange(count, dtype=jnp.int32)

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


def _chunks_by_round(stored: jax.Array, stage: jax.Array, schedule: PipelineSchedule) -> jax.Array:
  """Returns a parameter of the layers that a stage computes in each round, [R, ...].

  `stored` is the parameter of the layers that the stage stores, stacked.
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


def _at(tree: PyTree, index: jax.Array | int) -> PyTree:
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def _select(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
