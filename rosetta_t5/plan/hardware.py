"""How fast the links between GPUs are, and which devices this machine has."""

from __future__ import annotations

import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

import jax

from rosetta_t5.telemetry.gpus import GPUS_PER_NODE, Gpu

# The share of a link's bandwidth that large collectives reach (approximately NCCL's bus bandwidth).
_LINK_EFFICIENCY = 0.8


def seconds_on_links(
  wire_bytes: float,
  axes: Sequence[str],
  mesh: Mapping[str, int],
  gpu: Gpu,
  efficiency: float = _LINK_EFFICIENCY,
) -> tuple[float, bool]:
  """Returns the seconds that a collective takes, and whether it uses the network between nodes.

  Within a node, devices send over NVLink. A ring over several nodes leaves each node as many times as
  the group has members there, through the members' network cards.

  Args:
    wire_bytes: the bytes that each device sends.
    axes: the mesh axes whose devices take part.
    mesh: the size of each axis, outermost first; the innermost devices are neighbors.
    gpu: the GPUs, with the bandwidths of their links.
    efficiency: the share of a link's bandwidth that the collective reaches.
  """
  members = members_per_node(axes, mesh)
  leaves_node = math.prod(mesh[axis] for axis in axes) > members
  rate = min(gpu.nvlink, members * gpu.network) if leaves_node else gpu.nvlink
  return wire_bytes / (rate * efficiency), leaves_node


def members_per_node(axes: Sequence[str], mesh: Mapping[str, int]) -> int:
  """Returns how many devices of a group over these mesh axes are in the same node."""
  remaining, members = GPUS_PER_NODE, 1
  for name, size in reversed(list(mesh.items())):
    in_node = math.gcd(size, remaining) if size > remaining else size
    members *= in_node if name in axes else 1
    remaining = max(remaining // in_node, 1)
  return members


def placement(mesh: Mapping[str, int]) -> str:
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
