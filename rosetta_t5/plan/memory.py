"""Estimates the memory that a run needs on each device, from shapes."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from rosetta_t5.parallel.mesh import FSDP_AXIS, axis_names
from rosetta_t5.plan.activations import (
  attention_bias_copies,
  deferred_by_layer,
  kept_by_layer,
  kept_outside_layers,
  pipeline_buffers,
  relative_bias_bytes,
  temporary_by_layer,
)
from rosetta_t5.plan.workload import Workload
from rosetta_t5.training.optimizers.optimizer_def import path_name

# Parameters of lookups, of the output layer and of routers.
_TABLES = re.compile(r"token_embedder|position_embedding|logits_dense|router_weights")


def state_bytes(state: Any, specs: Any, mesh: Mapping[str, int]) -> dict[str, float]:
  """Returns the bytes per device of a train state's parts, "params" and, if it has one, "optimizer"."""
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
    math.ceil(size / math.prod(mesh[name] for name in axis_names(axis)))
    for size, axis in zip(array.shape, axes, strict=True)
  ]
  return math.prod(shape) * array.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Gradients:
  """The bytes per device of a step's gradients, by what they are the gradients of.

  XLA keeps the gradient of a kernel in the compute dtype, or in float32 if layers are scanned, and those
  of the tables (the embeddings and the output layer) in float32.
  """

  tables: float
  encoder: float
  decoder: float


def gradient_bytes(params: Any, specs: Any, mesh: Mapping[str, int], itemsize: int) -> Gradients:
  """Returns the bytes per device of the gradients.

  Args:
    itemsize: the bytes of a number in the gradient of a kernel.
  """
  totals = {"tables": 0.0, "encoder": 0.0, "decoder": 0.0}
  for name, param, spec in named_parameters(params, specs):
    size = array_bytes(param, spec, mesh)
    if is_table(name):
      totals["tables"] += size
    else:
      side = "encoder" if "encoder" in name.split("/") else "decoder"
      totals[side] += size * itemsize / param.dtype.itemsize
  return Gradients(**totals)


def named_parameters(params: Any, specs: Any) -> Iterator[tuple[str, Any, Any]]:
  """Yields the name, the shape and the PartitionSpec of each parameter."""
  all_specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
  leaves = jax.tree_util.tree_leaves_with_path(params)
  for (path, param), spec in zip(leaves, all_specs, strict=True):
    yield path_name(path), param, spec


def is_table(name: str) -> bool:
  """Returns whether a parameter is one of a lookup, the output layer or a router, which stay in float32."""
  return _TABLES.search(name) is not None


def step_memory(state: Any, specs: Any, work: Workload) -> dict[str, float]:
  """Returns the bytes per device of the parts of a training step, when it needs most.

  The parts are "params", "optimizer", "activations" unless the network is unknown, and those of
  "gradients", "logits" and "gathered parameters" that exist at that moment.
  """
  return StateMemory.of(state, specs, work).step(work)


@dataclasses.dataclass(frozen=True)
class StateMemory:
  """The part of a step's memory that depends on the train state and the mesh only.

  Attributes:
    held: the bytes per device of "params" and "optimizer".
    gradients: the bytes per device of the gradients; None if the network is unknown.
  """

  held: dict[str, float]
  gradients: Gradients | None

  @classmethod
  def of(cls, state: Any, specs: Any, work: Workload) -> StateMemory:
    """Returns the memory of a train state; see `step_memory`."""
    held = state_bytes(state, specs, work.mesh)
    if not is_known(work):
      return cls(held, None)
    # The gradients of scanned layers are stacked in the parameters' type, float32.
    itemsize = 4 if work.is_scanned else work.itemsize
    return cls(held, gradient_bytes(state.params, specs.params, work.mesh, itemsize))

  def step(self, work: Workload) -> dict[str, float]:
    """Returns the bytes of the parts of a step on the same mesh; see `step_memory`."""
    if self.gradients is None:
      return {**self.held, "gradients": self.held["params"]}
    return self.held | _largest(*_moments(self.held["params"], self.gradients, work))


def is_known(work: Workload) -> bool:
  """Returns whether the network has the sizes from which activations can be computed."""
  names = ("vocab_size", "emb_dim", "num_heads", "head_dim", "mlp_dim", "mlp_activations")
  return all(hasattr(work.config, name) for name in names)


def _moments(params: float, gradients: Gradients, work: Workload) -> Iterator[dict[str, float]]:
  """Yields what exists besides the train state at each moment that may need the most memory.

  That is when the gradient of the logits exists; at the beginning of the decoder's or of the encoder's
  backward pass; when all gradients exist; and, if activations are split by length and nothing is
  rematerialized, when XLA computes the gradients of kernels that it has deferred.
  """
  examples, target = work.examples / work.microbatches, work.positions["decoder"]
  per_layer, per_temporary = kept_by_layer(work, work.policy), temporary_by_layer(work)
  # A stage has fewer layers and computes more examples. It also keeps what it computes in the bubble.
  in_layers = examples / (1.0 - work.schedule.bubble)
  kept = {side: in_layers * per_layer[side] * work.layers[side] for side in work.lengths}
  temporary = {side: work.stage_examples * per_temporary[side] for side in work.lengths}
  biases, bias_gradients = relative_bias_bytes(work)
  ends = examples * (kept_outside_layers(work) + pipeline_buffers(work))
  ends += attention_bias_copies(work) + biases
  logits = examples * work.config.vocab_size / work.model_shards * _logit_positions(work)
  copies, gathered = _kernel_copies(gradients, work), _gathered(gradients, work)
  forward = sum(kept.values()) + ends + sum(copies.values())
  # Microbatches are added up in float32.
  added_up = params if work.microbatches > 1 else 0.0
  # XLA sets the gradients of lookups to zero before the backward pass of a scan, or of one device and batch.
  is_one = math.prod(work.mesh.values()) == work.microbatches == 1
  lookups = gradients.tables if work.is_scanned or is_one else 0.0
  kernels = gradients.encoder + gradients.decoder
  stacked, kept_logits, tables = 0.0, 0.0, gathered["tables"]
  if work.is_scanned:
    # XLA sets the stacked gradients of all layers to zero before the first backward pass, and keeps the
    # gradient of the logits until after it, and of the output layer if that is not the embedding.
    # A pipeline adds up those of all ticks.
    sums = 2 if work.schedule.stages > 1 else 1
    stacked, kept_logits = sums * kernels, 4 * logits
    tables = 0.0 if _is_tied(work) else gathered["tables"]

  def moment(activations: float, grads: float, logits: float, gathered: float) -> dict[str, float]:
    parts = {"gradients": added_up + grads, "activations": activations, "logits": logits}
    parts["gathered parameters"] = gathered
    return {name: size for name, size in parts.items() if size or name == "activations"}

  yield moment(forward, lookups, 2 * 4 * logits, gathered["tables"] + gathered["decoder"])
  held, grads = forward + temporary["decoder"], gradients.tables + stacked
  yield moment(held, grads, kept_logits, tables + gathered["decoder"])
  if "encoder" in work.lengths:
    held = biases + kept["encoder"] + copies["encoder"] + temporary["encoder"]
    grads = gradients.tables + (stacked or gradients.decoder)
    yield moment(held, grads, 0.0, tables + gathered["encoder"])
  grads = gradients.tables + kernels
  yield moment(biases + bias_gradients, grads, 0.0, gathered["end"])
  if work.activation_split == "length" and work.policy == "none":
    deferred = deferred_by_layer(work)
    operands = sum(deferred[side] * work.layers[side] for side in work.lengths)
    # The last layer's gradients of its inputs are added up over devices.
    sums = 3 * work.positions.get("encoder", target) * work.config.emb_dim * work.itemsize
    held = examples * (operands + sums) + ends
    yield moment(held, grads, 4 * logits, gathered["end"])


def _gathered(gradients: Gradients, work: Workload) -> dict[str, float]:
  """Returns the bytes of the parameters that are gathered over `fsdp` and `context` at one time."""
  shards = work.mesh.get(FSDP_AXIS, 1) * work.context_shards
  if shards == 1:
    return {"tables": 0.0, "encoder": 0.0, "decoder": 0.0, "end": 0.0}
  # The embedding, the output layer and the latter's gradient; and the kernels of encoder or decoder,
  # which XLA gathers well before their backward pass, so that communication overlaps.
  copies, tables = dict.fromkeys(work.layers, 1.0), 1.5
  # At the end, the gradients of both lookups and of the output layer exist before they are scattered.
  end = 3.0 if _is_tied(work) else 1.5
  if work.schedule.stages > 1:
    # A pipeline adds up the gradients of gathered parameters.
    copies = dict.fromkeys(work.layers, 2.0)
  elif work.is_scanned:
    # A scan gathers one layer's kernels while it computes another's, in the compute dtype.
    size = 2 * work.itemsize / 4
    copies = {side: size / max(layers, 1) for side, layers in work.layers.items()}
    if not _is_tied(work):
      # Of two tables only one is complete at a time: the output layer, or its gradient.
      tables, end = 0.5, 1.0
  elif work.microbatches == 1:
    # XLA gathers about half of the kernels ahead; those of one layer if layers are rematerialized or the
    # kernels are in fp8. Nothing reads the embedding again.
    is_ahead = work.policy == "none" and not work.fp8
    copies = {s: 0.5 if is_ahead else 1 / max(n, 1) for s, n in work.layers.items()}
    tables = 2.0 if _is_tied(work) else 1.0
  return {
    "tables": tables * shards * gradients.tables,
    "end": end * shards * gradients.tables,
    "encoder": copies["encoder"] * shards * gradients.encoder,
    "decoder": copies["decoder"] * shards * gradients.decoder,
  }


def _is_tied(work: Workload) -> bool:
  """Returns whether the output layer is the embedding."""
  return bool(getattr(work.config, "logits_via_embedding", False))


def _kernel_copies(gradients: Gradients, work: Workload) -> dict[str, float]:
  """Returns the bytes of the copies of kernels that are kept, each as large as the gradient.

  These are kernels in the type in which they are multiplied. Rematerialized layers convert them again.
  If layers are scanned, each forward pass, and each that is repeated, reads the stacked kernels in
  float32 with the layers' dimension first.
  """
  is_kept = work.policy == "none"
  if work.is_scanned:
    is_read_again = not is_kept or work.microbatches > 1
    converted = work.itemsize / 4 if is_kept else 0.0
    size = is_read_again + converted
  elif not is_kept or work.itemsize == 4:
    size = 0.0
  else:
    size = 1 / work.itemsize if work.fp8 else 1.0
  return {"encoder": gradients.encoder * size, "decoder": gradients.decoder * size}


def _logit_positions(work: Workload) -> float:
  """Returns the number of target positions of a device whose logits exist at the same time."""
  target = work.lengths["decoder"]
  return min(work.loss_chunk_length or target, target) / work.context_shards


def _largest(*phases: dict[str, float]) -> dict[str, float]:
  """Returns the phase that needs the most memory."""
  return max(phases, key=lambda phase: sum(phase.values()))


def size_text(number: float) -> str:
  """Returns a number of bytes as text, such as 310 MB or 11.4 GB."""
  for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
    if number >= size:
      return f"{number / size:.3g} {unit}"
  return f"{number / 1e3:.3g} kB"
