"""Answers a step that does not fit into memory with the changes that would save most of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from rosetta_t5.parallel.counts import DATA_AXIS, FSDP_AXIS, MODEL_AXIS
from rosetta_t5.parallel.mesh import batch_shards
from rosetta_t5.plan.collectives import Work, split_over_model
from rosetta_t5.plan.estimate import step_memory
from rosetta_t5.plan.memory import size_text

_SHOWN = 3
_LOSS_CHUNK = 16
_NO_REMAT = ("none",)
_FULL_REMAT = ("full", "nothing_saveable")


class OutOfMemoryError(RuntimeError):
  """A device has not enough memory for the run; the text says what would help."""


@contextmanager
def answered_when_out_of_memory(
  trainer: Any, model: Any, partitioner: Any, initializer: Any, batch: Mapping[str, Any]
) -> Iterator[None]:
  """Inside a `with`, turns XLA's error of exhausted memory into one that says what to change.

  Args:
    trainer: the trainer, whose microbatches count.
    model: the model.
    partitioner: the partitioner.
    initializer: knows the train state's shapes, and how they are split.
    batch: the global batch's shapes, by feature.

  Raises:
    OutOfMemoryError: in place of XLA's.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    mesh = dict(partitioner.mesh.shape)
    work = work_of(model, partitioner, batch, trainer, mesh)
    state, splits = initializer.global_train_state_shape, initializer.train_state_axes
    advice = _advice(state, splits, mesh, work)
    first = str(error).splitlines()[0]
    raise OutOfMemoryError("\n".join([f"a device's memory is full: {first}", *advice])) from error


def work_of(
  model: Any, partitioner: Any, batch: Mapping[str, Any], trainer: Any, mesh: Mapping[str, int]
) -> Work:
  """Returns what a step of this run works on."""
  features = {"encoder": "encoder_input_tokens", "decoder": "decoder_target_tokens"}
  examples = next(iter(batch.values())).shape[0]
  return Work(
    config=getattr(getattr(model, "module", None), "config", None),
    lengths={side: batch[name].shape[1] for side, name in features.items() if name in batch},
    examples=examples / batch_shards(mesh),
    microbatches=getattr(trainer, "_num_microbatches", None) or 1,
    zero1=getattr(partitioner, "zero1", False),
    over_model=split_over_model(partitioner),
    loss_chunk_length=getattr(model, "_loss_chunk_length", None),
  )


def _advice(state: Any, splits: Any, mesh: Mapping[str, int], work: Work) -> list[str]:
  try:
    now = step_memory(state, splits, mesh, work)
  except (KeyError, AttributeError):  # A model of the user's own, with inputs of its own.
    return ["Smaller batches, more microbatches or more devices would help."]
  parts = ", ".join(f"{name} {size_text(size)}" for name, size in now.items())
  found = sorted(_changes(state, splits, mesh, work, now), reverse=True)[:_SHOWN]
  lines = [f"  {line}   # saves about {size_text(saved)}" for saved, line in found if saved > 0]
  if not lines:
    return [f"Estimated on each device: {parts}. More devices or a smaller batch would help."]
  return [f"Estimated on each device: {parts}. What would save most:", *lines]


def _changes(
  state: Any, splits: Any, mesh: Mapping[str, int], work: Work, now: Mapping[str, float]
) -> Iterator[tuple[float, str]]:
  """Yields (bytes saved on each device, the line to add)."""

  def saved(new_work: Work = work, **changes: Any) -> float:
    return sum(now.values()) - sum(step_memory(state, splits, mesh, new_work, **changes).values())

  parts = work.microbatches * 2
  if work.examples % parts == 0:
    line = f"trainer.Trainer.num_microbatches = {parts}"
    yield saved(dataclasses.replace(work, microbatches=parts)), line
  policy = getattr(work.config, "remat_policy", "none")
  if policy not in _FULL_REMAT:
    # `full` saves more, and costs the whole forward pass again.
    line = f"network.T5Config.remat_policy = '{'minimal' if policy in _NO_REMAT else 'full'}'"
    yield saved(remat_policy="minimal" if policy in _NO_REMAT else "full"), line
  if not work.loss_chunk_length:
    line = f"models.EncoderDecoderModel.loss_chunk_length = {_LOSS_CHUNK}"
    yield saved(dataclasses.replace(work, loss_chunk_length=_LOSS_CHUNK)), line
  shards = mesh.get(DATA_AXIS, 1)
  of_state = now["params"] + now.get("optimizer", 0.0) + now["gradients"]
  if shards > 1 and mesh.get(FSDP_AXIS, 1) == 1:
    tensor = f', "tensor": {mesh[MODEL_AXIS]}' if mesh.get(MODEL_AXIS, 1) > 1 else ""
    line = f'partitioning.PjitPartitioner.mesh = {{"fsdp": {shards}{tensor}}}'
    yield of_state * (1 - 1 / shards), line
    if not work.zero1:
      line = "partitioning.PjitPartitioner.zero1 = True"
      yield now.get("optimizer", 0.0) * (1 - 1 / shards), line
