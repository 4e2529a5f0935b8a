"""A feed-forward block with several experts, and the router that chooses among them."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.linen.partitioning import vmap_with_axes
from jaxtyping import Array, Bool, Float

from rosetta_t5.kernels import expert_routing
from rosetta_t5.kernels.expert_routing import Routing, combine_outputs, send_to_experts
from rosetta_t5.networks.expert_settings import LEFT_BEHIND_BY_ROW, ExpertSettings
from rosetta_t5.networks.layers.decoding_cache import PRECOMPUTED
from rosetta_t5.networks.layers.dense import DenseGeneral, MlpBlock
from rosetta_t5.networks.layers.matmuls import exact_matmul
from rosetta_t5.parallel.placement import constrain, count_shards, dividing_axes


class ExpertMlpBlock(nn.Module):
  """A router and several feed-forward blocks, each of which computes the tokens that it is sent.

  Parameters are `expert/…`, those of `MlpBlock` with the experts as their first dimension, and
  `router/router_weights/w/kernel`, as in the T5X checkpoints of Switch Transformer. Losses and
  statistics of the routing are sown in the collection `intermediates`, under T5X's names.

  Attributes:
    settings: the number of experts, and how tokens are routed.
    router: one of `ROUTERS`.
    row_axes: the logical axes of the input's first two dimensions.
    mlp_attributes: the attributes of each expert's `MlpBlock`.
  """

  settings: ExpertSettings
  router: str
  row_axes: tuple[str, str]
  mlp_attributes: dict[str, Any]

  @nn.compact
  def __call__(
    self, inputs: Float[Array, "X Y D"], deterministic: bool, real_BT: Bool[Array, "B T"] | None
  ) -> Float[Array, "X Y D"]:
    """Returns the block's output; 0 for tokens that no expert computes.

    Args:
      inputs: [B, T, D], or [T, B, D] where the length is first.
      deterministic: whether dropout and jitter are off, and the capacity is that of evaluation.
      real_BT: which tokens are not padding; None for all.
    """
    settings = self.settings
    is_length_first = self.row_axes[0] == "length"
    inputs_BTD = inputs.swapaxes(0, 1) if is_length_first else inputs
    group_shape = _group_shape(inputs_BTD.shape[0], inputs_BTD.shape[1], settings.router_group_size)
    x_GND = inputs_BTD.reshape(*group_shape, -1)
    x_GND = constrain(x_GND, ("batch", None, "embed"))
    jitter = 0.0 if deterministic else settings.router_jitter
    logits_GNE = Router(settings.num_experts, jitter, name="router")(x_GND)
    probs_GNE = jax.nn.softmax(logits_GNE, axis=-1)
    if real_BT is None or settings.route_padding:
      real_BT = jnp.ones(inputs_BTD.shape[:2], bool)
    real_GN = real_BT.reshape(group_shape)
    routing = self._route(probs_GNE, real_GN, deterministic)
    self._sow(logits_GNE, probs_GNE, real_BT, routing)
    x_GECD = send_to_experts(x_GND.astype(self.mlp_attributes["dtype"]), routing.token_GEC)
    y_GND = combine_outputs(self._compute(x_GECD, deterministic), routing, group_shape[1])
    y_BTD = constrain(y_GND, ("batch", None, "embed")).reshape(inputs_BTD.shape)
    return y_BTD.swapaxes(0, 1) if is_length_first else y_BTD

  def _route(self, probs_GNE: jax.Array, real_GN: jax.Array, deterministic: bool) -> Routing:
    settings, tokens = self.settings, probs_GNE.shape[1]
    slots = settings.count_slots(tokens, deterministic)
    normalize = settings.normalize_expert_weights
    normalize = self.router == "top_2" if normalize is None else normalize
    if self.router == "expert_choice":
      return expert_routing.route_experts(probs_GNE, real_GN, slots, normalize)
    choices = 2 if self.router == "top_2" else 1
    return expert_routing.route_tokens(probs_GNE, real_GN, choices, slots, normalize)

  def _sow(
    self, logits_GNE: jax.Array, probs_GNE: jax.Array, real_BT: jax.Array, routing: Routing
  ) -> None:
    if not self.is_mutable_collection("intermediates"):
      return
    real_GN = real_BT.reshape(probs_GNE.shape[:2])
    # Experts that choose their tokens have equal loads.
    balancing = jnp.zeros(())
    if self.router != "expert_choice":
      first_choice_GN = routing.first_choice_GN
      balancing = expert_routing.load_balancing_loss(probs_GNE, real_GN, first_choice_GN)
    left_behind_BT = expert_routing.tokens_left_behind(real_GN, routing).reshape(real_BT.shape)
    sown = {
      LEFT_BEHIND_BY_ROW: jnp.stack([left_behind_BT, real_BT], -1).sum(1, dtype=jnp.float32),
      "auxiliary_loss": balancing,
      "router_z_loss": expert_routing.router_z_loss(logits_GNE, real_GN),
      **expert_routing.routing_statistics(probs_GNE, real_GN, routing),
    }
    for name, value in sown.items():
      self.sow("intermediates", name, value)

  def _compute(self, x_GECD: jax.Array, deterministic: bool) -> jax.Array:
    """Returns the experts' outputs, [G, E, C, D].

    If experts are split over devices, the groups' first part, which is split over the same devices,
    is exchanged for them: this is the all-to-all of expert parallelism.
    """
    groups, experts, slots, width = x_GECD.shape
    parts = count_shards("expert")
    parts = 1 if groups % parts or experts % parts else parts
    (mesh_axes,) = dividing_axes(("expert",), (experts,))
    x_PQECD = x_GECD.reshape(parts, groups // parts, experts, slots, width)
    # The first dimension is split over the devices of experts: at first P, then E.
    axes = ("expert", "expert_replicas", None, None, "embed")
    x_PQECD = constrain(x_PQECD, axes)
    x_EQPCD = constrain(x_PQECD.transpose(2, 1, 0, 3, 4), axes)
    x_EQSD = x_EQPCD.reshape(experts, groups // parts, parts * slots, width)
    block_cls = vmap_with_axes(
      MlpBlock,
      variable_axes={"params": 0, OVERWRITE_WITH_GRADIENT: 0, PRECOMPUTED: 0},
      split_rngs={"params": True, "dropout": True},
      in_axes=(0, None, None),
      axis_size=experts,
      spmd_axis_name=mesh_axes,
      partitioning_axis_names={"params": "expert"},
    )
    row_axes = ("expert_replicas", "length")
    block = block_cls(
      **self.mlp_attributes, row_axes=row_axes, mlp_axis="expert_mlp", name="expert"
    )
    y_EQSD = block(x_EQSD, False, deterministic)
    y_EQPCD = y_EQSD.reshape(experts, groups // parts, parts, slots, width)
    y_EQPCD = constrain(y_EQPCD, axes)
    y_PQECD = constrain(y_EQPCD.transpose(2, 1, 0, 3, 4), axes)
    return y_PQECD.reshape(groups, experts, slots, width)


class Router(nn.Module):
  """The logits of the experts for each token, in float32 whatever the type of the activations.

  Attributes:
    num_experts: the number of experts.
    jitter: the inputs are multiplied by random factors from 1 − jitter to 1 + jitter.
  """

  num_experts: int
  jitter: float

  @nn.compact
  def __call__(self, x_GND: Float[Array, "G N D"]) -> Float[Array, "G N E"]:
    """Returns the logits."""
    x_GND = x_GND.astype(jnp.float32)
    if self.jitter and not self.is_initializing():
      key = self.make_rng("dropout")
      x_GND *= jax.random.uniform(key, x_GND.shape, minval=1 - self.jitter, maxval=1 + self.jitter)
    logits_GNE: jax.Array = _RouterWeights(self.num_experts, name="router_weights")(x_GND)
    return logits_GNE


class _RouterWeights(nn.Module):
  """The projection to logits. It is a module because T5X's checkpoints have its name."""

  num_experts: int

  @nn.compact
  def __call__(self, x_GND: jax.Array) -> Any:
    init, axes = nn.initializers.normal(2e-2), ("embed", "unmodeled")
    dense = DenseGeneral(
      self.num_experts, kernel_init=init, kernel_axes=axes, matmul=exact_matmul, name="w"
    )
    return dense(x_GND)


def _group_shape(rows: int, length: int, group_size: int | None) -> tuple[int, int]:
  """Returns the number of groups of tokens and their size.

  Groups are whole rows, and no group has rows of several devices. A decoding step has groups of one
  token, for which every expert has a slot, so that nothing is dropped.
  """
  if group_size is None or length == 1:
    return rows, length
  if group_size < length:
    raise ValueError(
      f"router_group_size of the network's config must be at least the length of a row, {length}, or None "
      f"for groups of one row, got {group_size}"
    )
  shards = count_shards("batch")
  local_rows = rows // shards if rows % shards == 0 else rows
  most = min(local_rows, group_size // length)
  per_group = max(n for n in range(1, most + 1) if local_rows % n == 0)
  return rows // per_group, per_group * length
