"""Calling a stack of layers: one after another or as a scan, with or without rematerialization."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import flax.linen as nn
import jax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.linen.partitioning import ScanIn, scan_with_axes

from rosetta_t5.networks.expert_settings import has_experts
from rosetta_t5.networks.layers.decoding_cache import PRECOMPUTED
from rosetta_t5.networks.layers.dense import KFAC_FACTORS
from rosetta_t5.networks.layers.pipelined_stack import call_pipeline, is_pipelined

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


def remat_layer(
  layer_cls: type[nn.Module], policy: str, static_argnums: tuple[int, ...], scanned: bool = False
) -> Any:
  """Returns the layer's class, rematerialized so that only the values of `policy` are saved.

  `none` saves everything, `minimal` the matmuls with parameters (all but attention's own), `full` only
  the layer's input; the other policies are those of `jax.checkpoint_policies`. Numbers do not change.

  Args:
    layer_cls: the layer.
    policy: one of `REMAT_POLICIES`.
    static_argnums: the indices of the Python values among the call's arguments; self is 0.
    scanned: whether the layer is called in a scan, where XLA cannot undo the rematerialization.
  """
  if policy == "none":
    return layer_cls
  return nn.remat(
    layer_cls,
    policy=REMAT_POLICIES[policy],
    prevent_cse=not scanned,
    static_argnums=static_argnums,
  )


def call_layers(
  module: nn.Module,
  layer_cls: type[nn.Module],
  static_argnums: tuple[int, ...],
  num_layers: int,
  x: jax.Array,
  *arguments: Any,
  scan_name: str | None = None,
  expert_layers: Collection[int] = (),
) -> jax.Array:
  """Returns the activations after all layers of `module`.

  Args:
    module: the stack; its `config` is passed to the layers.
    layer_cls: called as layer_cls(config, has_experts=…, name=…), and rematerialized by `config.remat_policy`.
    static_argnums: see `remat_layer`.
    num_layers: the number of layers.
    x: the activations before the first layer.
    *arguments: further arguments of every layer's call.
    scan_name: None, or `config.scan_layers = False`, calls the layers `layers_0`, `layers_1`, … one
      after another. Otherwise one layer is scanned, which must return (activations, None). Its
      parameters are stored under this name, stacked along `config.param_scan_axis`. If every n-th layer
      has experts, n layers are scanned together, as `layers_0` to `layers_{n-1}` under this name.
    expert_layers: the numbers of the layers that have experts.
  """
  config: Any = module.config
  scanned = scan_name is not None and config.scan_layers
  rematerialized = remat_layer(layer_cls, config.remat_policy, static_argnums, scanned)
  if not scanned or scan_name is None:
    for layer in range(num_layers):
      flag = layer in expert_layers
      x = rematerialized(config, has_experts=flag, name=f"layers_{layer}")(x, *arguments)
    return x
  if is_pipelined(module):
    if reason := pipeline_obstacle(config, _collections_in_use(module)):
      raise ValueError(reason)
    policy = REMAT_POLICIES[config.remat_policy]
    return call_pipeline(module, rematerialized, policy, num_layers, scan_name, x, *arguments)
  axis = config.param_scan_axis
  period = _layers_per_iteration(num_layers, expert_layers)
  scanned_cls = scan_with_axes(
    rematerialized if period == 1 else LayerPeriod,
    # Parameters are outputs of the scan only when they are initialized.
    variable_axes={
      "params": axis if module.is_mutable_collection("params") else ScanIn(axis),
      "cache": 0,
      PRECOMPUTED: 0,
      "intermediates": 0,
      OVERWRITE_WITH_GRADIENT: 0,
      KFAC_FACTORS: 0,
    },
    split_rngs={"params": True, "dropout": True},
    in_axes=(nn.broadcast,) * len(arguments),
    length=num_layers // period,
    axis_name="layers",
  )
  options: dict[str, Any] = {"has_experts": bool(expert_layers)}
  if period > 1:
    expert_flags = tuple(layer in expert_layers for layer in range(period))
    options = {"layer_cls": rematerialized, "expert_flags": expert_flags}
  x, _ = scanned_cls(config, **options, name=scan_name)(x, *arguments)
  return x


def _collections_in_use(module: nn.Module) -> set[str]:
  """Returns the names of the variable collections that a module has or may write."""
  present = {name for name, values in module.variables.items() if values}
  mutable = module.scope.mutable if module.scope is not None else False
  if isinstance(mutable, (list, tuple, set, frozenset)):
    return present | set(mutable)
  if isinstance(mutable, str):
    return present | {mutable}
  return present | ({"intermediates"} if mutable else set())  # a filter, such as True


def pipeline_obstacle(config: Any, collections: Collection[str]) -> str | None:
  """Returns why the layers cannot run as a pipeline, and what to change; None if they can.

  Args:
    config: the network's config.
    collections: the variable collections that its layers read or write in training.
  """
  without_pipeline = "or remove 'pipeline' from partitioning.PjitPartitioner.mesh"
  if has_experts(config):
    return (
      f"{type(config).__name__}.num_experts = {config.num_experts} is not supported with a pipeline: set "
      "it to 0, or use the axis 'expert' instead of 'pipeline' in partitioning.PjitPartitioner.mesh"
    )
  if KFAC_FACTORS in collections:
    return (
      "precondition_by_kfac cannot measure the layers of a pipeline: set another OPTIMIZER, "
      + without_pipeline
    )
  if OVERWRITE_WITH_GRADIENT in collections:
    return (
      "te_helper.TransformerEngineConfig.recipe = 'delayed' is not supported with a pipeline: set it to "
      "'current', " + without_pipeline
    )
  others = sorted(set(collections) - {"params", "params_axes"})
  if others:
    return (
      "layers of a pipeline must have no variables other than parameters, got the collections "
      f"{', '.join(others)}: call the model without them, {without_pipeline}"
    )
  return None


class LayerPeriod(nn.Module):
  """The layers of one iteration of a scan, if only some of them have experts.

  Attributes:
    config: see `call_layers`.
    layer_cls: the class of the layers.
    expert_flags: whether each layer has experts.
  """

  config: Any
  layer_cls: Any
  expert_flags: tuple[bool, ...]

  @nn.compact
  def __call__(self, x: jax.Array, *arguments: Any) -> tuple[jax.Array, None]:
    """Returns (activations after the layers, None)."""
    for layer, flag in enumerate(self.expert_flags):
      module = self.layer_cls(self.config, has_experts=flag, name=f"layers_{layer}")
      x, _ = module(x, *arguments)
    return x, None


def _layers_per_iteration(num_layers: int, expert_layers: Collection[int]) -> int:
  """Returns the smallest number of layers whose repetition is the stack."""
  return next(
    period
    for period in range(1, num_layers + 1)
    if num_layers % period == 0
    and all((n in expert_layers) == (n % period in expert_layers) for n in range(num_layers))
  )
