"""Estimates the memory, time and traffic of a training step on GPUs, from shapes alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rosetta_t5.plan.collectives import Collective, step_collectives
from rosetta_t5.plan.hardware import seconds_on_links
from rosetta_t5.plan.memory import step_memory
from rosetta_t5.plan.workload import Workload
from rosetta_t5.telemetry.gpus import Gpu

# The backward pass as a share of the compute time.
_BACKWARD_SHARE = 2 / 3
# What devices can send during the backward pass.
_CAN_OVERLAP = ("gradients", "parameters")


@dataclasses.dataclass(frozen=True)
class Traffic:
  """A collective and its cost.

  Attributes:
    collective: the collective.
    sent: bytes that each device sends in a step.
    seconds: how long that takes.
    leaves_node: whether it uses the network between nodes, and not only NVLink.
  """

  collective: Collective
  sent: float
  seconds: float
  leaves_node: bool


@dataclasses.dataclass(frozen=True)
class Estimate:
  """What a training step needs.

  Attributes:
    memory: the bytes on each device, by part.
    compute_seconds: the compute time at the MFU that a GPU reaches alone.
    traffic: what the devices send to each other.
  """

  memory: Mapping[str, float]
  compute_seconds: float
  traffic: list[Traffic]

  @property
  def waiting_seconds(self) -> float:
    """The time of the traffic that does not overlap with computation."""
    overlapping = sum(t.seconds for t in self.traffic if t.collective.why in _CAN_OVERLAP)
    exposed = sum(t.seconds for t in self.traffic) - overlapping
    return exposed + max(overlapping - _BACKWARD_SHARE * self.compute_seconds, 0.0)

  @property
  def step_seconds(self) -> float:
    """The time of a step."""
    return self.compute_seconds + self.waiting_seconds

  @property
  def efficiency(self) -> float:
    """The share of the step that is computation."""
    return self.compute_seconds / self.step_seconds


def estimate_step(
  state: Any, specs: Any, work: Workload, flops: float, gpu: Gpu, mfu: float
) -> Estimate:
  """Returns what a training step needs on these GPUs.

  Args:
    state: the train state's shapes.
    specs: the same tree with a PartitionSpec for each array.
    work: what the step computes.
    flops: the floating-point operations of a step, on all devices together.
    gpu: the GPU.
    mfu: the share of its peak FLOP/s that a GPU reaches if it never waits for others.
  """
  traffic = []
  for each in step_collectives(state.params, specs.params, work):
    sent = each.wire_bytes(work.mesh)
    traffic.append(Traffic(each, sent, *seconds_on_links(sent, each.axes, work.mesh, gpu)))
  compute_seconds = flops / (math.prod(work.mesh.values()) * gpu.bfloat16 * mfu)
  return Estimate(step_memory(state, specs, work), compute_seconds, traffic)
