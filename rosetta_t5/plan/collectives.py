"""The collectives of a training step and their bytes, derived from the mesh and the shapes.

Matmuls are sharded over `model` as in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), and states
over `data` and `fsdp` as in ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054).
tests/parallel/test_collectives.py compares these collectives with those of compiled steps.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from rosetta_t5.parallel.mesh_axes import BATCH_AXES, DATA_AXIS, MODEL_AXIS
from rosetta_t5.plan.memory import array_bytes, is_table
from rosetta_t5.plan.workload import Workload

ALL_REDUCE = "all-reduce"
ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
ALL_TO_ALL = "all-to-all"

_LAYER = re.compile(r"(?<=layers)_\d+")
_OVER_MODEL = (MODEL_AXIS,)
# Parameters without the logical axis `embed`.
_WITHOUT_EMBED_AXIS = re.compile(r"(query|key|value|wi\w*)/bias|rel_embedding")


@dataclasses.dataclass(frozen=True)
class Collective:
  """Collectives of one kind over the same axes for the same purpose.

  Attributes:
    kind: all-reduce, all-gather, reduce-scatter or all-to-all.
    axes: the mesh axes whose devices take part.
    size: the bytes of the whole arrays on each device per step; for an all-to-all, of the device's
      shards.
    why: what is sent: "gradients", "parameters", "activations", "loss" or "norms".
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
    n = math.prod(mesh[axis] for axis in self.axes)
    return (2 if self.kind == ALL_REDUCE else 1) * (n - 1) / n * self.size


def step_collectives(params: Any, specs: Any, work: Workload) -> list[Collective]:
  """Returns the collectives of a training step.

  Args:
    params: the shapes of the parameters.
    specs: the same tree with a PartitionSpec for each.
    work: what the step computes.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params)
  all_specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
  # Layers are alike: the collectives of one are counted as often as there are layers.
  alike: dict[tuple[Any, ...], list[tuple[str, Any, Any]]] = collections.defaultdict(list)
  for (path, param), spec in zip(leaves, all_specs, strict=True):
    name = _LAYER.sub("", jax.tree_util.keystr(path, simple=True, separator="/"))
    alike[name, param.shape, tuple(spec)].append((name, param, spec))
  found: list[Collective] = []
  for same in alike.values():
    name, param, spec = same[0]
    for each in _parameter_collectives(name, param, spec, work):
      size, count = each.size * len(same), each.count * len(same)
      found.append(dataclasses.replace(each, size=size, count=count))
  if work.model_shards > 1:
    is_any_over_batch = any(_batch_axes_of(spec, work.mesh) for spec in all_specs)
    found += _activation_collectives(work, is_any_over_batch)
  return _merge(found)


def _merge(collectives: Sequence[Collective]) -> list[Collective]:
  """Adds up the sizes and counts of collectives that are otherwise the same."""
  merged: dict[tuple[Any, ...], Collective] = {}
  for each in collectives:
    key = (each.kind, each.axes, each.why, each.terms)
    total = merged.get(key, dataclasses.replace(each, size=0.0, count=0))
    size, count = total.size + each.size, total.count + each.count
    merged[key] = dataclasses.replace(each, size=size, count=count)
  return list(merged.values())


# The collectives of parameters and their gradients.


def _parameter_collectives(
  name: str, param: Any, spec: Sequence[Any], work: Workload
) -> Iterator[Collective]:
  """Yields how a parameter is gathered and how its gradient is summed."""
  batch_axes = _batch_axes_of(spec, work.mesh)
  model_spec = [part if part == MODEL_AXIS else None for part in spec]
  # The bytes of the parameter when it is gathered over the batch axes. Kernels are sent in the compute
  # dtype, and so are their gradients; tables are not.
  stored = array_bytes(param, model_spec, work.mesh)
  itemsize = param.dtype.itemsize if is_table(name) else work.itemsize
  gathered = stored * itemsize / param.dtype.itemsize
  lookups = _num_lookups(name, work.config)
  # A tied embedding table is also the kernel of the matmul that computes the logits.
  is_tied = "token_embedder" in name and getattr(work.config, "logits_via_embedding", False)
  count = 0 if _is_fused_into_another(name, work.config) else 1
  if batch_axes:
    gathers = _num_gathers(lookups, is_tied, name.endswith("bias"), batch_axes, work)
    size = gathers * gathered * work.microbatches
    yield Collective(ALL_GATHER, batch_axes, size, "parameters", count=count * gathers)
  bias_bytes, layers = _position_bias(name, work)
  gradient = bias_bytes or float(gathered)
  # The gradient of a lookup or of a norm's scale is not the result of a matmul.
  is_from_matmul = lookups == 0 and param.ndim > 1
  sums = _gradient_sums(
    gradient=gradient,
    terms=lookups + is_tied or layers,
    other_terms=0 if is_from_matmul else lookups or 1,
    batch_axes=batch_axes,
    # The optimizer's state is sharded where the parameter has `embed` (see `PjitPartitioner.zero1`).
    stored=stored if work.zero1 and not _WITHOUT_EMBED_AXIS.search(name) else None,
    work=work,
  )
  for each in sums:
    yield dataclasses.replace(each, count=count) if each.why == "gradients" else each
  if work.model_shards > 1:
    yield from _split_activation_gradients(name, param, spec, gradient * work.microbatches, work)


def _split_activation_gradients(
  name: str, param: Any, spec: Sequence[Any], gradient: float, work: Workload
) -> Iterator[Collective]:
  """Yields what norms and position tables need if the activations are sharded over `model`."""
  is_table = name.endswith("position_embedding")
  is_sharded = MODEL_AXIS in spec
  if work.activation_split == "length" and not is_sharded and (param.ndim == 1 or is_table):
    # Each device computes the gradient of its own positions only.
    yield Collective(ALL_REDUCE, _OVER_MODEL, gradient, "gradients")
  if is_table and is_sharded:
    # A table that is sharded along `embed` is gathered for the lookup, and its gradient too.
    table = math.prod(param.shape) * param.dtype.itemsize * work.microbatches
    yield Collective(ALL_GATHER, _OVER_MODEL, 2 * table, "parameters", count=2)


def _is_fused_into_another(name: str, config: Any) -> bool:
  """Returns whether a kernel and its gradient are sent in the same array as another kernel's."""
  if not getattr(config, "fuse_qkv_params", False):
    return False
  is_cross = "encoder_decoder_attention" in name
  return name.endswith("key/kernel") or (name.endswith("query/kernel") and not is_cross)


def _num_gathers(
  lookups: int, is_tied: bool, is_bias: bool, batch_axes: tuple[str, ...], work: Workload
) -> int:
  """Returns how often per step a parameter that is sharded over batch axes is gathered."""
  if lookups == 0:
    return 1 if is_bias else 2  # Forward and backward. The gradient of a sum needs no bias.
  if not is_tied:
    return 1  # The gradient of a lookup does not need the table.
  # If the vocabulary is sharded and the gradient is summed over another axis too, the matmul with the
  # table gathers it again for the backward pass.
  others = set(_batch_axes(work.mesh)) - set(batch_axes)
  return 2 + (work.model_shards > 1 and bool(others))


def _gradient_sums(
  gradient: float,
  terms: int,
  other_terms: int,
  batch_axes: tuple[str, ...],
  stored: float | None,
  work: Workload,
) -> Iterator[Collective]:
  """Yields how the gradient of one parameter is summed over the batch, and what ZeRO-1 adds.

  Args:
    gradient: its bytes.
    terms: the number of arrays whose sum the gradient is.
    other_terms: how many of these arrays are not the result of a matmul.
    batch_axes: the batch axes that the parameter is sharded over.
    stored: the parameter's bytes if its optimizer state is sharded over `data`, else None.
    work: what the step computes.
  """
  all_axes = _batch_axes(work.mesh)
  others = tuple(axis for axis in all_axes if axis not in batch_axes)
  size = gradient * work.microbatches
  if batch_axes and others and other_terms:
    # XLA sums these over all batch axes at once, and each device keeps its shard.
    yield Collective(ALL_REDUCE, all_axes, size, "gradients", other_terms)
    terms = max(terms - other_terms, 0)
  shards = math.prod(work.mesh[axis] for axis in batch_axes)
  if terms and batch_axes:
    yield Collective(REDUCE_SCATTER, batch_axes, size, "gradients", terms)
    size, terms = size / shards, 1
  zero1 = stored is not None and DATA_AXIS in others
  if terms and others:
    yield Collective(REDUCE_SCATTER if zero1 else ALL_REDUCE, others, size, "gradients", terms)
  if zero1:
    yield Collective(ALL_GATHER, (DATA_AXIS,), (stored or 0.0) / shards, "parameters")


def _batch_axes(mesh: Mapping[str, int]) -> tuple[str, ...]:
  return tuple(axis for axis in BATCH_AXES if mesh.get(axis, 1) > 1)


def _batch_axes_of(spec: Sequence[Any], mesh: Mapping[str, int]) -> tuple[str, ...]:
  """Returns the batch axes over which a parameter is sharded."""
  named = {axis for part in spec if part for axis in (part if isinstance(part, tuple) else (part,))}
  return tuple(axis for axis in _batch_axes(mesh) if axis in named)


def _num_lookups(name: str, config: Any) -> int:
  """Returns how many times per step a table of tokens or positions is looked up."""
  if "token_embedder" not in name:
    return int(name.endswith("position_embedding"))
  return 2 if hasattr(config, "num_encoder_layers") else 1


def _position_bias(name: str, work: Workload) -> tuple[float, int]:
  """Returns the bytes of a relative position bias and the number of its layers; (0, 1) for others.

  Each layer's gradient is summed as [heads, T, T], before its elements are added up by bucket.
  """
  if "rel_embedding" not in name:
    return 0, 1
  side = "encoder" if "encoder" in work.lengths and "encoder/" in name else "decoder"
  heads = work.config.num_heads / work.model_shards
  return heads * work.lengths[side] ** 2 * work.itemsize, work.layers[side]


# The collectives of activations, over `model`.


def _activation_collectives(work: Workload, is_any_over_batch: bool) -> Iterator[Collective]:
  """Yields the sums over heads, feed-forward units and vocabulary, forward and backward."""
  # The bytes of the activations between blocks, for encoder and decoder.
  width = work.config.emb_dim * work.itemsize * work.examples
  residuals = {side: length * width for side, length in work.lengths.items()}
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
    for _ in range(layers * matmuls):
      yield from _output_collectives(residuals.get(side, 0.0), work.activation_split, gathers)
  for size in residuals.values():
    yield from _lookup_collectives(size, work)
  # The largest logit and the sum of exponentials, in float32.
  size = 2 * 4 * work.examples * work.lengths["decoder"]
  yield Collective(ALL_REDUCE, _OVER_MODEL, size, "loss", count=2)
  if work.activation_split == "embed":
    yield from _norm_collectives(work)


def _matmul_inputs(
  work: Workload, residuals: Mapping[str, float]
) -> Iterator[tuple[float, int, int]]:
  """Yields each input of matmuls whose results are sharded: bytes, number of matmuls and of layers."""
  qkv, kv = (1, 1) if getattr(work.config, "fuse_qkv_params", False) else (3, 2)
  branches = len(work.config.mlp_activations)
  for side, layers in work.layers.items():
    if layers:
      yield from [(residuals[side], qkv, 1), (residuals[side], branches, 1)] * layers
    if side == "decoder" and "encoder" in residuals:
      yield from [(residuals["decoder"], 1, 1)] * layers
      yield residuals["encoder"], kv, layers


def _input_collectives(
  size: float, matmuls: int, layers: int, activation_split: str | None, is_kept: bool = False
) -> Iterator[Collective]:
  """Yields how the gradient of an input is summed, and how an input that is sharded is gathered."""
  kind = REDUCE_SCATTER if activation_split else ALL_REDUCE
  yield Collective(kind, _OVER_MODEL, layers * size, "activations", matmuls, layers)
  if activation_split:
    # XLA gathers an input that is sharded along "length" once and keeps it. It gathers one that is
    # sharded along "embed" for each matmul, and again for the gradient of the matmul's parameter.
    gathers = 2 * matmuls * layers if activation_split == "embed" and not is_kept else 1
    yield Collective(ALL_GATHER, _OVER_MODEL, gathers * size, "activations", count=gathers)


def _output_collectives(
  size: float, activation_split: str | None, gathers: int = 1
) -> Iterator[Collective]:
  """Yields how the output of a sharded matmul is summed, and how its gradient is gathered."""
  if not activation_split:
    yield Collective(ALL_REDUCE, _OVER_MODEL, size, "activations")
    return
  yield Collective(REDUCE_SCATTER, _OVER_MODEL, size, "activations")
  yield Collective(ALL_GATHER, _OVER_MODEL, gathers * size, "activations", count=gathers)


def _lookup_collectives(size: float, work: Workload) -> Iterator[Collective]:
  """Yields how lookups are summed: each device looks up the tokens of its part of the vocabulary."""
  if work.activation_split != "embed":
    yield from _output_collectives(size, work.activation_split)
    return
  yield Collective(REDUCE_SCATTER, _OVER_MODEL, size, "activations")
  # The table's gradient is computed in shards of `embed` and needed in shards of the vocabulary. The
  # XLA of jax 0.11 gathers the whole gradient for that.
  table = 4 * work.config.vocab_size * work.config.emb_dim * work.microbatches
  if jax.__version_info__ >= (0, 11):
    yield Collective(ALL_GATHER, _OVER_MODEL, table, "gradients")
  else:
    yield Collective(ALL_TO_ALL, _OVER_MODEL, table / work.model_shards, "gradients")


def _norm_collectives(work: Workload) -> Iterator[Collective]:
  """Yields the float32 sums over a sharded `embed`: a norm's mean square, and one for its gradient.

  A LayerNorm needs four sums, because it subtracts the mean.
  """
  sums = 4 if getattr(work.config, "norm", "rms") == "layer" else 2
  norms = {"encoder": 2, "decoder": 3 if "encoder" in work.lengths else 2}
  for side, length in work.lengths.items():
    count = sums * (work.layers[side] * norms[side] + 1)
    size = count * 4 * work.examples * length
    yield Collective(ALL_REDUCE, _OVER_MODEL, size, "norms", count=count)
