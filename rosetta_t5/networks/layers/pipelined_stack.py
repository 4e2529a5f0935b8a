"""Runs a stack of linen layers as a pipeline.

Results, including dropout masks, equal those of a scan.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning as flax_partitioning
from jax.ad_checkpoint import checkpoint_name

from rosetta_t5.kernels.xla_attention import bernoulli_of_rows
from rosetta_t5.networks.layers.decoding_cache import PRECOMPUTED
from rosetta_t5.parallel.mesh import BATCH_AXES, PIPELINE_AXIS, axis_names
from rosetta_t5.parallel.pipeline import LAYER_INPUT, Pipeline, StageInput, choose_schedule

PyTree = Any

# Layers that read or write these variables decode.
_DECODING = ("cache", PRECOMPUTED)


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
  """Inside the `with`, the rows are set, and no axis rule splits anything over the axes of the batch.

  Outside, the batch has these axes, so that no other dimension of an activation can have them. A rule
  like `embed` → (fsdp, context) must not apply inside either: it would take `context` from positions.
  """
  rules = [
    (name, axes)
    for name, axes in flax_partitioning.get_axis_rules()
    if not set(axis_names(axes)) & set(BATCH_AXES)
  ]
  token = _rows.set(rows)
  try:
    with flax_partitioning.axis_rules([*rules, ("batch", None)]):
      yield
  finally:
    _rows.reset(token)


class SplitArguments(NamedTuple):
  """The arguments of a layer as three trees of one structure, each with None in place of the others' leaves.

  Attributes:
    per_example: arrays with a row for each example, which travel with their microbatch.
    shared: arrays that are the same for all examples.
    constants: values that are not arrays.
  """

  per_example: PyTree
  shared: PyTree
  constants: PyTree

  @classmethod
  def of(cls, arguments: PyTree, batch_dim: Callable[[jax.Array], int | None]) -> SplitArguments:
    """Splits arguments.

    Args:
      arguments: the arguments.
      batch_dim: returns the dimension of the examples in an array; None if it has none.
    """

    def kind(leaf: Any) -> str:
      if not isinstance(leaf, jax.Array):
        return "constants"
      return "shared" if batch_dim(leaf) is None else "per_example"

    def only(name: str) -> PyTree:
      return jax.tree.map(lambda leaf: leaf if kind(leaf) == name else None, arguments)

    return cls(*map(only, cls._fields))

  def join(self) -> PyTree:
    """Returns the arguments."""
    return jax.tree.map(
      lambda *leaves: next((leaf for leaf in leaves if leaf is not None), None),
      *self,
      is_leaf=lambda leaf: leaf is None,
    )


def is_pipelined(module: nn.Module) -> bool:
  """Returns whether the stack `module` runs as a pipeline.

  During initialization and decoding it does not: its layers are scanned, and devices send each other
  their parameters.
  """
  if jax.sharding.get_abstract_mesh().shape.get(PIPELINE_AXIS, 1) == 1:
    return False
  if any(module.is_mutable_collection(name) for name in ("params", *_DECODING)):
    return False
  return not any(name in module.variables for name in _DECODING)


def call_pipeline(
  module: nn.Module,
  layer_cls: Any,
  policy: Any,
  num_layers: int,
  scan_name: str,
  x: jax.Array,
  *arguments: Any,
) -> jax.Array:
  """Returns the activations after all layers of `module`, like a scan with the same parameters.

  Args:
    module: the stack.
    layer_cls: the layers' class, rematerialized.
    policy: the rematerialization policy, one of `jax.checkpoint_policies`; None saves everything.
    num_layers: the number of layers.
    scan_name: the name of the stacked parameters.
    x: the activations before the first layer.
    *arguments: further arguments of every layer. Arrays whose batch has the batch size of `x` travel
      with their microbatch; all layers share the others.

  Raises:
    ValueError: the layers or the batch cannot be divided into stages and microbatches.
  """
  config: Any = module.config
  x_dim = 1 if config.transpose_batch_sequence else 0
  batch_size = x.shape[x_dim]

  def batch_dim(array: jax.Array) -> int | None:
    is_activation = array.ndim == 3 and jnp.issubdtype(array.dtype, jnp.floating)
    dim = x_dim if is_activation else 0
    return dim if array.ndim > dim and array.shape[dim] == batch_size else None

  split = SplitArguments.of(arguments, batch_dim)
  keys, num_traces = None, 1
  if module.has_rng("dropout"):
    keys, num_traces = _layer_keys(scan_name, num_layers)
  layer = layer_cls(config, parent=None)

  def apply_layers(layers: Any, rows: jax.Array, microbatch: StageInput, shared: Any) -> jax.Array:
    arguments = split._replace(per_example=microbatch.per_example, shared=shared).join()

    def apply_layer(x: jax.Array, params_and_key: Any) -> tuple[jax.Array, None]:
      params, key = params_and_key
      x = checkpoint_name(x, LAYER_INPUT)
      bound = layer.bind({"params": params}, rngs={} if key is None else {"dropout": key})
      # Each trace draws new keys from flax; a scan would keep those of its last trace.
      for _ in range(num_traces):
        output = bound(x, *arguments)[0]
      return output, None

    with _stage_context(MicrobatchRows(batch_size, rows)):
      return jax.lax.scan(apply_layer, microbatch.activations, layers)[0]

  params = module.variables["params"][scan_name]
  params = jax.tree.map(lambda p: jnp.moveaxis(p, config.param_scan_axis, 0), params)
  schedule = choose_schedule(jax.sharding.get_abstract_mesh().shape, batch_size, num_layers)
  dims = StageInput(x_dim, jax.tree.map(batch_dim, split.per_example))
  pipeline = Pipeline(schedule, apply_layers, batch_size, dims, policy)
  return pipeline(params, keys, StageInput(x, split.per_example), split.shared)


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
