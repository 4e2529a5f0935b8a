"""Runs a stack of linen layers as a pipeline.

Results, including dropout masks, equal those of a scan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from rosetta_t5.networks.layers.decoding_cache import PRECOMPUTED
from rosetta_t5.networks.layers.dropout import BatchRows
from rosetta_t5.parallel.mesh import PIPELINE_AXIS
from rosetta_t5.parallel.pipeline import LAYER_INPUT, Pipeline, StageInput, choose_schedule
from rosetta_t5.parallel.placement import current, without_batch_axes

PyTree = Any

# Layers that read or write these variables decode.
_DECODING = ("cache", PRECOMPUTED)


def is_pipelined(module: nn.Module) -> bool:
  """Returns whether the stack `module` runs as a pipeline.

  During initialization and decoding it does not: its layers are scanned, and devices send each other
  their parameters.
  """
  if current().mesh.shape.get(PIPELINE_AXIS, 1) == 1:
    return False
  if any(module.is_mutable_collection(name) for name in ("params", *_DECODING)):
    return False
  return not any(name in module.variables for name in _DECODING)


def call_pipeline(
  module: nn.Module, layer: Any, policy: Any, repeats: int, name: str, x: jax.Array, inputs: Any
) -> jax.Array:
  """Returns the activations after all layers of `module`, like a scan with the same parameters.

  Args:
    module: the stack.
    layer: what a scan would repeat, without a parent.
    policy: the rematerialization policy, one of `jax.checkpoint_policies`; None saves everything.
    repeats: how often it is repeated.
    name: the name of the stacked parameters.
    x: the activations before the first layer.
    inputs: the `LayerInputs` of every layer. Arrays with a row for each example travel with their
      microbatch; all layers share the others.

  Raises:
    ValueError: the layers or the batch cannot be divided into stages and microbatches.
  """
  config: Any = module.config
  x_dim = config.row_axes.index("batch")
  batch_size = x.shape[x_dim]
  leaves, structure = jax.tree.flatten(inputs)
  dims = jax.tree.leaves(inputs.batch_dims(x_dim))
  per_example = [leaf if dim >= 0 else None for leaf, dim in zip(leaves, dims, strict=True)]
  shared = [leaf if dim < 0 else None for leaf, dim in zip(leaves, dims, strict=True)]
  keys, num_traces = None, 1
  if module.has_rng("dropout"):
    keys, num_traces = _layer_keys(name, repeats)

  def apply_layers(layers: Any, rows: jax.Array, microbatch: StageInput, shared: Any) -> jax.Array:
    pairs = zip(microbatch.per_example, shared, strict=True)
    own = jax.tree.unflatten(structure, [b if a is None else a for a, b in pairs])
    own = dataclasses.replace(own, rows=BatchRows(rows, batch_size))

    def apply_layer(x: jax.Array, params_and_key: Any) -> tuple[jax.Array, None]:
      params, key = params_and_key
      x = checkpoint_name(x, LAYER_INPUT)
      bound = layer.bind({"params": params}, rngs={} if key is None else {"dropout": key})
      # Each trace draws new keys from flax; a scan would keep those of its last trace.
      for _ in range(num_traces):
        output = bound(x, own)[0]
      return output, None

    with without_batch_axes():
      return jax.lax.scan(apply_layer, microbatch.activations, layers)[0]

  params = module.variables["params"][name]
  params = jax.tree.map(lambda p: jnp.moveaxis(p, config.param_scan_axis, 0), params)
  placement = current()
  schedule = choose_schedule(placement.mesh.shape, batch_size, repeats, placement.pipeline)
  batch_dims = StageInput(x_dim, [dim if dim >= 0 else None for dim in dims])
  pipeline = Pipeline(schedule, apply_layers, batch_size, batch_dims, policy)
  return pipeline(params, keys, StageInput(x, per_example), shared)


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
