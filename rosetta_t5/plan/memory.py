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
  config: Any,
  lengths: Mapping[str, int],
  examples: float,
  model_shards: int,
  remat_policy: str | None = None,
  loss_chunk_length: int | None = None,
  over_model: str | None = None,
) -> int | None:
  """Returns roughly what a training step keeps for its backward pass, per device; None if unknown.

  Counted are the inputs of each layer's products and of its nonlinearities, in the compute dtype, the
  attention's probabilities, and the logits with their gradient in float32; with rematerialisation
  only what its policy keeps, and one layer that is made again. XLA recomputes some of these and
  needs room for others.

  Args:
    config: the network's sizes, a `T5Config` or `TransformerConfig`.
    lengths: see `shapes.input_lengths`.
    examples: examples that a device works on at once.
    model_shards: devices that heads, feed-forward units and vocabulary are split over.
    remat_policy: what layers keep (see `networks.remat`); None for the config's.
    loss_chunk_length: target positions whose logits exist at a time; None for all.
    over_model: which dimension of activations is split over those devices between blocks; see
      `collectives.split_over_model`.
  """
  try:
    layers = layers_of(config)
    vocabulary = config.vocab_size / model_shards
    itemsize = jnp.dtype(config.dtype).itemsize
    policy = str(remat_policy or getattr(config, "remat_policy", "none"))
    encoder, decoder = _layer_values(config, lengths, model_shards, "none", over_model)
    kept_encoder, kept_decoder = _layer_values(config, lengths, model_shards, policy, over_model)
  except AttributeError:
    return None
  kept = layers["encoder"] * kept_encoder + layers["decoder"] * kept_decoder
  made_again = max(encoder, decoder) if policy != "none" else 0.0
  positions = min(loss_chunk_length or lengths["decoder"], lengths["decoder"])
  return int(examples * ((kept + made_again) * itemsize + 2 * 4 * positions * vocabulary))


def inference_bytes(
  config: Any,
  lengths: Mapping[str, int],
  examples: float,
  model_shards: int,
  decodes: int | None,
  loss_chunk_length: int | None = None,
  over_model: str | None = None,
) -> dict[str, float]:
  """Returns roughly what predicting or scoring needs on each device beside the parameters, by what it holds.

  It is what needs most of what comes one after the other: the largest layer's activations; the logits
  in float32, of predictions with the keys and values of inputs and decodes. Of more than one decode
  these are there twice, while they change places.

  Args:
    config: the network's sizes, a `T5Config` or `TransformerConfig`.
    lengths: see `shapes.input_lengths`.
    examples: examples that a device works on at once.
    model_shards: devices that heads, feed-forward units and vocabulary are split over.
    decodes: beams or samples of each example; None while targets are scored.
    loss_chunk_length: target positions whose logits exist at a time; None for all.
    over_model: see `activation_bytes`.

  Raises:
    AttributeError: the config is of another network.
  """
  itemsize, target = jnp.dtype(config.dtype).itemsize, lengths["decoder"]
  encoder, decoder = _layer_values(config, lengths, model_shards, "none", over_model)
  # XLA makes log probabilities in the logits' place, unless devices have to sum for them first.
  copies = 1 + (model_shards > 1)
  of_position = copies * 4 * examples * config.vocab_size / model_shards
  if decodes is None:
    logits = of_position * min(loss_chunk_length or target, target)
    return _largest(
      {"activations": examples * itemsize * max(encoder, decoder)}, {"logits": logits}
    )
  kept = target * decodes * (1 + (decodes > 1)) + lengths.get("encoder", 0)
  pair = 2 * config.num_heads / model_shards * config.head_dim * itemsize
  of_prompts = examples * itemsize * (encoder if "encoder" in lengths else decoder)
  keys = examples * kept * pair * layers_of(config)["decoder"]
  return _largest(
    {"activations": of_prompts}, {"keys and values": keys, "logits": of_position * decodes}
  )


def _largest(*phases: dict[str, float]) -> dict[str, float]:
  """Of what is needed one after the other, what needs most."""
  return max(phases, key=lambda phase: sum(phase.values()))


def _layer_values(
  config: Any,
  lengths: Mapping[str, int],
  model_shards: int,
  policy: str,
  over_model: str | None,
) -> tuple[float, float]:
  """How many numbers an encoder's and a decoder's layer keep of one example."""
  width, heads = config.emb_dim, config.num_heads / model_shards
  inner = heads * config.head_dim
  branches = len(config.mlp_activations)
  units = config.mlp_dim / model_shards
  target, source = lengths["decoder"], lengths.get("encoder", 0)
  # Split by `embed`, XLA keeps what it has gathered, unless it is to make it again.
  is_split = over_model == "length" or (over_model == "embed" and policy != "none")
  between = width / model_shards if is_split else width
  # Before each product its normalised input, which came together for it, and what the norm was taken of,
  # which is float32.
  normed = width + between * 4 / jnp.dtype(config.dtype).itemsize
  mlp, attention, cross = normed + units * (branches + 1), normed + 4 * inner, normed + 2 * inner
  pairs = 2 * heads  # the probabilities, and the logits that they were made of
  if policy in ("full", "nothing_saveable"):
    return source * between, target * between + (source * between if source else 0)
  if policy in ("minimal", "dots_with_no_batch_dims_saveable", "dots_saveable"):
    # The results of products with parameters; of attention's own too, if all products are kept.
    mlp, attention, cross = between + units * branches, 3 * inner + 2 * between, inner + between
    pairs = heads if policy == "dots_saveable" else 0
  encoder = source * (attention + mlp) + pairs * source * source
  decoder = target * (attention + mlp) + pairs * target * target
  if source:
    decoder += target * cross + source * 2 * inner + pairs * target * source
  return encoder, decoder


def layers_of(config: Any) -> dict[str, int]:
  """Returns how many layers a network has: {"encoder": …, "decoder": …}."""
  if hasattr(config, "num_encoder_layers"):
    return {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
  return {"encoder": 0, "decoder": config.num_layers}


def size_text(number: float) -> str:
  """Returns a number of bytes as people say it: 310 MB, 11.4 GB."""
  for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
    if number >= size:
      return f"{number / size:.3g} {unit}"
  return f"{number / 1e3:.3g} kB"
