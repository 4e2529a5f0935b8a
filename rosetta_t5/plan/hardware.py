"""What GPUs can do, from their data sheets, and what of it a collective gets."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence

from rosetta_t5.telemetry.flops import PEAKS

GPUS_IN_A_NODE = 8
# Of a link's rate, what large collectives reach of it (NCCL's bus bandwidth, about).
_LINK_EFFICIENCY = 0.8


@dataclasses.dataclass(frozen=True)
class Gpu:
  """A GPU in a node of eight, each with a network card of its own (DGX, HGX).

  Attributes:
    name: as NVIDIA writes it.
    peak_flops: dense bfloat16, FLOP/s.
    memory: bytes.
    nvlink: bytes/s that it can send to others of its node.
    network: bytes/s that its card can send to other nodes.
  """

  name: str
  peak_flops: float
  memory: float
  nvlink: float
  network: float


GPUS = {
  "h100": Gpu("H100 80 GB", PEAKS["H100"], 80e9, 450e9, 50e9),
  "h200": Gpu("H200 141 GB", PEAKS["H200"], 141e9, 450e9, 50e9),
  "a100": Gpu("A100 80 GB", PEAKS["A100"], 80e9, 300e9, 25e9),
}


def find_gpu(name: str) -> Gpu:
  """Returns a GPU by its short name.

  Raises:
    ValueError: it is not known.
  """
  if name.lower() not in GPUS:
    near = difflib.get_close_matches(name.lower(), GPUS, 1, cutoff=0.3)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ValueError(f"--gpu={name} is not known{hint}: it is one of {', '.join(GPUS)}")
  return GPUS[name.lower()]


def seconds_on_links(
  wire_bytes: float, axes: Sequence[str], mesh: Mapping[str, int], gpu: Gpu
) -> tuple[float, bool]:
  """Returns how long a collective takes, and whether it leaves the node.

  A ring through all of a group enters and leaves each node as often as there are members in it, by
  their cards; within a node NVLink carries it.

  Args:
    wire_bytes: what each device sends.
    axes: the mesh axes of the group.
    mesh: the size of each axis, outermost first; the innermost devices are neighbours.
    gpu: the GPU.
  """
  members = members_in_a_node(axes, mesh)
  leaves = math.prod(mesh[axis] for axis in axes) > members
  rate = min(gpu.nvlink, members * gpu.network) if leaves else gpu.nvlink
  return wire_bytes / (rate * _LINK_EFFICIENCY), leaves


def members_in_a_node(axes: Sequence[str], mesh: Mapping[str, int]) -> int:
  """Returns how many devices of a group over these axes are in one node."""
  room, members = GPUS_IN_A_NODE, 1
  for name, size in reversed(list(mesh.items())):
    here = math.gcd(size, room) if size > room else size
    members *= here if name in axes else 1
    room = max(room // here, 1)
  return members
