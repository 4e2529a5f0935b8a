"""Vectors that are trained and precede the embedded inputs (Lester et al. 2021, "prompt tuning", arXiv:2104.08691)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Float

from rosetta_t5.argument_types import Positive
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


def from_array(prompt: np.ndarray) -> Initializer:
  """Returns an initializer whose values are those of an array, [P, D]."""

  def init(key: jax.Array, shape: Sequence[int], *_: Any) -> jax.Array:
    if prompt.shape != tuple(shape):
      raise ValueError(
        f"the prompt has shape {prompt.shape}, and the network needs {tuple(shape)}: set prompt_length "
        f"(PROMPT_LENGTH) to {prompt.shape[0]}, or give the prompt of a network of this width"
      )
    return jnp.asarray(prompt, jnp.float32)

  return init


def from_sample_of_embeddings(
  embeddings: Any, population_size: Positive | None = None
) -> Initializer:
  """Returns an initializer whose values are random rows of an embedding table.

  Args:
    embeddings: the table, [V, D], of numpy or jax.
    population_size: how many rows at the beginning of the table are drawn from; None for all. Rows are
      drawn several times only if there are fewer than the prompt has.
  """
  rows_ND = embeddings[:population_size]

  def init(key: jax.Array, shape: Sequence[int], *_: Any) -> jax.Array:
    length, count = shape[0], rows_ND.shape[0]
    index = jax.random.choice(key, count, (length,), replace=length > count)
    return jnp.asarray(rows_ND, jnp.float32)[index]

  return init


def from_embedded_list(
  embeddings: np.ndarray, vocab: Any, texts: Sequence[str], initializer: Initializer | None = None
) -> Initializer:
  """Returns an initializer whose first vectors are the means of the tokens of texts, such as class labels.

  Args:
    embeddings: the table, [V, D].
    vocab: the SeqIO vocabulary of the texts; those after the last vector are left out.
    texts: one text for each vector.
    initializer: initializer of the other vectors; None for uniform values between 0 and 0.01.
  """

  def rows(length: int) -> np.ndarray:
    return np.stack([embeddings[vocab.encode(text)].mean(axis=0) for text in texts[:length]])

  return _with_first(rows, initializer)


def from_embedded_string(
  embeddings: np.ndarray, vocab: Any, text: str, initializer: Initializer | None = None
) -> Initializer:
  """Returns an initializer whose first vectors are those of the tokens of a text; see `from_embedded_list`."""
  return _with_first(lambda length: embeddings[vocab.encode(text)[:length]], initializer)


def _with_first(rows: Callable[[int], np.ndarray], initializer: Initializer | None) -> Initializer:
  """Returns `initializer` with other values for the first vectors, those of `rows(prompt length)`."""

  def init(key: jax.Array, shape: Sequence[int], *_: Any) -> jax.Array:
    first_ND = rows(shape[0])
    vectors_PD = (initializer or nn.initializers.uniform())(key, shape)
    return vectors_PD.at[: first_ND.shape[0]].set(first_ND)

  return init
