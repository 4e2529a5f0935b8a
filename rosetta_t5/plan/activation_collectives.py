"""The collectives of activations: over `model`, `expert`, `context` and `pipeline`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import jax

from rosetta_t5.parallel.mesh import CONTEXT_AXIS, EXPERT_AXIS, MODEL_AXIS, PIPELINE_AXIS
from rosetta_t5.plan.workload import Workload

ALL_REDUCE = "all-reduce"
ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
ALL_TO_ALL = "all-to-all"
PERMUTE = "collective-permute"

OVER_MODEL = (MODEL_AXIS,)
OVER_PIPELINE = (PIPELINE_AXIS,)
OVER_CONTEXT = (CONTEXT_AXIS,)


@dataclasses.dataclass(frozen=True)
class Collective:
  """Collectives of one kind over the same axes for the same purpose.

  Attributes:
    kind: all-reduce, all-gather, reduce-scatter, all-to-all or collective-permute.
    axes: the mesh axes whose devices take part.
    size: the bytes of the whole arrays on each device per step; for an all-to-all or a permute, of the
      device's shards.
    why: what is sent: "gradients", "parameters", "activations", "keys", "queries", "masks", "loss",
      "norms", or "microbatches" (everything that stages send to each other).
    terms: the number of arrays that are added. XLA adds them first and sends only the sum on GPUs
      (AllReduceReassociate). On CPUs it sends each of them.
    count: the number of arrays whose bytes `size` adds up.
  """

  kind: str
  axes: tuple[str, ...]
  size: float
  why: str
  terms: int = 1
  count: int = 1

  def wire_bytes(self, mesh: Mapping[str, int]) -> float:
    """Returns the bytes that one device sends per step in a ring."""
    if self.kind == PERMUTE:
      return self.size
    n = math.prod(mesh[axis] for axis in self.axes)
    return (2 if self.kind == ALL_REDUCE else 1) * (n - 1) / n * self.size


def activation_collectives(work: Workload, is_any_over_batch: bool) -> Iterator[Collective]:
  """Yields the sums over heads, feed-forward units and vocabulary, forward and backward."""
  # The bytes of the activations between blocks, for encoder and decoder.
  width = work.config.emb_dim * work.itemsize * work.examples
  residuals = {side: length * width for side, length in work.positions.items()}
  for size, matmuls, layers in _matmul_inputs(work, residuals):
    yield from _input_collectives(size, matmuls, layers, work.activation_split)
  # The gathered input of the matmul with a tied embedding table is kept.
  is_tied = getattr(work.config, "logits_via_embedding", False)
  is_kept = is_tied and not is_any_over_batch
  yield from _input_collectives(residuals["decoder"], 1, 1, work.activation_split, is_kept)
  # XLA gathers an output's gradient twice for a parameter that is sharded over batch axes too.
  gathers = 2 if work.activation_split == "embed" and is_any_over_batch else 1
  for side, layers in work.layers.items():
    matmuls = 3 if side == "decoder" and "encoder" in residuals else 2
    for _ in range(layers * matmuls - work.expert_layers[side]):
      yield from _output_collectives(residuals.get(side, 0.0), work.activation_split, gathers)
    yield from _collectives_of_slots(work, side, residuals.get(side, 0.0))
  for size in residuals.values():
    yield from _lookup_collectives(size, work)
  # The largest logit and the sum of exponentials, in float32.
  size = 2 * 4 * work.examples * work.positions["decoder"]
  yield Collective(ALL_REDUCE, OVER_MODEL, size, "loss", count=2)
  if work.activation_split == "embed":
    yield from _norm_collectives(work)


def _collectives_of_slots(work: Workload, side: str, residual: float) -> Iterator[Collective]:
  """Yields the sums over the units of experts, whose inputs and outputs are slots instead of tokens.

  They are not scattered, but activations that are sharded are gathered, forward and backward.
  """
  layers = work.expert_layers[side]
  if not layers:
    return
  size = layers * residual * work.expert_slots(side) / work.lengths[side]
  branches = len(work.config.mlp_activations)
  yield Collective(ALL_REDUCE, OVER_MODEL, size, "activations", branches, layers)
  yield Collective(ALL_REDUCE, OVER_MODEL, size, "activations", count=layers)
  if work.activation_split:
    gathered = 2 * layers * residual
    yield Collective(ALL_GATHER, OVER_MODEL, gathered, "activations", count=2 * layers)


def _matmul_inputs(
  work: Workload, residuals: Mapping[str, float]
) -> Iterator[tuple[float, int, int]]:
  """Yields each input of matmuls whose results are sharded: bytes, number of matmuls and of layers."""
  qkv, kv = (1, 1) if getattr(work.config, "fuse_qkv_params", False) else (3, 2)
  branches = len(work.config.mlp_activations)
  for side, layers in work.layers.items():
    if layers:
      yield from [(residuals[side], qkv, 1)] * layers
      yield from [(residuals[side], branches, 1)] * (layers - work.expert_layers[side])
    if side == "decoder" and "encoder" in residuals:
      yield from [(residuals["decoder"], 1, 1)] * layers
      yield residuals["encoder"], kv, layers


def _input_collectives(
  size: float, matmuls: int, layers: int, activation_split: str | None, is_kept: bool = False
) -> Iterator[Collective]:
  """Yields how the gradient of an input is summed, and how an input that is sharded is gathered."""
  kind = REDUCE_SCATTER if activation_split else ALL_REDUCE
  yield Collective(kind, OVER_MODEL, layers * size, "activations", matmuls, layers)
  if activation_split:
    # XLA gathers an input that is sharded along "length" once and keeps it. It gathers one that is
    # sharded along "embed" for each matmul, and again for the gradient of the matmul's parameter.
    gathers = 2 * matmuls * layers if activation_split == "embed" and not is_kept else 1
    yield Collective(ALL_GATHER, OVER_MODEL, gathers * size, "activations", count=gathers)


def _output_collectives(
  size: float, activation_split: str | None, gathers: int = 1
) -> Iterator[Collective]:
  """Yields how the output of a sharded matmul is summed, and how its gradient is gathered."""
  if not activation_split:
    yield Collective(ALL_REDUCE, OVER_MODEL, size, "activations")
    return
  yield Collective(REDUCE_SCATTER, OVER_MODEL, size, "activations")
  yield Collective(ALL_GATHER, OVER_MODEL, gathers * size, "activations", count=gathers)


def _lookup_collectives(size: float, work: Workload) -> Iterator[Collective]:
  """Yields how lookups are summed: each device looks up the tokens of its part of the vocabulary."""
  if work.activation_split != "embed":
    yield from _output_collectives(size, work.activation_split)
    return
  yield Collective(REDUCE_SCATTER, OVER_MODEL, size, "activations")
  # The table's gradient is computed in shards of `embed` and needed in shards of the vocabulary. The
  # XLA of jax 0.11 gathers the whole gradient for that.
  table = 4 * work.config.vocab_size * work.config.emb_dim * work.microbatches
  if jax.__version_info__ >= (0, 11):
    yield Collective(ALL_GATHER, OVER_MODEL, table, "gradients")
  else:
    yield Collective(ALL_TO_ALL, OVER_MODEL, table / work.model_shards, "gradients")


def _norm_collectives(work: Workload) -> Iterator[Collective]:
  """Yields the float32 sums over a sharded `embed`: a norm's mean square, and one for its gradient.

  A LayerNorm needs four sums, because it subtracts the mean.
  """
  sums = 4 if getattr(work.config, "norm", "rms") == "layer" else 2
  norms = {"encoder": 2, "decoder": 3 if "encoder" in work.lengths else 2}
  for side, length in work.positions.items():
    count = sums * (work.layers[side] * norms[side] + 1)
    size = count * 4 * work.examples * length
    yield Collective(ALL_REDUCE, OVER_MODEL, size, "norms", count=count)


# The exchange of tokens, over `expert`.


def expert_collectives(work: Workload) -> Iterator[Collective]:
  """Yields how tokens are sent to their experts and back, forward and backward."""
  slot = work.config.emb_dim * work.itemsize * work.examples
  for side, layers in work.expert_layers.items():
    size = 4 * layers * work.expert_slots(side) * slot
    yield Collective(ALL_TO_ALL, (EXPERT_AXIS,), size, "activations", count=4 * layers)


# The collectives of attention, over `context`.


def context_collectives(work: Workload) -> Iterator[Collective]:
  """Yields how keys and values are gathered, and how their gradients and the queries are sent."""
  config, policy = work.config, work.policy
  heads = config.num_heads / (1 if config.num_heads % work.model_shards else work.model_shards)
  position = heads * config.head_dim * work.itemsize * work.examples
  is_flash = work.attention_kernel == "flash"
  # `flash` gathers keys and values again for the backward pass, and so does rematerialization.
  forward = 1 if policy == "none" else 2
  gathers = 2 * (forward + is_flash)
  for side, layers in work.layers.items():
    keys = [work.lengths[side]] if layers else []
    if side == "decoder" and "encoder" in work.lengths:
      keys.append(work.lengths["encoder"])
    for length in keys:
      whole = layers * length * position
      yield Collective(ALL_GATHER, OVER_CONTEXT, gathers * whole, "keys", count=gathers * layers)
      yield Collective(REDUCE_SCATTER, OVER_CONTEXT, 2 * whole, "keys", count=2 * layers)
    if layers and not is_flash:
      # XLA splits the mask by its queries, and gathers which keys are real and their positions.
      sizes = [work.examples * work.lengths[side], 4 * work.lengths[side]]
      sizes = sizes if side == "decoder" else sizes[:1]
      yield Collective(ALL_GATHER, OVER_CONTEXT, sum(sizes), "masks", count=len(sizes))
    elif layers and side == "decoder" and not work.has_relative_bias:
      # Halves of queries and outputs, and of their gradients, so that all devices have equal work.
      # Of two devices, each keeps one half.
      halves = (2 * forward + 2) * layers * (1 if work.context_shards == 2 else 2)
      size = halves * work.positions[side] / 2 * position
      yield Collective(PERMUTE, OVER_CONTEXT, size, "queries", count=halves)


# The collectives of a pipeline.


def pipeline_collectives(work: Workload) -> Iterator[Collective]:
  """Yields what the stages of a pipeline send to each other, forward and backward."""
  schedule, rows = work.schedule, work.stage_examples * work.microbatches
  width, is_flat = work.config.emb_dim * work.itemsize * rows, work.attention_kernel != "xla"
  for side, layers in work.layers.items():
    if not layers:
      continue
    length, source = work.positions[side], work.positions.get("encoder", 0)
    keys = [length, source] if side == "decoder" and source else [length]
    # Activations, and in a decoder the output of the encoder; masks, or segments for fused kernels.
    activations = [keys_length * width for keys_length in keys]
    masks = [rows * (4 * (length + k) if is_flat else length * k) for k in keys]
    # In each tick, the microbatch that a stage has finished, and the next one that will enter.
    sends = 2 * schedule.ticks
    size = sends * (2 * sum(activations) + sum(masks))
    count = sends * (2 * len(activations) + len(masks) * (1 + is_flat))
    yield Collective(PERMUTE, OVER_PIPELINE, size, "microbatches", count=count)
    outputs = 2 * schedule.microbatches * length * width
    yield Collective(ALL_TO_ALL, OVER_PIPELINE, outputs, "microbatches", count=2)
