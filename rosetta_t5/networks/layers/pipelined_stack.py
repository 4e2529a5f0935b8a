"""Calls a stack of layers as a pipeline: each device of the mesh axis `pipeline` has a part of the layers.

Outside the stack, `pipeline` splits the batch. Inside, microbatches pass from stage to stage in a ring of
permutations, together with the arguments that belong to their examples (`own`). Other arguments are the
same for all microbatches (`shared`).
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning as flax_partitioning
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.sharding import PartitionSpec

from rosetta_t5.kernels.random_rows import bernoulli_of_rows
from rosetta_t5.networks.layers.decoding_cache import PRECOMPUTED
from rosetta_t5.parallel.mesh_axes import BATCH_AXES, PIPELINE_AXIS, axis_names
from rosetta_t5.parallel.pipeline.schedule import PipelineSchedule, choose_schedule

PyTree = Any
# A layer as a function of its parameters, its dropout key, the activations and the other arguments.
ApplyLayer = Callable[..., jax.Array]

_WRITTEN = ("params", "cache", PRECOMPUTED, "intermediates")


class MicrobatchRows(NamedTuple):
  """Which rows of the whole batch a device computes at a time.

  Attributes:
    batch_size: the number of rows of the whole batch.
    rows: the numbers of the device's rows.
  """

  batch_size: int
  rows: jax.Array

  def bernoulli(self, key: jax.Array, p: float, shape: Sequence[int], axis: int) -> jax.Array:
    """Returns what `jax.random.bernoulli` draws for these rows when it draws for the whole batch.

    Args:
      key: the random key.
      p: the probability of True.
      shape: the shape of the result.
      axis: the dimension of the rows.
    """
    whole = list(shape)
    whole[axis] = self.batch_size
    return bernoulli_of_rows(key, p, tuple(whole), axis, self.rows)


_rows: contextvars.ContextVar[MicrobatchRows | None] = contextvars.ContextVar("rows", default=None)


def microbatch_rows() -> MicrobatchRows | None:
  """Returns the rows that are computed where a stage of a pipeline is traced; None elsewhere.

  Dropout draws the masks that these rows have in the whole batch, so that a pipeline drops the same
  numbers as one device does.
  """
  return _rows.get()


@contextlib.contextmanager
def _stage_context(rows: MicrobatchRows) -> Iterator[None]:
  """Inside the `with`, the rows are set and the axis rules mention no axis that splits the batch."""

  def without_batch_axes(axes: Any) -> Any:
    kept = tuple(axis for axis in axis_names(axes) if axis not in BATCH_AXES)
    return kept if len(kept) > 1 else kept[0] if kept else None

  rules = [(name, without_batch_axes(axes)) for name, axes in flax_partitioning.get_axis_rules()]
  token = _rows.set(rows)
  try:
    with flax_partitioning.axis_rules(rules):
      yield
  finally:
    _rows.reset(token)


def is_pipelined(module: nn.Module) -> bool:
  """Returns whether the stack `module` is called as a pipeline.

  It is not when it is initialized and when it writes or reads a cache: then the layers are scanned, and
  devices send each other their parameters.
  """
  if jax.sharding.get_abstract_mesh().shape.get(PIPELINE_AXIS, 1) == 1:
    return False
  if any(module.is_mutable_collection(name) for name in _WRITTEN):
    return False
  return not any(name in module.variables for name in ("cache", PRECOMPUTED))


def call_pipeline(
  module: nn.Module,
  layer_cls: Any,
  num_layers: int,
  scan_name: str,
  x: jax.Array,
  *arguments: Any,
) -> jax.Array:
  """Returns the activations after all layers of `module`, like a scan with the same parameters.

  Args:
    module: the stack.
    layer_cls: the layers' class, which may be rematerialized.
    num_layers: the number of layers.
    scan_name: the name of the stacked parameters.
    x: the activations before the first layer.
    *arguments: further arguments of every layer. Arrays whose batch has the batch size of `x` travel
      with their microbatch; all layers share the others.

  Raises:
    ValueError: the layers or the batch cannot be divided into stages and microbatches, or fp8 has
      delayed scaling.
  """
  if OVERWRITE_WITH_GRADIENT in module.variables:
    raise ValueError(
      "te_helper.TransformerEngineConfig.recipe = 'delayed' excludes a pipeline: set it to 'current', or "
      "remove 'pipeline' from partitioning.PjitPartitioner.mesh"
    )
  config: Any = module.config
  batch_axis = 1 if config.transpose_batch_sequence else 0
  batch_size = x.shape[batch_axis]
  schedule = choose_schedule(jax.sharding.get_abstract_mesh().shape, batch_size, num_layers)
  leaves, structure = jax.tree.flatten(arguments, is_leaf=lambda leaf: leaf is None)

  def axis_of(leaf: Any) -> int | None:
    """Returns the batch's dimension; None if all examples share the argument."""
    if not isinstance(leaf, jax.Array) or leaf.ndim == 0:
      return None
    axis = batch_axis if leaf.ndim == 3 and jnp.issubdtype(leaf.dtype, jnp.floating) else 0
    return axis if leaf.shape[axis] == batch_size else None

  axes = [axis_of(leaf) for leaf in leaves]
  layer = layer_cls(config, parent=None)

  def apply_layer(params: PyTree, key: Any, x: jax.Array, own: list[Any], shared: list[Any]) -> Any:
    own_leaves, shared_leaves = iter(own), iter(shared)
    all_leaves = [
      leaf
      if not isinstance(leaf, jax.Array)
      else next(shared_leaves if axis is None else own_leaves)
      for leaf, axis in zip(leaves, axes, strict=True)
    ]
    arguments = jax.tree.unflatten(structure, all_leaves)
    bound = layer.bind({"params": params}, rngs={} if key is None else {"dropout": key})
    for _ in range(num_traces):
      output = bound(x, *arguments)[0]
    return output

  keys, num_traces = None, 1
  if module.has_rng("dropout"):
    keys, num_traces = _layer_keys(scan_name, num_layers)
  own = [leaf for leaf, axis in zip(leaves, axes, strict=True) if axis is not None]
  shared = [
    leaf
    for leaf, axis in zip(leaves, axes, strict=True)
    if axis is None and isinstance(leaf, jax.Array)
  ]
  own_axes = [axis for axis in axes if axis is not None]
  return _run(
    apply_layer,
    schedule,
    batch_size,
    jax.tree.map(
      lambda p: jnp.moveaxis(p, config.param_scan_axis, 0), module.variables["params"][scan_name]
    ),
    keys,
    (x, own),
    (batch_axis, own_axes),
    shared,
  )


class _LayerKey(nn.Module):
  """Returns the dropout key of one layer of a scan.

  Attributes:
    on_trace: called whenever flax traces the layer.
  """

  on_trace: Callable[[], None]

  @nn.compact
  def __call__(self, carry: None) -> tuple[None, Any]:
    """Returns (None, the key and the names that flax will fold into it)."""
    assert self.scope is not None
    self.on_trace()
    return None, self.scope.rngs["dropout"]


def _layer_keys(scan_name: str, num_layers: int) -> tuple[PyTree, int]:
  """Returns the keys that the layers would have in a scan of this name, and how often it traces a layer.

  flax counts how many keys a layer has drawn, and goes on counting when it traces the layer again. Only
  the last trace becomes part of the program.
  """
  traces: list[None] = []
  scanned = nn.scan(_LayerKey, split_rngs={"dropout": True}, length=num_layers)
  keys = scanned(lambda: traces.append(None), name=scan_name)(None)[1]
  return keys, len(traces)


def _run(
  apply_layer: ApplyLayer,
  schedule: PipelineSchedule,
  batch_size: int,
  params: PyTree,
  keys: PyTree,
  batch: PyTree,
  axes: PyTree,
  shared: list[jax.Array],
) -> jax.Array:
  """Returns the activations after all layers.

  Args:
    apply_layer: the layer.
    schedule: the schedule.
    batch_size: the number of examples of the batch.
    params: stacked parameters, [L, ...].
    keys: the layers' dropout keys, [L]; None without dropout.
    batch: the activations, and the other arrays that have a batch.
    axes: the same tree with the batch's dimension.
    shared: what all microbatches share.
  """
  stages, rounds, groups = schedule.stages, schedule.rounds, schedule.groups
  mesh = jax.sharding.get_abstract_mesh().shape
  batch_axes = tuple(axis for axis in BATCH_AXES if axis in mesh)
  replica_axes = batch_axes[1:]
  replicas = math.prod(mesh[axis] for axis in replica_axes)
  on_stages = PartitionSpec(PIPELINE_AXIS)
  batch_specs = jax.tree.map(lambda axis: PartitionSpec(*[None] * axis, batch_axes), axes)
  chunk_rows = batch_size // stages // replicas

  def run_stages(
    indices: tuple[jax.Array, jax.Array],
    params: PyTree,
    keys: Any,
    batch: PyTree,
    shared: list[jax.Array],
  ) -> jax.Array:
    stage, replica = indices[0][0], indices[1][0]
    params = jax.tree.map(lambda p: p.reshape(rounds, -1, *p.shape[1:]), params)
    keys = jax.tree.map(lambda k: k.reshape(rounds, stages, -1, *k.shape[1:])[:, stage], keys)
    if rounds > 1:
      params = jax.tree.map(lambda p: _chunks_by_round(p, stage, schedule), params)
    queue = jax.tree.map(lambda array, axis: _split_groups(array, axis, groups), batch, axes)
    first = jax.tree.map(lambda array: array[0], queue)
    outputs = jnp.zeros((stages, *queue[0].shape), queue[0].dtype)

    def tick(carry: PyTree, time: jax.Array) -> tuple[PyTree, None]:
      arrived, entering, outputs = carry
      group, phase = time // (stages * rounds), time % (stages * rounds)
      entering = _select(phase == 0, _at(queue, jnp.minimum(group, groups - 1)), entering)
      x, own = _select((stage == 0) & (phase < stages), entering, arrived)
      # The stage began `stage` ticks after the first one.
      work = time - stage
      number, turn = work // stages, work % stages
      index, group = number % rounds, jnp.clip(number // rounds, 0, groups - 1)
      # The batch is split over stages, then over replicas, and a device's part over groups.
      first_row = (turn * replicas + replica) * chunk_rows + group
      rows = first_row + groups * jnp.arange(chunk_rows // groups, dtype=jnp.int32)
      with _stage_context(MicrobatchRows(batch_size, rows)):
        x = _run_chunk(apply_layer, _at(params, index), _at(keys, index), x, own, shared)
      is_output = (work >= 0) & (index == rounds - 1) & (work < schedule.microbatches * rounds)
      outputs = outputs.at[turn, group].set(jnp.where(is_output, x, outputs[turn, group]))
      arrived = _rotate((x, own), 1, stages)
      return (arrived, _rotate(entering, -1, stages), outputs), None

    zeros = jax.tree.map(jnp.zeros_like, first)
    (_, _, outputs), _ = jax.lax.scan(
      tick, (zeros, zeros, outputs), jnp.arange(schedule.ticks, dtype=jnp.int32)
    )
    # The last stage sends each chunk of the batch to the device that continues with it.
    received = jax.lax.all_to_all(outputs, PIPELINE_AXIS, 0, 0, tiled=True)[-1]
    return _join_groups(received, axes[0])

  mapped = jax.shard_map(
    run_stages,
    in_specs=(
      (on_stages, PartitionSpec(replica_axes)),
      on_stages,
      PartitionSpec(),
      batch_specs,
      PartitionSpec(),
    ),
    out_specs=batch_specs[0],
    # The gradients of parameters are summed over the batch axes once, after the last microbatch; and
    # those that `fsdp` splits are gathered once.
    axis_names=set(batch_axes),
    check_vma=False,
  )
  indices = (jnp.arange(stages, dtype=jnp.int32), jnp.arange(replicas, dtype=jnp.int32))
  result: jax.Array = mapped(indices, params, keys, batch, shared)
  return result


def _run_chunk(
  apply_layer: ApplyLayer, params: PyTree, keys: Any, x: jax.Array, own: Any, shared: Any
) -> jax.Array:
  """Returns the activations after the layers of one stage in one round."""

  def body(x: jax.Array, layer: tuple[PyTree, Any]) -> tuple[jax.Array, None]:
    return apply_layer(*layer, x, own, shared), None

  return jax.lax.scan(body, x, (params, keys))[0]


def _chunks_by_round(chunks: jax.Array, stage: jax.Array, schedule: PipelineSchedule) -> jax.Array:
  """Returns the stage's chunks in the order of the rounds, [R, ...], from those that it stores."""
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


def _split_groups(x: jax.Array, axis: int, groups: int) -> jax.Array:
  """Returns a device's part of the batch as [groups, ...]; row i is in group i mod groups."""
  x = x.reshape(*x.shape[:axis], -1, groups, *x.shape[axis + 1 :])
  return jnp.moveaxis(x, axis + 1, 0)


def _join_groups(x: jax.Array, axis: int) -> jax.Array:
  """Undoes `_split_groups`."""
  x = jnp.moveaxis(x, 0, axis + 1)
  return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _at(tree: PyTree, index: jax.Array) -> PyTree:
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def _select(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
