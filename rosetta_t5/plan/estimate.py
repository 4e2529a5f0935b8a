"""Memory, time and traffic of a training step on GPUs, estimated from shapes alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rosetta_t5.parallel.mesh_axes import MODEL_AXIS
from rosetta_t5.plan import memory
from rosetta_t5.plan.collectives import Collective, Work, step_collectives
from rosetta_t5.plan.hardware import Gpu, seconds_on_links

# Of the time to compute a step, what gradients and parameters can travel behind: the backward pass.
_HIDDEN_BEHIND = 2 / 3
_CAN_HIDE = ("gradients", "parameters")


@dataclasses.dataclass(frozen=True)
class Traffic:
  """A collective, and what it takes.

  Attributes:
    collective: the collective.
    sent: bytes that each device sends in a step.
    seconds: how long that takes.
    leaves_node: whether the network between nodes carries it, or NVLink alone.
  """

  collective: Collective
  sent: float
  seconds: float
  leaves_node: bool


@dataclasses.dataclass(frozen=True)
class Estimate:
  """What a step needs.

  Attributes:
    memory: bytes on each device, by what they hold.
    compute_seconds: at the MFU that one GPU reaches alone.
    traffic: what devices send each other.
  """

  memory: Mapping[str, float]
  compute_seconds: float
  traffic: list[Traffic]

  @property
  def waiting_seconds(self) -> float:
    """What of the traffic does not hide behind computing."""
    hidden = sum(t.seconds for t in self.traffic if t.collective.why in _CAN_HIDE)
    open_to_view = sum(t.seconds for t in self.traffic if t.collective.why not in _CAN_HIDE)
    return open_to_view + max(hidden - _HIDDEN_BEHIND * self.compute_seconds, 0.0)

  @property
  def step_seconds(self) -> float:
    """How long a step takes."""
    return self.compute_seconds + self.waiting_seconds

  @property
  def efficiency(self) -> float:
    """Which share of the step is spent computing."""
    return self.compute_seconds / self.step_seconds


def estimate_step(
  state: Any, splits: Any, mesh: Mapping[str, int], work: Work, flops: float, gpu: Gpu, mfu: float
) -> Estimate:
  """Returns what a training step needs on these GPUs.

  Args:
    state: the train state's shapes.
    splits: the same tree with a PartitionSpec for each array.
    mesh: the size of each mesh axis.
    work: what the step works on.
    flops: the floating-point operations of a step, on all devices together.
    gpu: the GPU.
    mfu: the share of its peak that one GPU reaches where it waits for no other.
  """
  traffic = []
  for each in step_collectives(state.params, splits.params, mesh, work):
    sent = each.wire_bytes(mesh)
    traffic.append(Traffic(each, sent, *seconds_on_links(sent, each.axes, mesh, gpu)))
  compute = flops / (math.prod(mesh.values()) * gpu.peak_flops * mfu)
  return Estimate(step_memory(state, splits, mesh, work), compute, traffic)


def step_memory(
  state: Any, splits: Any, mesh: Mapping[str, int], work: Work, **changes: Any
) -> dict[str, float]:
  """Returns the bytes that a training step needs on each device, by what they hold.

  Args:
    state: the train state's shapes.
    splits: the same tree with a PartitionSpec for each array.
    mesh: the size of each mesh axis.
    work: what the step works on.
    **changes: arguments of `memory.activation_bytes` in place of the config's.
  """
  parts: dict[str, float] = dict(memory.state_bytes(state, splits, mesh))
  parts["gradients"] = parts["params"]
  kept = memory.activation_bytes(
    work.config,
    work.lengths,
    work.examples / work.microbatches,
    mesh.get(MODEL_AXIS, 1),
    **({"loss_chunk_length": work.loss_chunk_length, "over_model": work.over_model} | changes),
  )
  return parts | ({"activations": kept} if kept is not None else {})
