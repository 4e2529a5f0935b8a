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

from rosetta_t5.parallel.mesh_axes import (
  CONTEXT_AXIS,
  DATA_AXIS,
  EXPERT_AXIS,
  MODEL_AXIS,
  PIPELINE_AXIS,
  TOKEN_AXES,
)
from rosetta_t5.plan.activation_collectives import (
  ALL_GATHER,
  ALL_REDUCE,
  OVER_CONTEXT,
  OVER_MODEL,
  PERMUTE,
  REDUCE_SCATTER,
  Collective,
  activation_collectives,
  context_collectives,
  expert_collectives,
  pipeline_collectives,
)
from rosetta_t5.plan.memory import array_bytes, is_known, is_table
from rosetta_t5.plan.workload import Workload

_LAYER = re.compile(r"(?<=layers)_\d+")
# Parameters without the logical axis `embed`.
_WITHOUT_EMBED_AXIS = re.compile(r"(query|key|value|wi\w*)/bias|rel_embedding")


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
    found += activation_collectives(work, is_any_over_batch)
  if work.mesh.get(EXPERT_AXIS, 1) > 1:
    found += expert_collectives(work)
  if work.schedule.stages > 1 and is_known(work):
    found += pipeline_collectives(work)
  if work.context_shards > 1 and is_known(work):
    found += context_collectives(work)
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
  if PIPELINE_AXIS in spec:
    yield from _stage_parameter_collectives(param, spec, work)
    return
  # An expert is never gathered, and its gradient is complete but for the other batch axes.
  is_expert = EXPERT_AXIS in spec
  batch_axes = tuple(axis for axis in _batch_axes_of(spec, work.mesh) if axis != EXPERT_AXIS)
  model_spec = [part if part in (MODEL_AXIS, EXPERT_AXIS) else None for part in spec]
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
    # XLA keeps the gathered kernel of a router, which is small, for the backward pass.
    is_single = name.endswith("bias") or "router_weights" in name
    gathers = _num_gathers(lookups, is_tied, is_single, batch_axes, work)
    size = gathers * gathered * work.microbatches
    yield Collective(ALL_GATHER, batch_axes, size, "parameters", count=count * gathers)
  if is_expert:
    work = work.replace(mesh={**work.mesh, EXPERT_AXIS: 1})
  bias_bytes, layers = _position_bias(name, work)
  if bias_bytes and work.context_shards > 1:
    # Each device adds up its own queries' gradients by bucket.
    yield Collective(ALL_REDUCE, OVER_CONTEXT, gathered * work.microbatches, "gradients")
    work = work.replace(mesh={**work.mesh, CONTEXT_AXIS: 1})
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
    matmuls = each.terms if is_from_matmul else max(each.terms - max(lookups, 1), 0)
    for one in _split_sums(each, matmuls):
      yield dataclasses.replace(one, count=count) if one.why == "gradients" else one
  if work.model_shards > 1:
    yield from _split_activation_gradients(name, param, spec, gradient * work.microbatches, work)


def _stage_parameter_collectives(
  param: Any, spec: Sequence[Any], work: Workload
) -> Iterator[Collective]:
  """Yields how the parameters of a stage are gathered before its first microbatch, and summed at the end."""
  mesh = {**work.mesh, PIPELINE_AXIS: 1}
  kept_spec = [part if part in (MODEL_AXIS, PIPELINE_AXIS) else None for part in spec]
  size = array_bytes(param, kept_spec, work.mesh) * work.microbatches
  rounds = work.schedule.rounds
  if gathered_over := _batch_axes_of(spec, mesh):
    yield Collective(ALL_GATHER, gathered_over, size, "parameters")
  if summed_over := _batch_axes(mesh):
    yield Collective(ALL_REDUCE, summed_over, size, "gradients")
  if rounds > 1:
    # Chunks of layers go to the stages that compute them, and their gradients come back.
    yield Collective(PERMUTE, (PIPELINE_AXIS,), 2 * size, "parameters", count=2 * rounds)


def _split_activation_gradients(
  name: str, param: Any, spec: Sequence[Any], gradient: float, work: Workload
) -> Iterator[Collective]:
  """Yields what norms and position tables need if the activations are sharded over `model`."""
  is_table = name.endswith("position_embedding")
  is_sharded = MODEL_AXIS in spec
  if work.activation_split == "length" and not is_sharded and (param.ndim == 1 or is_table):
    # Each device computes the gradient of its own positions only.
    yield Collective(ALL_REDUCE, OVER_MODEL, gradient, "gradients")
  if is_table and is_sharded:
    # A table that is sharded along `embed` is gathered for the lookup, and its gradient too.
    table = math.prod(param.shape) * param.dtype.itemsize * work.microbatches
    yield Collective(ALL_GATHER, OVER_MODEL, 2 * table, "parameters", count=2)


def _is_fused_into_another(name: str, config: Any) -> bool:
  """Returns whether a kernel and its gradient are sent in the same array as another kernel's."""
  if not getattr(config, "fuse_qkv_params", False):
    return False
  is_cross = "encoder_decoder_attention" in name
  return name.endswith("key/kernel") or (name.endswith("query/kernel") and not is_cross)


def _num_gathers(
  lookups: int, is_tied: bool, is_single: bool, batch_axes: tuple[str, ...], work: Workload
) -> int:
  """Returns how often per step a parameter that is sharded over batch axes is gathered."""
  if lookups == 0:
    return 1 if is_single else 2  # Forward and backward. The gradient of a sum needs no bias.
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
  return tuple(axis for axis, size in mesh.items() if axis in TOKEN_AXES and size > 1)


def _split_sums(gradient: Collective, matmuls: int) -> list[Collective]:
  """Returns the sums of a gradient, of whose terms `matmuls` are results of a matmul.

  XLA computes such a sum over examples and positions at once, and others one after the other.
  """
  others = tuple(axis for axis in gradient.axes if axis != CONTEXT_AXIS)
  if matmuls == gradient.terms or others == gradient.axes or not others:
    return [gradient]
  at_once = [dataclasses.replace(gradient, terms=matmuls)] if matmuls else []
  terms = gradient.terms - matmuls
  return at_once + [
    dataclasses.replace(gradient, axes=axes, terms=terms) for axes in (others, OVER_CONTEXT)
  ]


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
  pairs = work.lengths[side] ** 2 / work.context_shards
  return heads * pairs * work.itemsize, work.layers[side]
