"""Rematerialisation: which of a layer's values are kept for its backward pass, and which made again."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax

_SAVED = jax.checkpoint_policies
# T5X's three, then jax's own names.
_POLICIES = {
  "none": None,
  "minimal": _SAVED.dots_with_no_batch_dims_saveable,
  "full": _SAVED.nothing_saveable,
  "dots_saveable": _SAVED.dots_saveable,
  "dots_with_no_batch_dims_saveable": _SAVED.dots_with_no_batch_dims_saveable,
  "nothing_saveable": _SAVED.nothing_saveable,
}
REMAT_POLICIES = tuple(_POLICIES)


def remat_layer(
  layer_cls: type[nn.Module], policy: str, static_arguments: tuple[int, ...], scanned: bool = False
) -> Any:
  """Returns the layer's class, such that of its values only those that `policy` names are kept.

  `none` keeps all, `minimal` the products with parameters (all but attention's own), `full` only the
  layer's input; the others are jax.checkpoint_policies' names. Numbers stay what they are.

  Args:
    layer_cls: the layer.
    policy: one of `REMAT_POLICIES`.
    static_arguments: places of the layer's Python values among its call's arguments, self being 0.
    scanned: whether the layer is called in a scan, where the compiler cannot undo it anyway.
  """
  if policy == "none":
    return layer_cls
  return nn.remat(
    layer_cls, policy=_POLICIES[policy], prevent_cse=not scanned, static_argnums=static_arguments
  )
