"""Finds the microbatches and rematerialization with which a step fits into a GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rosetta_t5.plan.memory import StateMemory, size_text
from rosetta_t5.plan.workload import Workload
from rosetta_t5.telemetry.gpus import GPUS

GPU = GPUS["h100"]
# The share of a device's memory that arrays can use. XLA and NCCL need the rest.
USABLE = 0.9
# In order of cost: `full` computes the forward pass twice.
POLICIES = ("none", "minimal", "full")


def changes_that_fit(state: Any, specs: Any, work: Workload) -> list[str]:
  """Returns alternative changes with which a step fits, one per line.

  The list is empty if the step fits already, or if its network is unknown.
  """
  memory = StateMemory.of(state, specs, work)
  now, limit = memory.step(work), USABLE * GPU.memory
  if "activations" not in now or _total(now) <= limit:
    return []
  is_known = hasattr(work.config, "remat_policy") and work.policy in POLICIES
  policies = POLICIES[POLICIES.index(work.policy) :] if is_known else (work.policy,)
  lines: list[str] = []
  fewest = int(work.examples) + 1
  for policy in policies:
    option = fewest_microbatches(work.replace(remat_policy=policy), memory, limit)
    # A policy that costs more must need fewer microbatches.
    if option is not None and option.microbatches < fewest:
      lines.append(f"{changes_text(work, option)}: about {size_text(_total(memory.step(option)))}")
      fewest = option.microbatches
  if lines:
    return lines
  numbers = list(possible_microbatches(work))
  options = [work.replace(microbatches=n, remat_policy=p) for p in policies for n in numbers]
  return [_sharding_advice(min(map(memory.step, [work, *options]), key=_total))]


def fewest_microbatches(work: Workload, memory: StateMemory, limit: float) -> Workload | None:
  """Returns the step in as few microbatches as fit into `limit` bytes; None if it does not fit."""
  options = (work.replace(microbatches=number) for number in possible_microbatches(work))
  return next((option for option in options if _total(memory.step(option)) <= limit), None)


def _total(parts: Mapping[str, float]) -> float:
  return sum(parts.values())


def changes_text(work: Workload, option: Workload) -> str:
  """Returns the gin bindings that turn a workload into another one."""
  changes = []
  if option.microbatches != work.microbatches:
    changes.append(f"trainer.Trainer.num_microbatches = {option.microbatches}")
  if option.policy != work.policy:
    changes.append(f"network.{type(work.config).__name__}.remat_policy = {option.policy!r}")
  if option.loss_chunk_length != work.loss_chunk_length:
    chunk = option.loss_chunk_length
    changes.append(f"models.EncoderDecoderModel.loss_chunk_length = {chunk}")
  return " and ".join(changes)


def possible_microbatches(work: Workload) -> Iterator[int]:
  """Returns the divisors of the examples of a device that are at least the number of microbatches.

  Numbers that leave a pipeline too few examples for its settings are excluded.
  """
  numbers = range(work.microbatches, int(work.examples) + 1)
  divisors = (number for number in numbers if work.examples % number == 0)
  return (number for number in divisors if _has_schedule(work.replace(microbatches=number)))


def _has_schedule(work: Workload) -> bool:
  """Returns whether the batch can be divided into the microbatches of the pipeline."""
  try:
    return work.schedule.stages > 0
  except ValueError:
    return False


def _sharding_advice(least: Mapping[str, float]) -> str:
  state = {name: least[name] for name in ("params", "optimizer", "gradients") if name in least}
  return (
    f"microbatches and rematerialization do not suffice: {size_text(_total(state))} are "
    f"{', '.join(state)}. Shard them over devices: "
    'partitioning.PjitPartitioner.mesh = {"fsdp": …}, or num_partitions'
  )
