"""Estimates the memory that a run needs on each device, from shapes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from rosetta_t5.plan.workload import Workload

_KEEP_NOTHING = ("full", "nothing_saveable")
_KEEP_MATMULS = ("minimal", "dots_with_no_batch_dims_saveable", "dots_saveable")


def state_bytes(state: Any, specs: Any, mesh: Mapping[str, int]) -> dict[str, float]:
  """Returns the bytes per device of a train state's parts, "params" and, if it has one, "optimizer".

  Args:
    state: the train state's shapes.
    specs: the same tree with a PartitionSpec for each array.
    mesh: the size of each mesh axis.
  """
  parts = {"params": (state.params, specs.params)}
  if hasattr(state, "optimizer_def"):
    parts["optimizer"] = (state.param_states, specs.param_states)
  count = functools.partial(array_bytes, mesh=mesh)
  return {name: sum(jax.tree.leaves(jax.tree.map(count, *trees))) for name, trees in parts.items()}


def array_bytes(array: Any, spec: Sequence[Any] | None, mesh: Mapping[str, int]) -> int:
  """Returns the bytes of one device's shard of an array. Sizes that are not divisible are padded.

  Args:
    array: anything with shape and dtype.
    spec: the mesh axes that shard its first dimensions.
    mesh: the size of each mesh axis.
  """
  axes = [*(spec or ()), *[None] * array.ndim][: array.ndim]
  shape = [
    math.ceil(size / _shards(axis, mesh)) for size, axis in zip(array.shape, axes, strict=True)
  ]
  return math.prod(shape) * array.dtype.itemsize


def _shards(axis: Any, mesh: Mapping[str, int]) -> int:
  names = axis if isinstance(axis, tuple) else (axis,)
  return math.prod(mesh[name] for name in names if name is not None)


def step_memory(state: Any, specs: Any, work: Workload) -> dict[str, float]:
  """Returns the bytes per device of the parts of a training step.

  The parts are "params", "optimizer", "gradients" and, unless the network is unknown, "activations".

  Args:
    state: the train state's shapes.
    specs: the same tree with a PartitionSpec for each array.
    work: what the step computes.
  """
  parts = state_bytes(state, specs, work.mesh)
  parts["gradients"] = parts["params"]
  activations = activation_bytes(work)
  return parts if activations is None else {**parts, "activations": activations}


def activation_bytes(work: Workload) -> int | None:
  """Estimates the bytes per device that a training step keeps for its backward pass; None if unknown.

  They hold the inputs of each layer's matmuls and nonlinearities in the compute dtype, the attention
  probabilities, and the logits with their gradient in float32. With rematerialization they hold only
  what its policy keeps, and one layer that is recomputed. In practice, XLA recomputes some of these
  arrays in any case, and needs memory for temporary ones.
  """
  try:
    layers = work.layers
    vocabulary = work.config.vocab_size / work.model_shards
    encoder, decoder = _numbers_kept_per_layer(work, "none")
    kept_encoder, kept_decoder = _numbers_kept_per_layer(work, work.policy)
  except AttributeError:
    return None
  kept = layers["encoder"] * kept_encoder + layers["decoder"] * kept_decoder
  recomputed = max(encoder, decoder) if work.policy != "none" else 0.0
  logits = 2 * 4 * _logit_positions(work) * vocabulary
  examples = work.examples / work.microbatches
  return int(examples * ((kept + recomputed) * work.itemsize + logits))


def inference_bytes(work: Workload) -> dict[str, float]:
  """Estimates the bytes per device that predicting or scoring needs besides the parameters, by part.

  The result is the larger of two phases. In the first, the activations of the largest layer exist. In
  the second, the logits exist in float32; a prediction also has the keys and values of inputs and
  decodes. With more than one decode, two copies of the keys and values exist while they are reordered.

  Raises:
    AttributeError: the network is unknown.
  """
  target = work.lengths["decoder"]
  encoder, decoder = _numbers_kept_per_layer(work, "none")
  # XLA overwrites the logits with log probabilities, unless devices must communicate for them.
  copies = 1 + (work.model_shards > 1)
  position_logits = copies * 4 * work.examples * work.config.vocab_size / work.model_shards
  if work.decodes is None:
    return _largest(
      {"activations": work.examples * work.itemsize * max(encoder, decoder)},
      {"logits": position_logits * _logit_positions(work)},
    )
  cached = target * work.decodes * (1 + (work.decodes > 1)) + work.lengths.get("encoder", 0)
  heads = work.config.num_heads / work.model_shards
  key_and_value = 2 * heads * work.config.head_dim * work.itemsize
  prompt = work.examples * work.itemsize * (encoder if "encoder" in work.lengths else decoder)
  cache = work.examples * cached * key_and_value * work.layers["decoder"]
  return _largest(
    {"activations": prompt}, {"keys and values": cache, "logits": position_logits * work.decodes}
  )


def _logit_positions(work: Workload) -> int:
  """Returns the number of target positions whose logits exist at the same time."""
  target = work.lengths["decoder"]
  return min(work.loss_chunk_length or target, target)


def _largest(*phases: dict[str, float]) -> dict[str, float]:
  """Returns the phase that needs the most memory."""
  return max(phases, key=lambda phase: sum(phase.values()))


def _numbers_kept_per_layer(work: Workload, policy: str) -> tuple[float, float]:
  """Returns how many numbers a layer of the encoder and one of the decoder keep for one example."""
  config, shards = work.config, work.model_shards
  heads, units = config.num_heads / shards, config.mlp_dim / shards
  inner, branches = heads * config.head_dim, len(config.mlp_activations)
  target, source = work.lengths["decoder"], work.lengths.get("encoder", 0)
  # If `embed` is sharded, XLA keeps the gathered activations, unless they are rematerialized.
  is_split = work.activation_split == "length" or (
    work.activation_split == "embed" and policy != "none"
  )
  residual = config.emb_dim / shards if is_split else config.emb_dim
  # Each block has a normalized input, gathered for its matmuls, and the float32 input of the norm.
  normed = config.emb_dim + residual * 4 / work.itemsize
  mlp, attention, cross = normed + units * (branches + 1), normed + 4 * inner, normed + 2 * inner
  pairs = 2 * heads  # the attention probabilities, and their logits
  if policy in _KEEP_NOTHING:
    return source * residual, (target + source) * residual
  if policy in _KEEP_MATMULS:
    # The results of matmuls with parameters, and if all matmuls are kept, those of attention too.
    mlp, attention, cross = residual + units * branches, 3 * inner + 2 * residual, inner + residual
    pairs = heads if policy == "dots_saveable" else 0
  encoder = source * (attention + mlp) + pairs * source * source
  decoder = target * (attention + mlp) + pairs * target * target
  if source:
    decoder += target * cross + source * 2 * inner + pairs * target * source
  return encoder, decoder


def size_text(number: float) -> str:
  """Returns a number of bytes as text, such as 310 MB or 11.4 GB."""
  for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
    if number >= size:
      return f"{number / size:.3g} {unit}"
  return f"{number / 1e3:.3g} kB"
