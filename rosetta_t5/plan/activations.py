"""The arrays that a training step keeps from its forward pass for its backward pass.

XLA's GPU compiler keeps the arrays that are counted here: tests/gpu_program/test_plan_memory.py compares
the estimate with compiled programs. Bytes are those of one device and one example.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from rosetta_t5.plan.workload import Workload

KEEP_NOTHING = ("full", "nothing_saveable")
KEEP_MATMULS = ("minimal", "dots_with_no_batch_dims_saveable", "dots_saveable")

# The pairs of queries and keys that XLA's attention keeps: logits and probabilities.
_PAIRS = {"none": 2, "dots_saveable": 1}
# The buckets of distances of T5's relative bias.
_BUCKETS = 32


@dataclasses.dataclass(frozen=True)
class _Sizes:
  """The bytes of one position in each array of a layer.

  Attributes:
    width: activations between blocks, `emb_dim`.
    gathered: the same, where activations between blocks are sharded by position, but a block's input
      is gathered.
    heads: queries, keys, values or the output of the heads.
    units: the feed-forward block's hidden layer, for each of its branches.
    pair: the attention logits of one query and one key, of all heads; 0 if the kernel stores none.
    fp8: the bytes of a number in a matmul's input that is kept in fp8 too; 0 without fp8.
  """

  width: float
  gathered: float
  heads: float
  units: float
  pair: float
  itemsize: int
  fp8: bool

  def matmul_input(self, size: float) -> float:
    """Returns the bytes of a matmul's input that nothing else needs: with fp8, the rounded array."""
    return size / self.itemsize if self.fp8 else size


def kept_by_layer(work: Workload, policy: str) -> dict[str, float]:
  """Returns the bytes that one layer of each side keeps for one example.

  Raises:
    AttributeError: the network is unknown.
  """
  target, source = work.positions["decoder"], work.positions.get("encoder", 0)
  sizes = _sizes(work, policy)
  if policy in KEEP_NOTHING:
    return {"encoder": source * sizes.width, "decoder": target * sizes.width}
  if policy in KEEP_MATMULS:
    block, cross = _matmul_results(work, sizes)
  else:
    block, cross = _all_arrays(work, sizes)
    if work.is_scanned and work.policy == "none":
      # A scan keeps what a norm computes, in place of the block's sum.
      norm = _results_of_norm(work.config, work.itemsize)
      block, cross = block + 2 * norm - sizes.width, cross + norm
  pairs = _PAIRS.get(policy, 0) * sizes.pair
  inputs, targets = work.lengths.get("encoder", 0), work.lengths["decoder"]
  encoder = source * block + pairs * source * inputs
  decoder = target * block + pairs * target * targets
  if source:
    # The keys and values of cross-attention have the encoder's length.
    decoder += target * cross + source * 2 * sizes.heads + pairs * target * inputs
  return {
    "encoder": encoder + _experts_mean(work, sizes, "encoder", policy),
    "decoder": decoder + _experts_mean(work, sizes, "decoder", policy),
  }


def temporary_by_layer(work: Workload) -> dict[str, float]:
  """Returns the bytes that exist only while a layer's backward pass is computed.

  The layer's forward pass is computed again if it is rematerialized. The larger of two gradients
  exists: that of the feed-forward block's hidden layer, or of attention's logits and probabilities. If
  positions are sharded, the keys and values of whole rows exist, and their gradients.
  """
  sizes, branches = _sizes(work, work.policy), len(work.config.mlp_activations)
  kept, complete = kept_by_layer(work, work.policy), kept_by_layer(work, "none")
  found = {}
  for side, length in work.positions.items():
    keys = max(work.lengths[side], work.lengths.get("encoder", 0))
    gathered = 4 * sizes.heads * keys if work.context_shards > 1 else 0.0
    tokens = max(length, work.expert_slots(side) if work.expert_layers[side] else 0.0)
    gradient = max(branches * sizes.units * tokens, 2 * sizes.pair * length * keys + gathered)
    found[side] = complete[side] - kept[side] + gradient
  return found


def deferred_by_layer(work: Workload) -> dict[str, float]:
  """Returns the bytes of the operands of the gradients of a layer's kernels, for one example.

  If activations between blocks are sharded by position, XLA's GPU compiler computes these gradients after
  the activations' gradients of all layers. Until then it keeps inputs and outputs' gradients, gathered.
  """
  sizes, branches = _sizes(work, work.policy), len(work.config.mlp_activations)
  block = (
    (_query_inputs(work.config) + 3) * sizes.gathered
    + (1 + branches) * sizes.units
    + 4 * sizes.heads
  )
  source, target = work.positions.get("encoder", 0), work.positions["decoder"]
  cross = target * (2 * sizes.gathered + 2 * sizes.heads) + source * 2 * sizes.heads
  return {"encoder": source * block, "decoder": target * block + (cross if source else 0.0)}


def kept_outside_layers(work: Workload) -> float:
  """Returns the bytes that one example keeps before, between and after the stacks of layers."""
  width, target = work.config.emb_dim, work.positions["decoder"]
  source = work.positions.get("encoder", 0)
  # The encoder's normalized output, and the input of the output layer, which is computed in float32.
  kept = source * width * work.itemsize + 4 * target * width
  # If the vocabulary is sharded, embeddings are added up over devices and kept, unless each device
  # keeps only its positions.
  is_summed = work.model_shards > 1 and work.activation_split != "length"
  return kept + (work.itemsize * (source + target) * width if is_summed else 0)


def pipeline_buffers(work: Workload) -> float:
  """Returns the bytes that one example of a device's part of the batch needs to pass through a pipeline.

  Each device has room for the outputs of all microbatches, which the last stage fills, and keeps the
  encoder's output for each microbatch of the decoder.
  """
  stages = work.schedule.stages
  width = work.config.emb_dim * work.itemsize
  positions = work.positions["decoder"] + work.positions.get("encoder", 0)
  return stages * positions * width if stages > 1 else 0.0


def attention_bias_copies(work: Workload) -> float:
  """Returns the bytes of the layers' relative biases, of all examples together.

  Layers share one bias, except scanned layers. For cuDNN on several devices, XLA stores a copy for each.
  """
  is_copied = work.attention_kernel == "cudnn" and math.prod(work.mesh.values()) > 1
  if not work.has_relative_bias or not (is_copied or work.is_scanned):
    return 0.0
  heads = work.config.num_heads / work.model_shards * work.itemsize
  pairs = {side: length**2 / work.context_shards for side, length in work.lengths.items()}
  return sum(work.layers[side] * heads * pairs[side] for side in pairs)


def relative_bias_bytes(work: Workload) -> tuple[float, float]:
  """Returns the bytes of the relative biases of encoder and decoder, and of their layers' gradients.

  The biases are computed from each pair's bucket, one-hot. XLA adds up the layers' gradients last.
  """
  if not work.has_relative_bias or work.is_scanned:
    return 0.0, 0.0
  heads = work.config.num_heads / work.model_shards
  pairs = {s: work.itemsize * n**2 / work.context_shards for s, n in work.lengths.items()}
  gradients = sum(work.layers[side] * heads * pairs[side] for side in pairs)
  return (heads + _BUCKETS) * sum(pairs.values()), gradients


def _sizes(work: Workload, policy: str) -> _Sizes:
  config, shards, itemsize = work.config, work.model_shards, work.itemsize
  heads = config.num_heads / (1 if config.num_heads % shards else shards)
  width = config.emb_dim * itemsize
  # If `embed` is sharded, XLA keeps the gathered activations, unless they are rematerialized.
  is_split = work.activation_split == "length" or (
    work.activation_split == "embed" and policy != "none"
  )
  stores_pairs = work.attention_kernel == "xla"
  pair_itemsize = 4 if getattr(config, "float32_attention_logits", False) else itemsize
  return _Sizes(
    width=width / shards if is_split else width,
    gathered=width,
    heads=heads * config.head_dim * itemsize,
    units=config.mlp_dim / shards * itemsize,
    pair=heads * pair_itemsize if stores_pairs else 0,
    itemsize=itemsize,
    fp8=work.fp8,
  )


def _results_of_norm(config: Any, itemsize: int) -> float:
  """Returns the bytes that a norm computes for a position, which only a scan keeps.

  XLA computes them again where layers are not scanned.
  """
  is_layer_norm = getattr(config, "norm", "rms") == "layer"
  return config.emb_dim * (4 * 3 if is_layer_norm else 4 * 2 + itemsize)


def _all_arrays(work: Workload, sizes: _Sizes) -> tuple[float, float]:
  """Returns what a position keeps in self-attention and feed-forward block, and in cross-attention."""
  config = work.config
  branches, normed = len(config.mlp_activations), sizes.matmul_input(sizes.gathered)
  rounded = sizes.heads / sizes.itemsize if sizes.fp8 else 0.0
  # Each block has a normalized input and an output. Attention has queries, keys, values and what the
  # heads return, which fp8 also keeps rounded.
  attention = _query_inputs(config) * normed + 4 * sizes.heads + rounded + sizes.width
  cross = normed + 2 * sizes.heads + rounded + sizes.width
  # The matmul's result of each branch, and their product; a GPU recomputes the activations.
  hidden = branches * sizes.units + sizes.matmul_input(sizes.units)
  return attention + normed + hidden + sizes.width, cross


def _experts_mean(work: Workload, sizes: _Sizes, side: str, policy: str) -> float:
  """Returns what a layer with experts keeps more than others, on average over all layers."""
  if not work.expert_layers[side]:
    return 0.0
  length, slots = work.lengths.get(side, 0), work.expert_slots(side)
  branches, router = len(work.config.mlp_activations), 4 * work.config.num_experts * length
  results = branches * sizes.units + sizes.width
  if policy in KEEP_MATMULS:
    # The matmuls of experts have a batch dimension: the experts.
    more = (slots if policy == "dots_saveable" else 0.0) * results - length * results + router
  else:
    # The router's input is in float32. A slot has an input, hidden layers and an output.
    inputs = sizes.matmul_input(sizes.gathered)
    hidden = results + sizes.units
    more = slots * (inputs + hidden) - length * hidden
    more += 4 * length * work.config.emb_dim + 2 * router
  return more * work.expert_layers[side] / work.layers[side]


def _query_inputs(config: Any) -> int:
  """Returns how many arrays queries, keys and values are projected from.

  With `scale_attn_logits` queries have a divided copy of the input, unless √head_dim is a power of
  two, by which their kernel is divided.
  """
  is_divided = getattr(config, "scale_attn_logits", False) and math.log2(config.head_dim) % 2 != 0
  return 2 if is_divided else 1


def _matmul_results(work: Workload, sizes: _Sizes) -> tuple[float, float]:
  """Returns the same for a policy that keeps the results of the matmuls with parameters."""
  branches = len(work.config.mlp_activations)
  block = 3 * sizes.heads + sizes.width + branches * sizes.units + sizes.width
  return block, sizes.heads + sizes.width
