"""How much memory a run needs on each device, estimated from shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def state_bytes(state: Any, splits: Any, mesh: Mapping[str, int]) -> dict[str, int]:
  """Returns the bytes on one device of a train state's parts: "params" and "optimizer".

  Args:
    state: the train state's shapes.
    splits: the same tree with a PartitionSpec for each array.
    mesh: the size of each mesh axis.
  """
  parts = {"params": (state.params, splits.params)}
  if hasattr(state, "optimizer_def"):
    parts["optimizer"] = (state.param_states, splits.param_states)
  return {name: _bytes(*trees, mesh) for name, trees in parts.items()}


def _bytes(arrays: Any, splits: Any, mesh: Mapping[str, int]) -> int:
  sizes = jax.tree.map(lambda array, spec: array_bytes(array, spec, mesh), arrays, splits)
  return sum(jax.tree.leaves(sizes))


def array_bytes(array: Any, spec: Sequence[Any] | None, mesh: Mapping[str, int]) -> int:
  """Returns the bytes of one device's part of an array; a dimension that does not divide is padded.

  Args:
    array: anything with shape and dtype.
    spec: the mesh axes that its dimensions are split over, or fewer of them.
    mesh: the size of each mesh axis.
  """
  axes = [*(spec or ()), *[None] * array.ndim][: array.ndim]
  parts = [_shards(axis, mesh) for axis in axes]
  shape = [math.ceil(size / n) for size, n in zip(array.shape, parts, strict=True)]
  return math.prod(shape) * array.dtype.itemsize


def _shards(axis: Any, mesh: Mapping[str, int]) -> int:
  names = axis if isinstance(axis, tuple) else (axis,)
  return math.prod(mesh[name] for name in names if name is not None)


def activation_bytes(
  config: Any, lengths: Mapping[str, int], examples: float, model_shards: int
) -> int | None:
  """Returns roughly what a training step keeps for its backward pass, per device; None if unknown.

  Counted are the inputs of each layer's products and of its nonlinearities, in the compute dtype, the
  attention's probabilities, and the logits with their gradient in float32. XLA recomputes some of
  these and needs room for others.

  Args:
    config: the network's sizes, a `T5Config` or `TransformerConfig`.
    lengths: see `shapes.input_lengths`.
    examples: examples that a device works on at once.
    model_shards: devices that heads, feed-forward units and vocabulary are split over.
  """
  try:
    layers = layers_of(config)
    width, heads = config.emb_dim, config.num_heads / model_shards
    inner = heads * config.head_dim
    hidden = config.mlp_dim / model_shards * (len(config.mlp_activations) + 1)
    vocabulary = config.vocab_size / model_shards
    itemsize = jnp.dtype(config.dtype).itemsize
  except AttributeError:
    return None
  target = lengths["decoder"]
  source = lengths.get("encoder", 0)
  # Before each product its normalised input, and what the norm was taken of, which is float32.
  normed = width * (1 + 4 / itemsize)
  mlp = normed + hidden
  attention = normed + 4 * inner

  def probabilities(queries: int, keys: int) -> float:
    return 2 * heads * queries * keys  # and the logits that they were made of

  encoder = source * (attention + mlp) + probabilities(source, source)
  decoder = target * (attention + mlp) + probabilities(target, target)
  if source:
    decoder += target * (normed + 2 * inner) + source * 2 * inner
    decoder += probabilities(target, source)
  kept = layers["encoder"] * encoder + layers["decoder"] * decoder
  return int(examples * (kept * itemsize + 2 * 4 * target * vocabulary))


def layers_of(config: Any) -> dict[str, int]:
  if hasattr(config, "num_encoder_layers"):
    return {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
  return {"encoder": 0, "decoder": config.num_layers}


def size_text(number: float) -> str:
  """Returns a number of bytes as people say it: 310 MB, 11.4 GB."""
  for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
    if number >= size:
      return f"{number / size:.3g} {unit}"
  return f"{number / 1e3:.3g} kB"
