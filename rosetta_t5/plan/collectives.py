"""What devices send each other in a training step: which collectives a mesh asks for, and their bytes.

Products split over `model` as Megatron-LM does (Shoeybi et al. 2019, arXiv:1909.08053), states over `data`
and `fsdp` as ZeRO does (Rajbhandari et al. 2020, arXiv:1910.02054).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rosetta_t5.parallel.counts import DATA_AXIS, MODEL_AXIS
from rosetta_t5.parallel.mesh import BATCH_AXES
from rosetta_t5.plan.memory import array_bytes, layers_of

ALL_REDUCE = "all-reduce"
ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"


@dataclasses.dataclass(frozen=True)
class Collective:
  """One kind of collective over the same axes for the same reason.

  Attributes:
    kind: all-reduce, all-gather or reduce-scatter.
    axes: the mesh axes whose devices take part.
    size: bytes of the whole array, on each device, in one step.
    why: what for: "gradients", "parameters", "activations".
    terms: arrays that could be summed first and travel as one. XLA does so on GPUs
      (AllReduceReassociate); on CPUs each travels by itself.
    count: how many arrays `size` is the sum of.
  """

  kind: str
  axes: tuple[str, ...]
  size: float
  why: str
  terms: int = 1
  count: int = 1

  def wire_bytes(self, mesh: Mapping[str, int]) -> float:
    """Returns what one device sends, in a ring, in one step."""
    n = math.prod(mesh[axis] for axis in self.axes)
    return (2 if self.kind == ALL_REDUCE else 1) * (n - 1) / n * self.size


@dataclasses.dataclass(frozen=True)
class Work:
  """What a step works on.

  Attributes:
    config: the network's sizes.
    lengths: see `shapes.input_lengths`.
    examples: examples that a device has in a step, all its microbatches together.
    microbatches: parts they are worked through in.
    zero1: whether the optimizer's state is split over `data`, the parameters not.
    sequence_parallel: whether activations are split by position over `model` between blocks.
    loss_chunk_length: target positions whose logits exist at a time; None for all.
  """

  config: Any
  lengths: Mapping[str, int]
  examples: float
  microbatches: int = 1
  zero1: bool = False
  sequence_parallel: bool = False
  loss_chunk_length: int | None = None


def step_collectives(
  params: Any, splits: Any, mesh: Mapping[str, int], work: Work
) -> list[Collective]:
  """Returns the collectives of one training step.

  Args:
    params: the parameters' shapes.
    splits: the same tree with a PartitionSpec for each.
    mesh: the size of each mesh axis.
    work: what the step works on.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params)
  specs = jax.tree.leaves(splits, is_leaf=lambda leaf: isinstance(leaf, jax.sharding.PartitionSpec))
  found: list[Collective] = []
  for (path, param), spec in zip(leaves, specs, strict=True):
    name = "/".join(str(getattr(key, "key", key)) for key in path)
    found += _of_parameter(name, param, spec, mesh, work)
  if mesh.get(MODEL_AXIS, 1) > 1:
    found += _of_activations(mesh, work)
  return _summed(found)


def _of_parameter(
  name: str, param: Any, spec: Sequence[Any], mesh: Mapping[str, int], work: Work
) -> Iterator[Collective]:
  """Yields how a parameter comes together and how its gradient is summed."""
  named = {axis for part in spec if part for axis in (part if isinstance(part, tuple) else (part,))}
  batch = [axis for axis in BATCH_AXES if mesh.get(axis, 1) > 1]
  over = tuple(axis for axis in batch if axis in named)
  rest = tuple(axis for axis in batch if axis not in named)
  whole = array_bytes(param, [part if part == MODEL_AXIS else None for part in spec], mesh)
  lookups = _lookups(name, work.config)
  is_tied = getattr(work.config, "logits_via_embedding", False)
  if over:
    # The backward pass of a lookup needs no table.
    for _ in range(1 if lookups and not is_tied else 2):
      yield Collective(ALL_GATHER, over, whole * work.microbatches, "parameters")
  terms = max(lookups + (lookups > 0 and is_tied), 1)
  bias = _position_bias_bytes(name, mesh, work)
  gradient = bias or whole
  size = gradient * work.microbatches
  # The optimizer's state goes where the parameters' `embed` goes (see `rules.optimizer_rules`).
  is_split = work.zero1 and DATA_AXIS in rest and not bias
  parts = math.prod(mesh[axis] for axis in over)
  if over and rest and (lookups or param.ndim == 1):
    # No product made it: XLA sums it over all axes at once, and lets each device keep its part.
    yield Collective(ALL_REDUCE, tuple(batch), size, "gradients", terms)
  else:
    if over:
      yield Collective(REDUCE_SCATTER, over, size, "gradients", terms)
      size, terms = size / parts, 1
    if rest:
      yield Collective(REDUCE_SCATTER if is_split else ALL_REDUCE, rest, size, "gradients", terms)
  if is_split:
    yield Collective(ALL_GATHER, (DATA_AXIS,), gradient / parts, "parameters")


def _lookups(name: str, config: Any) -> int:
  """How many tables of token vectors a parameter is read as."""
  if "token_embedder" not in name:
    return 0
  return 2 if hasattr(config, "num_encoder_layers") else 1


def _position_bias_bytes(name: str, mesh: Mapping[str, int], work: Work) -> float:
  """The gradient of a relative position bias is summed as [heads, T, T], before it is sorted in buckets."""
  if "rel_embedding" not in name:
    return 0
  length = work.lengths[
    "encoder" if "encoder" in work.lengths and "encoder/" in name else "decoder"
  ]
  heads = work.config.num_heads / mesh.get(MODEL_AXIS, 1)
  return heads * length**2 * jnp.dtype(work.config.dtype).itemsize


def _of_activations(mesh: Mapping[str, int], work: Work) -> Iterator[Collective]:
  """Yields the sums over heads, feed-forward units and vocabulary, forward and backward."""
  config, lengths = work.config, work.lengths
  itemsize = jnp.dtype(config.dtype).itemsize
  width = config.emb_dim * itemsize * work.examples
  fused = getattr(config, "fuse_qkv_params", False)
  qkv, kv = (1, 1) if fused else (3, 2)
  branches = len(config.mlp_activations)
  target, source = lengths["decoder"] * width, lengths.get("encoder", 0) * width
  layers = layers_of(config)
  encoder, decoder = layers["encoder"], layers["decoder"]

  def summed(size: float, terms: int = 1, count: int = 1) -> Iterator[Collective]:
    axes = (MODEL_AXIS,)
    if not work.sequence_parallel:
      yield Collective(ALL_REDUCE, axes, count * size, "activations", terms, count)
      return
    yield Collective(REDUCE_SCATTER, axes, count * size, "activations", terms, count)
    yield Collective(ALL_GATHER, axes, count * size, "activations", count=count)

  for _ in range(encoder):
    yield from summed(source, count=2)  # attention's output, the block's output
    yield from summed(source, qkv)
    yield from summed(source, branches)
  for _ in range(decoder):
    yield from summed(target, count=3 if encoder else 2)
    yield from summed(target, qkv)
    yield from summed(target, branches)
    if encoder:
      yield from summed(target)
      yield from summed(source, kv)
  for length in (target, source) if source else (target,):
    yield from summed(length)  # the lookups
  yield from summed(target)  # the logits' input
  # Largest logit and sum of exponentials, in float32.
  size = 2 * 4 * work.examples * lengths["decoder"]
  yield Collective(ALL_REDUCE, (MODEL_AXIS,), size, "loss", count=2)


def _summed(collectives: Sequence[Collective]) -> list[Collective]:
  found: dict[tuple[Any, ...], Collective] = {}
  for each in collectives:
    key = (each.kind, each.axes, each.why, each.terms)
    if (same := found.get(key)) is not None:
      size, count = same.size + each.size, same.count + each.count
      each = dataclasses.replace(each, size=size, count=count)
    found[key] = each
  return list(found.values())
