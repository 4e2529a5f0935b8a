"""From the decoder's last activations to logits."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rosetta_t5.kernels.chunked_cross_entropy import Unprojected
from rosetta_t5.networks.layers.dense import DenseGeneral
from rosetta_t5.parallel.sharding_constraints import with_sharding_constraint


def output_layer(
  config: Any,
  embedding: Any,
  y_BTD: Float[Array, "B T D"],
  return_logits: bool = True,
  divides_tied: bool = True,
) -> Float[Array, "B T V"] | Unprojected:
  """Returns the logits, in float32, from a kernel of the calling module or from the embedding's table.

  Args:
    config: `vocab_size`, and `logits_via_embedding`: whether the table is the kernel.
    embedding: the table.
    y_BTD: the decoder's last activations.
    return_logits: False for what the logits are the product of, for a loss that makes them in chunks.
    divides_tied: whether logits from the table are divided by √D, as T5's are.
  """
  if config.logits_via_embedding:
    divisor = jnp.sqrt(y_BTD.shape[-1]) if divides_tied else 1.0
    if return_logits:
      # Where positions are split, XLA would else bring the table together, and not the activations.
      logits_BTV = with_sharding_constraint(embedding.attend(y_BTD), ("batch", "length", "vocab"))
      return logits_BTV / divisor
    kernel_DV = jnp.asarray(embedding.embedding, embedding.attend_dtype or embedding.dtype).T
    return Unprojected(y_BTD.astype(kernel_DV.dtype) / divisor, kernel_DV)
  logits_dense = DenseGeneral(
    config.vocab_size, dtype=jnp.float32, kernel_axes=("embed", "vocab"), name="logits_dense"
  )
  if return_logits:
    return logits_dense(y_BTD)
  kernel_DV, _ = logits_dense(y_BTD, parameters_only=True)
  return Unprojected(y_BTD, kernel_DV)
