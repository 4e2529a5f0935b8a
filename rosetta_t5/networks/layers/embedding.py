"""The token embedding, and the output layer that turns activations into logits."""

from __future__ import annotations

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.partitioning import param_with_axes
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from rosetta_t5.kernels.cross_entropy import LogitFactors, set_logits
from rosetta_t5.kernels.xla_attention import soft_cap
from rosetta_t5.networks.layers.dense import DenseGeneral, DenseParameters, Initializer
from rosetta_t5.networks.layers.matmuls import product_of_few_rows
from rosetta_t5.parallel.mesh import axis_names
from rosetta_t5.parallel.placement import (
  constrain,
  context_shards,
  current,
  dividing_axes,
  target_device,
)

default_embed_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)


class Embed(nn.Module):
  """A table of token vectors, [num_embeddings, features] in float32.

  Attributes:
    num_embeddings: the number of rows: the vocabulary's size, padded as the model requires.
    features: the width of a row.
    cast_input_dtype: the type that ids are cast to first, or None.
    dtype: the type of the returned vectors.
    attend_dtype: the type in which `attend` computes; None for `dtype`.
    embedding_init: initializer of the table.
    end_of_image_id: the token whose vector is a parameter of its own, `end_of_image`; the row of the table
      is only for logits (T5Gemma 2). None for no such token.
    one_hot: has no effect and exists because T5X has it. T5X multiplies by one-hot rows; the gather used
      here gives the same numbers and takes a quarter off the time of a small model's step.
  """

  num_embeddings: int
  features: int
  cast_input_dtype: Any = None
  dtype: Any = jnp.float32
  attend_dtype: Any = None
  embedding_init: Initializer = default_embed_init
  one_hot: bool = False
  end_of_image_id: int | None = None

  def setup(self) -> None:
    """Creates the table."""
    shape = (self.num_embeddings, self.features)
    self.embedding = param_with_axes(
      "embedding", self.embedding_init, shape, jnp.float32, axes=("vocab", "embed")
    )
    if self.end_of_image_id is not None:
      zeros = nn.initializers.zeros
      self.end_of_image = param_with_axes(
        "end_of_image", zeros, (self.features,), jnp.float32, axes=("embed",)
      )

  def __call__(self, inputs: Int[Array, "..."]) -> Float[Array, "..."]:
    """Returns the vectors of the ids, [..., features]; an id outside the table gets zeros.

    Raises:
      ValueError: the ids are not integers.
    """
    if self.cast_input_dtype:
      inputs = inputs.astype(self.cast_input_dtype)
    if not jnp.issubdtype(inputs.dtype, jnp.integer):
      raise ValueError(f"Input type must be an integer or unsigned integer, got {inputs.dtype}")
    # The rows are cast and not the table, whose gradient would be rounded.
    # In T5X an id outside the table is a one-hot row of zeros, which is what `mode="fill"` gives.
    vectors = _look_up(self.embedding, ("vocab", "embed"), inputs, self.dtype)
    # Positions are split in a second step: each device looks up all tokens in its part of the
    # vocabulary, and the sums are scattered. In one step XLA would send around the whole table.
    if context_shards() == 1:
      vectors = constrain(vectors, ("batch", None, "embed"))
    return constrain(vectors, ("batch", "length", "embed"))

  def with_end_of_image(
    self, ids_BT: Int[Array, "B T"], vectors_BTD: Float[Array, "B T D"]
  ) -> Float[Array, "B T D"]:
    """Returns the vectors of the ids with `end_of_image` in place of that of `end_of_image_id`."""
    assert self.end_of_image_id is not None  # else the token has no vector of its own
    is_end_BT1 = jnp.equal(ids_BT, self.end_of_image_id)[..., None]
    own_11D = self.end_of_image.astype(vectors_BTD.dtype)[None, None]
    return jnp.where(is_end_BT1, own_11D, vectors_BTD)

  def attend(self, query: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Returns the dot products of `query` with every row: the logits tied to the embedding."""
    dtype = self.attend_dtype or self.dtype
    table_VD = jnp.asarray(self.embedding, dtype)
    is_decoding_step = query.ndim > 1 and query.shape[-2] == 1
    if is_decoding_step and target_device().platform == "cpu":
      return product_of_few_rows(query, table_VD)
    return jnp.dot(query, table_VD.T)


def make_token_embedder(config: Any, name: str | None = None) -> Embed:
  """Returns the embedding, which tied logits share."""
  return Embed(
    num_embeddings=config.vocab_size,
    features=config.emb_dim,
    dtype=config.dtype,
    attend_dtype=jnp.float32,
    embedding_init=nn.initializers.normal(stddev=config.init_stddev or 1.0),
    end_of_image_id=config.end_of_image_id,
    name=name,
  )


def _look_up(table_VD: jax.Array, axes: tuple[str, str], ids: jax.Array, dtype: Any) -> jax.Array:
  """Returns the rows of a table with these logical axes, which may be split over devices.

  On GPUs, the devices among which each row is split look up one another's ids in their own part, and exchange the
  results, which are smaller than the table. CPUs gather the table: with the exchange, K-FAC's and Sophia's steps
  blocked in XLA's collectives for CPUs.
  """
  vocab, embed = dividing_axes(axes, table_VD.shape)
  rows = _rows_of_split_table if vocab else _rows
  row_axes = tuple(axis for axis in axis_names(embed) if current().mesh.shape[axis] > 1)
  names = (*("batch", "length", *[None] * ids.ndim)[: ids.ndim], "embed")
  *id_axes, activation_axes = map(axis_names, dividing_axes(names, (*ids.shape, table_VD.shape[1])))
  is_exchangeable = row_axes and {*row_axes} <= {axis for dim in id_axes for axis in dim}
  if not is_exchangeable or activation_axes or target_device().platform != "gpu":
    return rows(constrain(table_VD, (axes[0], None)), ids, dtype)
  # Positions are split over further axes only afterwards; see `Embed`.
  used = {*id_axes[0], *row_axes}

  def split(x: jax.Array, feature_axes: tuple[str, ...]) -> jax.Array:
    spec = [tuple(a for a in dim if a in used and a not in feature_axes) for dim in id_axes]
    spec += [feature_axes] * (x.ndim - ids.ndim)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))

  vectors = rows(table_VD, split(ids, row_axes), dtype)
  for n in range(len(row_axes), -1, -1):  # XLA exchanges over one axis at a time
    vectors = split(vectors, row_axes[:n])
  return vectors


def _rows(table_VD: jax.Array, ids: jax.Array, dtype: Any) -> jax.Array:
  # Parameters may be arrays of numpy, as where an export is validated.
  rows = jnp.asarray(table_VD).at[ids]
  return rows.get(mode="fill", fill_value=0, wrap_negative_indices=False).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rows_of_split_table(table_VD: jax.Array, ids: jax.Array, dtype: Any) -> jax.Array:
  """Returns the rows of a table whose rows are on several devices; XLA adds up their results.

  The table is cast first, so that this sum is in `dtype`. At most one device's result is not zero, so the numbers are
  those of `_rows`. The gradient is that of `_rows`.
  """
  return _rows(table_VD.astype(dtype), ids, dtype)


def _rows_of_split_table_backward(
  dtype: Any, saved: tuple, gradient: jax.Array
) -> tuple[jax.Array, None]:
  table_VD, ids = saved
  return jax.vjp(lambda table_VD: _rows(table_VD, ids, dtype), table_VD)[1](gradient)[0], None


_rows_of_split_table.defvjp(
  lambda *args: (_rows_of_split_table(*args), args[:2]), _rows_of_split_table_backward
)


def position_vectors(
  config: Any, positions_BT: Int[Array, "B T"], length: int
) -> Float[Array, "B T D"]:
  """Returns the learned vectors of the positions from a table of the calling module.

  Args:
    config: a `NetworkConfig`.
    positions_BT: the positions; B may be 1.
    length: the number of positions that there can be.

  Raises:
    ValueError: it is larger than the table.
  """
  if length > config.max_length:
    raise ValueError(
      f"{config.name}.max_length must be at least the length of the sequences, {length}, got "
      f"{config.max_length}: increase it, or decrease TASK_FEATURE_LENGTHS (inputs and targets are one "
      "sequence)"
    )
  init = nn.initializers.normal(config.init_stddev or 1.0)
  shape, axes = (config.max_length, config.emb_dim), ("abspos_buckets", "embed")
  table_LD = param_with_axes("position_embedding", init, shape, jnp.float32, axes=axes)
  # Examples that are full while others are still being decoded have positions beyond the table.
  vectors_BTD = _look_up(
    table_LD, axes, jnp.clip(positions_BT, 0, config.max_length - 1), config.dtype
  )
  return constrain(vectors_BTD, ("batch", "length", "embed"))


def output_layer(
  config: Any, embedding: Any, y_BTD: Float[Array, "B T D"], return_logits: bool = True
) -> Float[Array, "B T V"] | LogitFactors:
  """Returns the float32 logits, computed with a kernel of the calling module or the embedding table.

  Args:
    config: a `NetworkConfig`.
    embedding: the `Embed` module.
    y_BTD: the decoder's last activations.
    return_logits: False returns the two factors of the logits, for a loss that is computed in chunks.
  """
  divisor = 1 / config.logit_scale
  if config.logits_via_embedding and config.divide_tied_logits:
    divisor *= math.sqrt(y_BTD.shape[-1])
  own: dict[str, Any] = {"kernel_axes": ("embed", "vocab"), "name": "logits_dense"}
  excluded_V = _excluded_tokens(config)
  if return_logits:
    if config.logits_via_embedding:
      # Where positions are split, XLA would otherwise gather the table instead of the activations.
      logits_BTV = constrain(embedding.attend(y_BTD), ("batch", "length", "vocab"))
    else:
      logits_BTV = DenseGeneral(config.vocab_size, **own)(y_BTD)
    return set_logits(soft_cap(logits_BTV / divisor, config.logit_softcap), excluded_V)
  if config.logits_via_embedding:
    kernel_DV = jnp.asarray(embedding.embedding, embedding.attend_dtype or embedding.dtype).T
  else:
    kernel_DV, _ = DenseParameters(config.vocab_size, **own)(y_BTD)
  hidden_BTD = y_BTD if divisor == 1 else y_BTD.astype(kernel_DV.dtype) / divisor
  return LogitFactors(hidden_BTD, kernel_DV, excluded_V, config.logit_softcap)


def _excluded_tokens(config: Any) -> Bool[Array, " V"] | None:
  """Returns the ids that never follow; None if all may."""
  if not (config.padding_never_follows or config.unused_rows):
    return None
  id_V = jnp.arange(config.vocab_size)
  is_padding_V = (id_V == config.pad_id) & config.padding_never_follows
  return is_padding_V | (id_V >= config.vocab_size - config.unused_rows)
