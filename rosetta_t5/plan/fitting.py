"""What to set so that a step fits into a GPU: fewer examples at a time, less kept for the backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from rosetta_t5.plan.collectives import Work
from rosetta_t5.plan.estimate import step_memory
from rosetta_t5.plan.hardware import GPUS
from rosetta_t5.plan.memory import size_text

GPU = GPUS["h100"]
# What XLA and the communication between GPUs leave of a device's memory.
USABLE = 0.9
# From what costs least to what costs most: `full` computes the forward pass twice.
_POLICIES = ("none", "minimal", "full")


def advice(state: Any, splits: Any, mesh: Mapping[str, int], work: Work) -> list[str]:
  """Returns the changes with which a step fits, one a line; none if it fits as it is, or is unknown.

  Args:
    state: the train state's shapes.
    splits: the same tree with a PartitionSpec for each array.
    mesh: the size of each mesh axis.
    work: what the step works on.
  """

  def needed(microbatches: int, policy: str | None) -> float:
    parts = dataclasses.replace(work, microbatches=microbatches)
    return sum(step_memory(state, splits, mesh, parts, remat_policy=policy).values())

  now = step_memory(state, splits, mesh, work)
  policy = getattr(work.config, "remat_policy", None)
  if "activations" not in now or sum(now.values()) <= USABLE * GPU.memory:
    return []
  later = _POLICIES[_POLICIES.index(policy) :] if policy in _POLICIES else (policy,)
  lines: list[str] = []
  fewest = int(work.examples) + 1
  for choice in later:
    fits = (n for n in divisors(work) if needed(n, choice) <= USABLE * GPU.memory)
    if (parts := next(fits, fewest)) < fewest:  # else it costs more, and for nothing
      fewest = parts
      changes = [f"trainer.Trainer.num_microbatches = {parts}"] * (parts != work.microbatches)
      if choice != policy:
        changes += [f"network.{type(work.config).__name__}.remat_policy = {choice!r}"]
      lines.append(f"{' and '.join(changes)}: about {size_text(needed(parts, choice))}")
  return lines or [_not_by_these(now)]


def divisors(work: Work) -> Iterator[int]:
  """Yields the numbers of microbatches of whole examples on each device, not fewer than there are."""
  for parts in range(work.microbatches, int(work.examples) + 1):
    if work.examples % parts == 0:
      yield parts


def _not_by_these(now: Mapping[str, float]) -> str:
  rest = sum(size for name, size in now.items() if name != "activations")
  return (
    f"not by microbatches or remat: {size_text(rest)} are {', '.join(list(now)[:-1])}. Split them "
    'over devices: partitioning.PjitPartitioner.mesh = {"fsdp": …}, or num_partitions'
  )
