"""Answers a state or a step that does not fit into memory with what would save most of it."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import jax

from rosetta_t5.parallel.mesh import batch_shards
from rosetta_t5.parallel.mesh_axes import DATA_AXIS, FSDP_AXIS, MODEL_AXIS
from rosetta_t5.plan.collectives import Work, split_over_model
from rosetta_t5.plan.estimate import step_memory
from rosetta_t5.plan.fitting import USABLE, divisors
from rosetta_t5.plan.memory import size_text, state_bytes

_Option = TypeVar("_Option")

_SHOWN = 3
_LOSS_CHUNK = 16
_NO_REMAT = ("none",)
_FULL_REMAT = ("full", "nothing_saveable")


class OutOfMemoryError(RuntimeError):
  """A device has not enough memory for the run; the text says what would help."""


@contextmanager
def answered_when_out_of_memory(
  model: Any, partitioner: Any, initializer: Any, feed: Any, trainer: Any = None
) -> Iterator[None]:
  """Inside a `with`, turns XLA's error of exhausted memory into one that says what to change.

  Args:
    model: the model.
    partitioner: the partitioner.
    initializer: knows the train state's shapes, and how they are split.
    feed: the training data, whose `element_spec` has the global batch's shapes, by feature.
    trainer: the trainer, whose microbatches count; None while the state is made or restored, where
      only splitting it helps.

  Raises:
    OutOfMemoryError: in place of XLA's.
  """

  def advice() -> list[str]:
    mesh = dict(partitioner.mesh.shape)
    work = work_of(model, partitioner, feed.element_spec, trainer, mesh)
    state, splits = initializer.global_train_state_shape, initializer.train_state_axes
    if trainer is not None:
      return _advice(state, splits, mesh, work)
    now = state_bytes(state, splits, mesh)
    return told(now, _splits_of_state(mesh, work, now))

  with answered(advice):
    yield


@contextmanager
def answered(advice: Callable[[], list[str]]) -> Iterator[None]:
  """Inside a `with`, turns XLA's error of exhausted memory into one that ends in advice.

  Args:
    advice: makes its lines.

  Raises:
    OutOfMemoryError: in place of XLA's.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    first = str(error).splitlines()[0]
    raise OutOfMemoryError("\n".join([f"a device's memory is full: {first}", *advice()])) from error


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
    microbatches=1 if trainer is None else trainer.num_microbatches,
    zero1=getattr(partitioner, "zero1", False),
    over_model=split_over_model(partitioner),
    loss_chunk_length=getattr(model, "_loss_chunk_length", None),
  )


def _advice(state: Any, splits: Any, mesh: Mapping[str, int], work: Work) -> list[str]:
  try:
    now = step_memory(state, splits, mesh, work)
  except (KeyError, AttributeError):  # A model of the user's own, with inputs of its own.
    return ["Smaller batches, more microbatches or more devices would help."]
  changes = _changes_of_step(state, splits, mesh, work, now)
  return told(now, [*changes, *_splits_of_state(mesh, work, now)])


def told(now: Mapping[str, float], changes: Iterable[tuple[float, str, str]]) -> list[str]:
  """Returns lines that say what is needed now, and the changes that save most.

  Args:
    now: bytes on each device, by what they hold.
    changes: bytes saved on each device, the line to add, and where that holds.
  """
  parts = ", ".join(f"{name} {size_text(size)}" for name, size in now.items())
  lines = [
    f"  {line}   # {condition}saves about {size_text(saved)}"
    for saved, line, condition in sorted(changes, reverse=True)[:_SHOWN]
    if saved > 0
  ]
  return [f"Estimated on each device: {parts}. What would save most:", *lines]


def _changes_of_step(
  state: Any, splits: Any, mesh: Mapping[str, int], work: Work, now: Mapping[str, float]
) -> Iterator[tuple[float, str, str]]:
  """Yields (bytes saved on each device, the line to add, where) of what is kept for a backward pass."""

  def needed(new_work: Work = work, **changes: Any) -> float:
    return sum(step_memory(state, splits, mesh, new_work, **changes).values())

  before = sum(now.values())
  parts = [dataclasses.replace(work, microbatches=n) for n in divisors(work)]
  parts = [each for each in parts if each.microbatches > work.microbatches]
  if parts:
    first = first_that_fits(parts, needed)
    line = f"trainer.Trainer.num_microbatches = {first.microbatches}"
    yield before - needed(first), line, ""
  policy = getattr(work.config, "remat_policy", "none")
  if policy not in _FULL_REMAT:
    # `full` saves more, and costs the whole forward pass again.
    later = "minimal" if policy in _NO_REMAT else "full"
    yield before - needed(remat_policy=later), f"network.T5Config.remat_policy = '{later}'", ""
  if not work.loss_chunk_length:
    line = f"models.EncoderDecoderModel.loss_chunk_length = {_LOSS_CHUNK}"
    yield before - needed(dataclasses.replace(work, loss_chunk_length=_LOSS_CHUNK)), line, ""


def _splits_of_state(
  mesh: Mapping[str, int], work: Work, now: Mapping[str, float]
) -> Iterator[tuple[float, str, str]]:
  """Yields (bytes saved on each device, the line to add, where) of splitting the state further."""
  copies, shards, model = (mesh.get(axis, 1) for axis in (DATA_AXIS, FSDP_AXIS, MODEL_AXIS))
  tensor = f', "tensor": {model}' if model > 1 else ""
  line = 'partitioning.PjitPartitioner.mesh = {{"fsdp": {}{}}}'
  of_state = sum(now.get(name, 0.0) for name in ("params", "optimizer", "gradients"))
  if copies > 1:
    yield of_state * (1 - 1 / copies), line.format(copies * shards, tensor), ""
    if not work.zero1:
      zero1 = "partitioning.PjitPartitioner.zero1 = True"
      yield now.get("optimizer", 0.0) * (1 - 1 / copies), zero1, ""
  if copies == 1 or of_state / copies > room():
    # Not with these devices: the first power of two times as many that it fits on.
    doublings = (copies * 2**n for n in itertools.count(1))
    parts = next(n for n in doublings if of_state / n <= room())
    where = f"on {parts * shards * model} devices: "
    yield of_state * (1 - 1 / parts), line.format(parts * shards, tensor), where


def first_that_fits(options: Sequence[_Option], needed: Callable[[_Option], float]) -> _Option:
  """Returns the first option whose bytes fit into a device, else the last."""
  return next((each for each in options if needed(each) <= room()), options[-1])


def room() -> float:
  """Returns the bytes that a run can use of a device; of the host's memory where that is a CPU."""
  stats = jax.local_devices()[0].memory_stats() or {}
  host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  return USABLE * stats.get("bytes_limit", host / jax.local_device_count())
