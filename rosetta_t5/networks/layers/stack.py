"""A stack of layers: called one after another, scanned, or as a pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import struct
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.linen.partitioning import ScanIn, scan_with_axes

from rosetta_t5.networks.expert_settings import has_experts
from rosetta_t5.networks.layers.decoding_cache import PRECOMPUTED
from rosetta_t5.networks.layers.dropout import BatchRows
from rosetta_t5.networks.layers.matmuls import KFAC_FACTORS
from rosetta_t5.networks.layers.pipelined_stack import call_pipeline, is_pipelined
from rosetta_t5.networks.other_networks import setting_of

# The collection in which layers sow what they attend to of encoded inputs, [B, T, S], the mean of their heads'
# weights, if it is mutable.
CROSS_ATTENTION = "cross_attention"

# The collections of variables that layers may have besides parameters.
_COLLECTIONS = (
  "cache",
  "intermediates",
  CROSS_ATTENTION,
  PRECOMPUTED,
  OVERWRITE_WITH_GRADIENT,
  KFAC_FACTORS,
)

_SAVE = jax.checkpoint_policies
# T5X's three policies, then JAX's own names.
REMAT_POLICIES = {
  "none": None,
  "minimal": _SAVE.dots_with_no_batch_dims_saveable,
  "full": _SAVE.nothing_saveable,
  "dots_saveable": _SAVE.dots_saveable,
  "dots_with_no_batch_dims_saveable": _SAVE.dots_with_no_batch_dims_saveable,
  "nothing_saveable": _SAVE.nothing_saveable,
}


@struct.dataclass
class LayerInputs:
  """What all layers of a stack receive besides the activations.

  Attributes:
    visible: which query sees which key: a `Visibility`, or a mask [B, 1, T, S] for XLA's kernel; None in
      a decoding step.
    local_visible: the same in local layers.
    cross_visible: the same for encoded inputs.
    encoded: the encoded inputs, in the layout of activations inside the layers; None without an encoder.
    bias: T5's relative bias, [1, H, T, S], if the layers share it; with blocks [B, H, T, S + G].
    block_ids: the block of each token, [B, T]; see `global_blocks`. None if there are no blocks.
    positions: the position of each token, [B or 1, T]; None if no layer needs it.
    prefill_lengths: [B], the number of tokens in each prompt.
    rows: which rows of the whole batch these are; None for all.
    deterministic: whether dropout is off.
    decode: whether the tokens are one position, the one that follows those in the cache.
    prefill: whether the tokens are whole prompts, to be written into an existing cache.
    cache_length: the number of positions in the cache; None for the length of the activations.
  """

  visible: Any = None
  local_visible: Any = None
  cross_visible: Any = None
  encoded: Any = None
  bias: jax.Array | None = None
  block_ids: jax.Array | None = None
  positions: Any = None
  prefill_lengths: jax.Array | None = None
  rows: BatchRows | None = None
  deterministic: bool = struct.field(pytree_node=False, default=True)
  decode: bool = struct.field(pytree_node=False, default=False)
  prefill: bool = struct.field(pytree_node=False, default=False)
  cache_length: int | None = struct.field(pytree_node=False, default=None)

  def batch_dims(self, activation_dim: int) -> LayerInputs:
    """Returns the dimension of the examples in place of each array; -1 for arrays that all share.

    Args:
      activation_dim: the dimension of the examples in activations.
    """
    dims = jax.tree.map(lambda _: 0, self)
    positions = None if self.positions is None else 0 if self.positions.shape[0] > 1 else -1
    return dataclasses.replace(
      dims,
      encoded=None if self.encoded is None else activation_dim,
      bias=None if self.bias is None else 0 if self.bias.shape[0] > 1 else -1,
      positions=positions,
    )


def rematerialize(layer_cls: Any, policy: str, scanned: bool = False) -> Any:
  """Returns the layer's class, rematerialized so that only the values of `policy` are saved.

  `none` saves everything, `minimal` the matmuls with parameters (all but attention's own), `full` only
  the layer's input; the other policies are those of `jax.checkpoint_policies`. Numbers do not change.

  Args:
    layer_cls: the layer.
    policy: one of `REMAT_POLICIES`.
    scanned: whether the layer is called in a scan, where XLA cannot undo the rematerialization.
  """
  if policy == "none":
    return layer_cls
  return nn.remat(layer_cls, policy=REMAT_POLICIES[policy], prevent_cse=not scanned)


class Period(nn.Module):
  """Consecutive layers of different kinds, which one iteration of a scan computes.

  Attributes:
    config: the network's config.
    kinds: the kind of each layer.
    layer_cls: the class of the layers.
  """

  config: Any
  kinds: tuple[Any, ...]
  layer_cls: Any

  @nn.compact
  def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, None]:
    """Returns (activations after the layers, None)."""
    for layer, kind in enumerate(self.kinds):
      x, _ = self.layer_cls(self.config, kind, name=f"layers_{layer}")(x, inputs)
    return x, None


def run_stack(
  module: nn.Module,
  layer_cls: type[nn.Module],
  kinds: Sequence[Any],
  x: jax.Array,
  inputs: LayerInputs,
  scan_name: str,
) -> jax.Array:
  """Returns the activations after all layers of `module`.

  Without `config.scan_layers` the layers are called one after another, as `layers_0`, `layers_1`, ….
  Otherwise as many layers as the kinds need to repeat are scanned together: one layer if all are equal,
  whose stacked parameters are stored under `scan_name`; else several, `layers_0`, … under that name.

  Args:
    module: the stack; its `config` is passed to the layers.
    layer_cls: called as layer_cls(config, kind, name=…)(x, inputs); returns (x, None).
    kinds: the kind of each layer.
    x: the activations before the first layer.
    inputs: what all layers receive.
    scan_name: the name of the stacked parameters.

  Raises:
    ValueError: the layers cannot run as the pipeline that the mesh asks for.
  """
  config: Any = module.config
  rematerialized = rematerialize(layer_cls, config.remat_policy, config.scan_layers)
  if not config.scan_layers or not kinds:
    for layer, kind in enumerate(kinds):
      x, _ = rematerialized(config, kind, name=f"layers_{layer}")(x, inputs)
    return x
  period = shortest_period(kinds)
  repeats = len(kinds) // period
  scanned_cls: Any = rematerialized if period == 1 else Period
  arguments: tuple[Any, ...] = (config, kinds[0])
  if period > 1:
    arguments = (config, tuple(kinds[:period]), rematerialized)
  if is_pipelined(module):
    present, mutable = module.variables, module.is_mutable_collection
    in_use = [name for name in _COLLECTIONS if present.get(name) or mutable(name)]
    if reason := pipeline_obstacle(config, in_use):
      raise ValueError(reason)
    layer = scanned_cls(*arguments, parent=None)
    policy = REMAT_POLICIES[config.remat_policy]
    return call_pipeline(module, layer, policy, repeats, scan_name, x, inputs)
  axis = config.param_scan_axis
  scanned = scan_with_axes(
    scanned_cls,
    # Parameters are outputs of the scan only when they are initialized.
    variable_axes={
      "params": axis if module.is_mutable_collection("params") else ScanIn(axis),
      **dict.fromkeys(_COLLECTIONS, 0),
    },
    split_rngs={"params": True, "dropout": True},
    in_axes=(nn.broadcast,),
    length=repeats,
    axis_name="layers",
  )
  x, _ = scanned(*arguments, name=scan_name)(x, inputs)
  return x


def shortest_period(kinds: Sequence[Any]) -> int:
  """Returns the smallest number of layers whose repetition is the stack."""
  divisors = (n for n in range(1, len(kinds) + 1) if len(kinds) % n == 0)
  return next(n for n in divisors if list(kinds) == list(kinds[:n]) * (len(kinds) // n))


# Why layers with variables of a collection cannot run as a pipeline, and what to change.
_NOT_IN_PIPELINES = {
  OVERWRITE_WITH_GRADIENT: "te_helper.TransformerEngineConfig.recipe = 'delayed' is not supported with a "
  "pipeline: set it to 'current'",
  KFAC_FACTORS: "precondition_by_kfac cannot measure the layers of a pipeline: set another OPTIMIZER",
}


def pipeline_obstacle(config: Any, collections: Collection[str]) -> str | None:
  """Returns why the layers cannot run as a pipeline, and what to change; None if they can.

  Args:
    config: the network's config.
    collections: the variable collections that its layers read or write in training, besides parameters.
  """
  if has_experts(config):
    return (
      f"{type(config).__name__}.num_experts = {config.num_experts} is not supported with a pipeline: set "
      "it to 0, or use the axis 'expert' instead of 'pipeline' in partitioning.PjitPartitioner.mesh"
    )
  if setting_of(config, "merged_attention"):
    return (
      f"{type(config).__name__}.merged_attention = True is not supported with a pipeline: use the axis 'fsdp' "
      "instead of 'pipeline' in partitioning.PjitPartitioner.mesh"
    )
  if not collections:
    return None
  reason = (
    "layers of a pipeline must have no variables other than parameters, got the collections "
    f"{', '.join(sorted(collections))}: call the model without them"
  )
  for name, known_reason in _NOT_IN_PIPELINES.items():
    reason = known_reason if name in collections else reason
  return f"{reason}, or remove 'pipeline' from partitioning.PjitPartitioner.mesh"
