"""What devices send each other in a training step: which collectives a mesh asks for, and their bytes.

Products split over `model` as Megatron-LM does (Shoeybi et al. 2019, arXiv:1909.08053), states over `data`
and `fsdp` as ZeRO does (Rajbhandari et al. 2020, arXiv:1910.02054).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.partitioning import logical_to_mesh_axes

from rosetta_t5.parallel.mesh import BATCH_AXES
from rosetta_t5.parallel.mesh_axes import DATA_AXIS, MODEL_AXIS
from rosetta_t5.plan.memory import array_bytes, layers_of

ALL_REDUCE = "all-reduce"
ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
ALL_TO_ALL = "all-to-all"

_HAVE_NO_EMBED = re.compile(r"(query|key|value|wi\w*)/bias|rel_embedding")


@dataclasses.dataclass(frozen=True)
class Collective:
  """One kind of collective over the same axes for the same reason.

  Attributes:
    kind: all-reduce, all-gather, reduce-scatter or all-to-all.
    axes: the mesh axes whose devices take part.
    size: bytes of the whole array (of an all-to-all: of a device's part), on each device, in one step.
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
    over_model: which dimension of activations is split over `model` between blocks: "length",
      "embed" or None; see `split_over_model`.
    loss_chunk_length: target positions whose logits exist at a time; None for all.
  """

  config: Any
  lengths: Mapping[str, int]
  examples: float
  microbatches: int = 1
  zero1: bool = False
  over_model: str | None = None
  loss_chunk_length: int | None = None


def split_over_model(partitioner: Any) -> str | None:
  """Returns which dimension of activations a partitioner splits over `model` between blocks.

  "length" with `sequence_parallel`, "embed" with T5X's `activation_partitioning_dims = 2`, else None.
  """
  names = ("batch", "length", "embed")
  spec = logical_to_mesh_axes(names, getattr(partitioner, "logical_axis_rules", ())) or ()
  return next((name for name, axis in zip(names, spec, strict=False) if axis == MODEL_AXIS), None)


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
    found += _of_activations(mesh, work, any(_over_batch(spec, mesh) for spec in specs))
  return _summed(found)


def _of_parameter(
  name: str, param: Any, spec: Sequence[Any], mesh: Mapping[str, int], work: Work
) -> Iterator[Collective]:
  """Yields how a parameter comes together and how its gradient is summed."""
  over = _over_batch(spec, mesh)
  whole = array_bytes(param, [part if part == MODEL_AXIS else None for part in spec], mesh)
  lookups = _lookups(name, work.config)
  # A table whose vectors make the logits too is used in a product besides.
  is_tied = "token_embedder" in name and getattr(work.config, "logits_via_embedding", False)
  count = 0 if _travels_with_another(name, work.config) else 1
  if over:
    gathers = _gathers(lookups, is_tied, name.endswith("bias"), over, mesh)
    gathered = gathers * whole * work.microbatches
    yield Collective(ALL_GATHER, over, gathered, "parameters", count=count * gathers)
  bias, layers = _position_bias(name, mesh, work)
  gradient = bias or float(whole)
  # No product makes the gradient of a lookup or of a norm's scale.
  is_loose = lookups > 0 or param.ndim == 1
  loose_terms = lookups or 1 if is_loose else 0
  terms = lookups + is_tied or layers
  # The optimizer's state goes where the parameters' `embed` goes (see `PjitPartitioner.zero1`).
  is_zero1 = work.zero1 and not _HAVE_NO_EMBED.search(name)
  for each in _gradient_sums(gradient, terms, loose_terms, over, mesh, work, is_zero1):
    is_sum = each.why == "gradients"
    yield dataclasses.replace(each, count=count) if is_sum else each
  if mesh.get(MODEL_AXIS, 1) > 1:
    yield from _of_places(name, param, spec, gradient * work.microbatches, work)


def _of_places(
  name: str, param: Any, spec: Sequence[Any], gradient: float, work: Work
) -> Iterator[Collective]:
  """Yields what a parameter of all places or widths needs where activations are split over `model`."""
  is_table = name.endswith("position_embedding")
  is_split = MODEL_AXIS in spec
  if work.over_model == "length" and not is_split and (param.ndim == 1 or is_table):
    # A norm's scale multiplies positions that lie apart, and places are looked up for them.
    yield Collective(ALL_REDUCE, (MODEL_AXIS,), gradient, "gradients")
  if is_table and is_split:
    # Split by `embed`, a table is brought together for the lookup, and so is its gradient.
    whole = math.prod(param.shape) * param.dtype.itemsize * work.microbatches
    yield Collective(ALL_GATHER, (MODEL_AXIS,), 2 * whole, "parameters", count=2)


def _travels_with_another(name: str, config: Any) -> bool:
  """Whether a kernel's gradient, and the kernel itself, travels in one array with another's."""
  if not getattr(config, "fuse_qkv_params", False):
    return False
  is_cross = "encoder_decoder_attention" in name
  return name.endswith("key/kernel") or (name.endswith("query/kernel") and not is_cross)


def _gathers(
  lookups: int, is_tied: bool, is_added: bool, over: tuple[str, ...], mesh: Mapping[str, int]
) -> int:
  """Returns how often a parameter split over the batch's axes comes together in a step."""
  if lookups == 0:
    return 1 if is_added else 2  # Forward and backward; the backward pass of a sum needs no term.
  if not is_tied:
    return 1  # The backward pass of a lookup needs no table.
  # A product with a table whose vocabulary is split gathers it again for the backward pass, if the
  # gradient is summed over another axis besides.
  rest = set(_batch_axes(mesh)) - set(over)
  return 2 + (mesh.get(MODEL_AXIS, 1) > 1 and bool(rest))


def _gradient_sums(
  gradient: float,
  terms: int,
  loose_terms: int,
  over: tuple[str, ...],
  mesh: Mapping[str, int],
  work: Work,
  is_zero1: bool,
) -> Iterator[Collective]:
  """Yields how a gradient of so many bytes is summed over the batch, and what ZeRO-1 adds.

  Args:
    gradient: its bytes.
    terms: the arrays that it is the sum of.
    loose_terms: those of them that no product makes; 0 if products make all.
    over: the batch's axes that the parameter is split over.
    mesh: the size of each mesh axis.
    work: what the step works on.
    is_zero1: whether its optimizer's state is split over `data`.
  """
  batch = _batch_axes(mesh)
  rest = tuple(axis for axis in batch if axis not in over)
  size = gradient * work.microbatches
  if over and rest and loose_terms:
    # XLA sums these over all axes at once, and lets each device keep its part.
    yield Collective(ALL_REDUCE, batch, size, "gradients", loose_terms)
    terms = max(terms - loose_terms, 0)
  parts = math.prod(mesh[axis] for axis in over)
  if terms and over:
    yield Collective(REDUCE_SCATTER, over, size, "gradients", terms)
    size, terms = size / parts, 1
  is_split = is_zero1 and DATA_AXIS in rest
  if terms and rest:
    yield Collective(REDUCE_SCATTER if is_split else ALL_REDUCE, rest, size, "gradients", terms)
  if is_split:
    yield Collective(ALL_GATHER, (DATA_AXIS,), gradient / parts, "parameters")


def _batch_axes(mesh: Mapping[str, int]) -> tuple[str, ...]:
  return tuple(axis for axis in BATCH_AXES if mesh.get(axis, 1) > 1)


def _over_batch(spec: Sequence[Any], mesh: Mapping[str, int]) -> tuple[str, ...]:
  """The axes of the batch that a parameter is split over too."""
  named = {axis for part in spec if part for axis in (part if isinstance(part, tuple) else (part,))}
  return tuple(axis for axis in _batch_axes(mesh) if axis in named)


def _lookups(name: str, config: Any) -> int:
  """How many tables of vectors, of tokens or of places, a parameter is read as."""
  if "token_embedder" not in name:
    return int(name.endswith("position_embedding"))
  return 2 if hasattr(config, "num_encoder_layers") else 1


def _position_bias(name: str, mesh: Mapping[str, int], work: Work) -> tuple[float, int]:
  """The bytes of a relative position bias, and how many layers use it; of other parameters 0 and 1.

  Each layer's gradient is summed as [heads, T, T], before it is sorted in buckets.
  """
  if "rel_embedding" not in name:
    return 0, 1
  side = "encoder" if "encoder" in work.lengths and "encoder/" in name else "decoder"
  heads = work.config.num_heads / mesh.get(MODEL_AXIS, 1)
  size = heads * work.lengths[side] ** 2 * jnp.dtype(work.config.dtype).itemsize
  return size, layers_of(work.config)[side]


def _of_activations(
  mesh: Mapping[str, int], work: Work, params_over_batch: bool
) -> Iterator[Collective]:
  """Yields the sums over heads, feed-forward units and vocabulary, forward and backward."""
  for size, products, layers in _inputs(work):
    yield from _of_input(size, products, layers, work.over_model)
  # The logits; the whole input of a product with the embedding's table is kept.
  is_kept = getattr(work.config, "logits_via_embedding", False) and not params_over_batch
  yield from _of_input(_sides(work)["decoder"], 1, 1, work.over_model, is_kept)
  # XLA gathers an output's gradient again for a parameter that is split over the batch's axes too.
  gathers = 2 if work.over_model == "embed" and params_over_batch else 1
  for size in _outputs(work):
    yield from _of_output(size, work.over_model, gathers)
  for size in _sides(work).values():
    yield from _of_lookup(size, mesh, work)
  axes, lengths = (MODEL_AXIS,), work.lengths
  # Largest logit and sum of exponentials, in float32.
  size = 2 * 4 * work.examples * lengths["decoder"]
  yield Collective(ALL_REDUCE, axes, size, "loss", count=2)
  if work.over_model == "embed":
    # Each norm's mean square, and the sum that its gradient needs, in float32; of a LayerNorm, its mean
    # and another sum besides.
    sums = 4 if getattr(work.config, "norm", "rms") == "layer" else 2
    depth = layers_of(work.config)
    norms = {"encoder": 2, "decoder": 3 if "encoder" in lengths else 2}
    for side, length in lengths.items():
      count = sums * (depth[side] * norms[side] + 1)
      yield Collective(ALL_REDUCE, axes, count * 4 * work.examples * length, "norms", count=count)


def _sides(work: Work) -> dict[str, float]:
  """The bytes of the activations between blocks, of encoder and decoder."""
  width = work.config.emb_dim * jnp.dtype(work.config.dtype).itemsize * work.examples
  return {side: length * width for side, length in work.lengths.items()}


def _inputs(work: Work) -> Iterator[tuple[float, int, int]]:
  """Yields what goes into products whose results are split: bytes, products, in how many layers."""
  qkv, kv = (1, 1) if getattr(work.config, "fuse_qkv_params", False) else (3, 2)
  branches, sides = len(work.config.mlp_activations), _sides(work)
  for side, layers in layers_of(work.config).items():
    if layers:
      yield from [(sides[side], qkv, 1), (sides[side], branches, 1)] * layers
    if side == "decoder" and "encoder" in sides:
      yield from [(sides["decoder"], 1, 1)] * layers
      yield sides["encoder"], kv, layers


def _outputs(work: Work) -> Iterator[float]:
  """Yields the bytes of what comes out of products that sum over a split dimension."""
  sides = _sides(work)
  for side, layers in layers_of(work.config).items():
    yield from (
      [sides.get(side, 0.0)] * layers * (3 if side == "decoder" and "encoder" in sides else 2)
    )


def _of_input(
  size: float, products: int, layers: int, over_model: str | None, is_kept: bool = False
) -> Iterator[Collective]:
  axes, kind = (MODEL_AXIS,), REDUCE_SCATTER if over_model else ALL_REDUCE
  yield Collective(kind, axes, layers * size, "activations", products, layers)
  if over_model:
    # By position it comes together once and is kept. By `embed`, XLA lets each product gather it, and
    # again for the parameter's gradient: no whole one is kept.
    gathers = 2 * products * layers if over_model == "embed" and not is_kept else 1
    yield Collective(ALL_GATHER, axes, gathers * size, "activations", count=gathers)


def _of_output(size: float, over_model: str | None, gathers: int = 1) -> Iterator[Collective]:
  axes = (MODEL_AXIS,)
  if not over_model:
    yield Collective(ALL_REDUCE, axes, size, "activations")
    return
  yield Collective(REDUCE_SCATTER, axes, size, "activations")
  yield Collective(ALL_GATHER, axes, gathers * size, "activations", count=gathers)


def _of_lookup(size: float, mesh: Mapping[str, int], work: Work) -> Iterator[Collective]:
  """Each device looks up what its part of the vocabulary has."""
  if work.over_model != "embed":
    yield from _of_output(size, work.over_model)
    return
  yield Collective(REDUCE_SCATTER, (MODEL_AXIS,), size, "activations")
  # The table's gradient, made where a part of `embed` is, goes where a part of the vocabulary is. XLA of
  # jax 0.11 brings all of it together for that.
  table = 4 * work.config.vocab_size * work.config.emb_dim * work.microbatches
  if jax.__version_info__ >= (0, 11):
    yield Collective(ALL_GATHER, (MODEL_AXIS,), table, "gradients")
  else:
    yield Collective(ALL_TO_ALL, (MODEL_AXIS,), table / mesh[MODEL_AXIS], "gradients")


def _summed(collectives: Sequence[Collective]) -> list[Collective]:
  found: dict[tuple[Any, ...], Collective] = {}
  for each in collectives:
    key = (each.kind, each.axes, each.why, each.terms)
    if (same := found.get(key)) is not None:
      size, count = same.size + each.size, same.count + each.count
      each = dataclasses.replace(each, size=size, count=count)
    found[key] = each
  return list(found.values())
