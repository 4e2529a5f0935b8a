"""Estimates the memory, time and traffic of a training step on GPUs, from shapes and the speed of links."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

import jax

from rosetta_t5.plan.activations import KEEP_MATMULS, KEEP_NOTHING, is_attention
from rosetta_t5.plan.collectives import Collective, step_collectives
from rosetta_t5.plan.memory import StateMemory
from rosetta_t5.plan.workload import Workload
from rosetta_t5.telemetry.gpus import GPUS_PER_NODE, Gpu

# The backward pass as a share of the compute time.
_BACKWARD_SHARE = 2 / 3
# The share of their peak that large matmuls reach; what else a step does is not bound by the tensor cores.
_MATMUL_EFFICIENCY = 0.8
# XLA's attention writes logits and probabilities and reads them, each in several passes, and so does
# its backward pass.
_PAIR_PASSES = 10
# Of the four sums of activations over `model` in a layer's forward and backward pass, one is repeated: nothing in the
# backward pass reads the one that ends the layer.
_RECOMPUTED_TRAFFIC = 1.25
# The share of a link's bandwidth that large collectives reach (approximately NCCL's bus bandwidth).
_LINK_EFFICIENCY = 0.8
# What devices can send during the backward pass.
_CAN_OVERLAP = ("gradients", "parameters")


@dataclasses.dataclass(frozen=True)
class Estimate:
  """What a training step needs.

  Attributes:
    memory: the bytes on each device, by part.
    compute_seconds: the compute time of a GPU that never waits for others.
    traffic: what the devices send to each other, with its cost.
    bubble: the share of the time of its layers in which a stage of a pipeline has no microbatch.
  """

  memory: Mapping[str, float]
  compute_seconds: float
  traffic: list[Collective]
  bubble: float = 0.0

  @property
  def bubble_seconds(self) -> float:
    """The time in which a stage of a pipeline has no microbatch."""
    return self.compute_seconds * self.bubble / (1.0 - self.bubble)

  @property
  def waiting_seconds(self) -> float:
    """The time of the traffic that does not overlap with computation."""
    overlapping = sum(t.seconds for t in self.traffic if t.why in _CAN_OVERLAP)
    exposed = sum(t.seconds for t in self.traffic) - overlapping
    return exposed + max(overlapping - _BACKWARD_SHARE * self.compute_seconds, 0.0)

  @property
  def step_seconds(self) -> float:
    """The time of a step."""
    return self.compute_seconds + self.bubble_seconds + self.waiting_seconds


def estimate_step(
  memory: StateMemory, work: Workload, flops: float, gpu: Gpu, mfu: float
) -> Estimate:
  """Returns what a training step needs on these GPUs.

  Args:
    flops: the floating-point operations of a step, on all devices together.
    mfu: the share of its peak FLOP/s in the compute dtype that a GPU reaches if it never waits for others.
  """
  traffic = []
  for each in step_collectives(work):
    sent = each.wire_bytes(work.mesh)
    if each.why == "activations" and work.remat_policy in KEEP_NOTHING:
      sent *= _RECOMPUTED_TRAFFIC
    seconds, leaves_node = seconds_on_links(sent, each.axes, work.mesh, gpu)
    seconds /= _LINK_EFFICIENCY
    timed = dataclasses.replace(each, sent=sent, seconds=seconds, leaves_node=leaves_node)
    traffic.append(timed)
  peak = gpu.tf32 if work.itemsize == 4 else gpu.bfloat16
  seconds = flops / (math.prod(work.mesh.values()) * peak * mfu)
  if work.activations is not None:
    seconds *= _relative_time(work, gpu, mfu)
    seconds += (_pair_bytes(work) + _state_bytes_moved(memory, work)) / gpu.bandwidth
  return Estimate(memory.step(work), seconds, traffic, work.schedule.bubble)


def _relative_time(work: Workload, gpu: Gpu, mfu: float) -> float:
  """Returns the compute time relative to that in bfloat16 without rematerialization.

  fp8 makes the projections faster, and nothing else. Rematerialization repeats forward passes, which are
  a third of a step.
  """
  matmuls = min(mfu / _MATMUL_EFFICIENCY, 1.0)  # the share of the time
  other = 1.0 - matmuls
  flops = _flops_by_kind(work)
  total = sum(flops.values())
  projections, attention, logits = (
    matmuls * flops[kind] / total for kind in ("projections", "attention", "logits")
  )
  if work.fp8 and gpu.fp8:
    projections *= gpu.bfloat16 / gpu.fp8
  total = projections + attention + logits + other
  if work.remat_policy in KEEP_NOTHING:
    total += (projections + attention + other) / 3
  elif work.remat_policy in KEEP_MATMULS:
    total += (attention * (work.remat_policy != "dots_saveable") + other) / 3
  return total + (logits / 3 if work.loss_chunk_length else 0.0)


def _flops_by_kind(work: Workload) -> dict[str, float]:
  """Returns the FLOPs of the layers' projections and attention, and of matmuls outside layers."""
  found = {"projections": 0.0, "attention": 0.0, "logits": 0.0}
  for part in work.activations.segments if work.activations else ():
    for value in part.values:
      kind = "attention" if value.flops and is_attention(value) else "projections"
      found[kind if part.count else "logits"] += part.layers * value.flops
  return found


def _pair_bytes(work: Workload) -> float:
  """Returns the bytes that attention moves for logits and probabilities; 0 for a fused kernel."""
  if work.is_attention_fused or work.activations is None:
    return 0.0
  passes = _PAIR_PASSES * (1.0 if work.remat_policy == "none" else 4 / 3)
  pairs = [
    part.layers * work.layout.bytes_of(value, work.examples)
    for part in work.activations.segments
    for value in part.values
    if is_attention(value) and work.activations.is_pair(value)
  ]
  return passes * sum(pairs)


def _state_bytes_moved(memory: StateMemory, work: Workload) -> float:
  """Returns the bytes that the optimizer reads and writes, and the sums over microbatches."""
  params, optimizer = memory.held["params"], memory.held.get("optimizer", 0.0)
  sums = 3 * params * work.microbatches if work.microbatches > 1 else 0.0
  return 2 * (params + optimizer) + params + sums


def seconds_on_links(
  wire_bytes: float, axes: Sequence[str], mesh: Mapping[str, int], gpu: Gpu
) -> tuple[float, bool]:
  """Returns the seconds that a collective takes at least, and whether it uses the network between nodes.

  Within a node, devices send over NVLink. A ring over several nodes leaves each node as many times as
  the group has members there, through the members' network cards.

  Args:
    wire_bytes: the bytes that each device sends.
    axes: the mesh axes whose devices take part.
    mesh: the size of each axis, outermost first; the innermost devices are neighbors.
    gpu: the GPUs, with the bandwidths of their links.
  """
  members = members_per_node(axes, mesh)
  leaves_node = math.prod(mesh[axis] for axis in axes) > members
  rate = min(gpu.nvlink, members * gpu.network) if leaves_node else gpu.nvlink
  return wire_bytes / rate, leaves_node


def members_per_node(axes: Sequence[str], mesh: Mapping[str, int]) -> int:
  """Returns how many devices of a group over these mesh axes are in the same node."""
  remaining, members = GPUS_PER_NODE, 1
  for name, size in reversed(list(mesh.items())):
    in_node = math.gcd(size, remaining) if size > remaining else size
    members *= in_node if name in axes else 1
    remaining = max(remaining // in_node, 1)
  return members


def describe_placement(mesh: Mapping[str, int]) -> str:
  """Returns which mesh axes are within a node, and which are between nodes.

  Args:
    mesh: the size of each axis, outermost first.
  """
  inside = {axis: members_per_node((axis,), mesh) for axis, size in mesh.items() if size > 1}
  within = [f"{axis} {members}" for axis, members in inside.items() if members > 1]
  between = [
    f"{axis} {mesh[axis] // members}" for axis, members in inside.items() if mesh[axis] > members
  ]
  node = f"within a node of {GPUS_PER_NODE} GPUs: {', '.join(within) or 'nothing'}"
  return f"{node}; between nodes: {', '.join(between)}" if between else node


def expected_devices() -> tuple[int, str]:
  """Returns the number of this machine's devices and their kind, "GPU" or "CPU".

  JAX is not asked, because it would initialize the devices.
  """
  wants_cpu = os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu"
  gpus = 0 if wants_cpu else _visible_gpus()
  return (gpus, "GPU") if gpus else (_cpu_devices(), "CPU")


def _visible_gpus() -> int:
  """Returns the number of NVIDIA GPUs that CUDA_VISIBLE_DEVICES does not hide."""
  visible = os.environ.get("CUDA_VISIBLE_DEVICES")
  installed = len(list(pathlib.Path("/proc/driver/nvidia/gpus").glob("*")))
  if visible is None or not installed:
    return installed
  return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])


def _cpu_devices() -> int:
  """Returns the number of CPU devices: one, unless jax is configured to have more."""
  configured = getattr(jax.config, "jax_num_cpu_devices", -1)
  if configured > 0:
    return configured
  flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
  return int(flag[1]) if flag else 1
