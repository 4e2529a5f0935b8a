"""Suggests what to change if the train state or a training step does not fit into a device's memory."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from rosetta_t5.memory_advice.suggestions import (
  LOSS_CHUNK,
  Change,
  advice_lines,
  explain_with,
  first_that_fits,
  usable_bytes,
)
from rosetta_t5.parallel.mesh_axes import DATA_AXIS, FSDP_AXIS, MODEL_AXIS, OPTIONAL_AXES
from rosetta_t5.plan.activations import KEEP_NOTHING
from rosetta_t5.plan.fitting import USABLE, changes_text, possible_microbatches
from rosetta_t5.plan.memory import StateMemory, size_text, state_bytes
from rosetta_t5.plan.workload import Workload, batch_workload


@contextlib.contextmanager
def explain_out_of_memory(
  model: Any, partitioner: Any, initializer: Any, feed: Any, trainer: Any = None
) -> Iterator[None]:
  """Adds advice to XLA's out-of-memory errors inside the `with`.

  A state that is larger than a device's memory is such an error before any of it is allocated: on a CPU
  the operating system would end the process.

  Args:
    initializer: provides the train state's shapes and PartitionSpecs.
    feed: the training data, whose `element_spec` contains the shapes of the global batch.
    trainer: provides the number of microbatches; None while the state is initialized or restored, so
      that only sharding it would help.

  Raises:
    OutOfMemoryError: instead of XLA's error.
  """

  def advice() -> list[str]:
    mesh = dict(partitioner.mesh.shape)
    shapes = {name: spec.shape for name, spec in feed.element_spec.items()}
    microbatches = trainer.num_microbatches if trainer is not None else None
    state, specs = initializer.global_train_state_shape, initializer.train_state_axes
    work = batch_workload(model, partitioner, shapes, mesh, microbatches)
    if trainer is None:
      now: Mapping[str, float] = state_bytes(state, specs, mesh)
      return advice_lines(now, _state_changes(work, now))
    memory = StateMemory.of(state, specs, work)
    now = memory.step(work)
    return advice_lines(now, [*_activation_changes(work, memory), *_state_changes(work, now)])

  with explain_with(advice, "Smaller batches, more microbatches or more devices would help."):
    if trainer is None:
      with contextlib.suppress(KeyError, AttributeError):  # The classes are a user's own.
        mesh = dict(partitioner.mesh.shape)
        _check_fits(initializer.global_train_state_shape, initializer.train_state_axes, mesh)
    yield


def _check_fits(state: Any, specs: Any, mesh: Mapping[str, int]) -> None:
  needed, memory = sum(state_bytes(state, specs, mesh).values()), usable_bytes() / USABLE
  if needed > memory:
    raise jax.errors.JaxRuntimeError(
      f"RESOURCE_EXHAUSTED: Out of memory: the state needs {size_text(needed)} on each device, which "
      f"has {size_text(memory)}"
    )


def _activation_changes(work: Workload, memory: StateMemory) -> Iterator[Change]:
  """Yields the changes with which less is kept for the backward pass."""

  def needed(changed: Workload) -> float:
    return sum(memory.step(changed).values())

  numbers = (n for n in possible_microbatches(work) if n > work.microbatches)
  in_parts = [work.replace(microbatches=n) for n in numbers]
  options = [first_that_fits(in_parts, needed)] if in_parts else []
  if work.policy not in KEEP_NOTHING:
    # `full` saves more, but computes the whole forward pass twice.
    options.append(work.replace(remat_policy="minimal" if work.policy == "none" else "full"))
  if not work.loss_chunk_length:
    options.append(work.replace(loss_chunk_length=LOSS_CHUNK))
  for option in options:
    yield Change(needed(work) - needed(option), changes_text(work, option))


def _state_changes(work: Workload, now: Mapping[str, float]) -> Iterator[Change]:
  """Yields the changes that shard the train state over more devices."""
  copies, shards, model = (work.mesh.get(axis, 1) for axis in (DATA_AXIS, FSDP_AXIS, MODEL_AXIS))
  kept = {axis: work.mesh[axis] for axis in OPTIONAL_AXES if work.mesh.get(axis, 1) > 1}
  kept |= {"tensor": model} if model > 1 else {}
  others = "".join(f', "{axis}": {size}' for axis, size in kept.items())
  line = 'partitioning.PjitPartitioner.mesh = {{"fsdp": {}{}}}'
  state = sum(now.get(name, 0.0) for name in ("params", "optimizer", "gradients"))
  if copies > 1:
    yield Change(state * (1 - 1 / copies), line.format(copies * shards, others))
    if not work.zero1:
      zero1 = "partitioning.PjitPartitioner.zero1 = True"
      yield Change(now.get("optimizer", 0.0) * (1 - 1 / copies), zero1)
  if copies == 1 or state / copies > usable_bytes():
    # The state does not fit on these devices. Their number is doubled until it does.
    doublings = (copies * 2**n for n in itertools.count(1))
    parts = next(n for n in doublings if state / n <= usable_bytes())
    condition = f"on {parts * shards * math.prod(kept.values())} devices: "
    yield Change(state * (1 - 1 / parts), line.format(parts * shards, others), condition)
