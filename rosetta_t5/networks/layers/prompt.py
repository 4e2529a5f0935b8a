"""Vectors that are trained and precede the embedded inputs (Lester et al. 2021, "prompt tuning", arXiv:2104.08691)."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Float

from rosetta_t5.kernels.attention import Visibility
from rosetta_t5.networks.layers.dense import Initializer
from rosetta_t5.parallel.placement import constrain, context_shards


class Prompt(nn.Module):
  """Puts the vectors before rows. Their name, `prompt/prompt/prompt`, is that of T5X's prompt tuning.

  Attributes:
    config: sizes and settings.
  """

  config: Any

  @nn.compact
  def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B P_and_T D"]:
    """Returns the rows that begin with the vectors.

    Raises:
      ValueError: the rows, which are split over the mesh's context axis, cannot be split with them.
    """
    cfg, shards = self.config, context_shards()
    if cfg.prompt_length % shards:
      raise ValueError(
        f"{cfg.name}.prompt_length must be a multiple of the {shards} devices of the mesh's context axis, "
        f"got {cfg.prompt_length}"
      )
    init = cfg.prompt_init or nn.initializers.uniform(0.5)
    vectors_PD = PromptVectors(cfg.prompt_length, init, name="prompt")(x_BTD.shape[-1])
    shape = (x_BTD.shape[0], *vectors_PD.shape)
    vectors_BPD = jnp.broadcast_to(vectors_PD.astype(x_BTD.dtype)[None], shape)
    rows = jnp.concatenate([vectors_BPD, x_BTD], axis=1)
    return constrain(rows, ("batch", "length", "embed"))


class PromptVectors(nn.Module):
  """The vectors, [length, D] in float32.

  Attributes:
    length: the number of vectors.
    prompt_init: initializer of the vectors.
  """

  length: int
  prompt_init: Initializer

  @nn.compact
  def __call__(self, features: int) -> Float[Array, "P D"]:
    """Returns the vectors, whose width is `features`."""
    shape, axes = (self.length, features), ("prompt", "prompt_embed")
    vectors: jax.Array = param_with_axes("prompt", self.prompt_init, shape, jnp.float32, axes=axes)
    return vectors


def after_prompt(visible: Any, length: int) -> Any:
  """Returns a `Visibility` of rows that begin with `length` vectors more; anything else unchanged.

  The vectors are not padding. In a prefix LM they belong to the prefix.

  Raises:
    ValueError: rows are packed.
  """
  if length == 0 or not isinstance(visible, Visibility):
    return visible
  if visible.packed:
    raise ValueError(
      f"a prompt (prompt_length = {length}) does not support packed examples, which would share it: set "
      "pack = False for train/utils.DatasetConfig and train_eval/utils.DatasetConfig"
    )
  return jax.tree.map(lambda ids: jnp.pad(ids, ((0, 0), (length, 0)), constant_values=1), visible)
