"""A stack of alike layers: one after another, or one program for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.linen.partitioning import ScanIn, scan_with_axes

from rosetta_t5.networks.layers.decoding_cache import KEPT


def scanned_stack(
  module: nn.Module, layer_cls: Any, name: str, num_layers: int
) -> Callable[..., jax.Array]:
  """Returns a function that scans all layers of `module` over activations and arguments they share.

  Args:
    module: the stack; its `config` has `param_scan_axis`.
    layer_cls: called as layer_cls(config, name=…); a layer returns (activations, None).
    name: of the stacked parameters.
    num_layers: how many layers.
  """

  def scan(x: jax.Array, *arguments: Any) -> jax.Array:
    config: Any = module.config
    axis = config.param_scan_axis
    scanned_cls = scan_with_axes(
      layer_cls,
      # Parameters leave the scan only where they are made.
      variable_axes={
        "params": axis if module.is_mutable_collection("params") else ScanIn(axis),
        "cache": 0,
        KEPT: 0,
        "intermediates": 0,
        OVERWRITE_WITH_GRADIENT: 0,
      },
      split_rngs={"params": True, "dropout": True},
      in_axes=(nn.broadcast,) * len(arguments),
      length=num_layers,
      axis_name="layers",
    )
    x, _ = scanned_cls(config, name=name)(x, *arguments)
    return x

  return scan
