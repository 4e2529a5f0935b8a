"""Sums of blocks of tokens as additional keys of an encoder: LongT5's transient global attention.

A row is divided into blocks from its first position. Tokens after the last complete block belong to that block,
and padding to none (Guo et al. 2022, "LongT5", arXiv:2112.07916, section 3.2).
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rosetta_t5.networks.config import NetworkConfig
from rosetta_t5.networks.layers.positions import bias_table, relative_position_bucket


def block_ids_of(config: NetworkConfig, visible: Any) -> Int[Array, "B T"] | None:
  """Returns the block of each token; None if the network has no blocks.

  It is -1 for padding, and for all tokens of a row without a complete block.

  Args:
    config: sizes and settings.
    visible: the `Visibility` of a row's tokens.

  Raises:
    ValueError: rows are packed.
  """
  if config.global_block_size is None:
    return None
  if visible.packed:
    raise ValueError(
      f"{config.name}.global_block_size = {config.global_block_size} does not support packed examples, whose "
      "blocks would overlap: set pack = False for train/utils.DatasetConfig and train_eval/utils.DatasetConfig"
    )
  real_BT, size = visible.query_BT > 0, config.global_block_size
  position_T = jnp.arange(real_BT.shape[1])
  is_end_T = position_T % size == size - 1
  last_B1 = jnp.sum(real_BT & is_end_T[None], axis=1, keepdims=True) - 1
  return jnp.where(real_BT, jnp.minimum(position_T[None] // size, last_B1), -1)


def visible_blocks(ids_BT: Int[Array, "B T"], size: int) -> Bool[Array, "B 1 T G"]:
  """Returns which of the G blocks of a row have tokens. All queries see the same blocks."""
  block_G = jnp.arange(ids_BT.shape[1] // size)
  visible_BG = block_G[None] <= jnp.max(ids_BT, axis=1, keepdims=True)
  shape = (ids_BT.shape[0], 1, ids_BT.shape[1], block_G.size)
  return jnp.broadcast_to(visible_BG[:, None, None], shape)


def sums_of_blocks(
  x: Float[Array, "X Y D"], ids_BT: Int[Array, "B T"], size: int, length_first: bool
) -> Float[Array, "X G D"]:
  """Returns the sum of the activations of each block, in the layout of the activations."""
  blocks = jax.nn.one_hot(ids_BT, ids_BT.shape[1] // size, dtype=x.dtype)
  return jnp.einsum("tbd,btg->gbd" if length_first else "btd,btg->bgd", x, blocks)


def with_block_bias(
  config: NetworkConfig, bias_1HTS: Float[Array, "1 H T S"], ids_BT: Int[Array, "B T"]
) -> Float[Array, "B H T S_and_G"]:
  """Returns the bias of tokens, followed by that of blocks."""
  bias_BHTG = BlockBiases(config, name="global_relpos_bias")(ids_BT)
  bias_BHTS = jnp.broadcast_to(bias_1HTS, (ids_BT.shape[0], *bias_1HTS.shape[1:]))
  return jnp.concatenate([bias_BHTS, bias_BHTG], axis=-1)


class BlockBiases(nn.Module):
  """T5's relative bias by the distance from the block of a query to another block.

  Attributes:
    config: sizes and settings.
  """

  config: NetworkConfig

  @nn.compact
  def __call__(self, ids_BT: Int[Array, "B T"]) -> Float[Array, "B H T G"]:
    """Returns the bias of every query and block."""
    cfg = self.config
    init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
    table_HN = bias_table(init, cfg.num_heads, cfg.num_buckets)
    assert cfg.global_block_size is not None  # else there are no such biases
    count = ids_BT.shape[1] // cfg.global_block_size
    distance_R = np.arange(-count, count + 1)
    bucket_R = relative_position_bucket(distance_R, True, cfg.num_buckets, cfg.max_distance)
    distance_BTG = jnp.arange(count)[None, None] - ids_BT[..., None]
    bias_HBTG = table_HN[:, jnp.asarray(bucket_R)[distance_BTG + count]]
    return bias_HBTG.astype(cfg.dtype).swapaxes(0, 1)
