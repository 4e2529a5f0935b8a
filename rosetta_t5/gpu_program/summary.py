"""What is worth knowing about a compiled step: memory, kernels, collectives, minimum time."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rosetta_t5.gpu_program import kernels
from rosetta_t5.gpu_program.compiler import CompiledProgram
from rosetta_t5.gpu_program.hlo import LiveArray, live_arrays, parse_program
from rosetta_t5.gpu_program.kernels import KernelResources, kernel_resources
from rosetta_t5.gpu_program.roofline import Timeline, sum_by_kind, time_program
from rosetta_t5.telemetry.gpus import Gpu


@dataclasses.dataclass(frozen=True)
class Summary:
  """A compiled step.

  Attributes:
    gpu: the GPU.
    mesh: the size of each mesh axis.
    compile_seconds: how long compiling took.
    arguments: bytes of the state and the batch on each device.
    temporaries: bytes of everything else that the step needs at once.
    outputs: bytes of results that do not overwrite arguments.
    live: the arrays that exist at the peak, largest first.
    timeline: the minimum time of each kernel and collective.
    resources: registers, shared memory and spills of the Triton kernels.
    batch_size: the examples of a step, on all devices.
    flops: the FLOPs of a step on all devices by T5X's formula; None if unknown or not a train step.
  """

  gpu: Gpu
  mesh: Mapping[str, int]
  compile_seconds: float
  arguments: int
  temporaries: int
  outputs: int
  live: list[LiveArray]
  timeline: Timeline
  resources: list[KernelResources]
  batch_size: int
  flops: float | None

  @property
  def devices(self) -> int:
    """The number of devices."""
    return math.prod(self.mesh.values())

  @property
  def peak(self) -> int:
    """The bytes that each device needs."""
    return self.arguments + self.temporaries + self.outputs

  @property
  def sequences_per_second(self) -> float:
    """The upper bound of the speed, on all devices."""
    return self.batch_size / self.timeline.seconds

  @property
  def mfu(self) -> float | None:
    """The upper bound of the MFU, relative to the dense bfloat16 peak; None without `flops`."""
    if self.flops is None:
      return None
    return self.flops / (self.timeline.seconds * self.devices * self.gpu.bfloat16)


def summarize(
  program: CompiledProgram,
  gpu: Gpu,
  mesh: Mapping[str, int],
  batch_size: int,
  flops: float | None = None,
  unknown_trips: int = 1,
) -> Summary:
  """Returns the summary of a compiled step."""
  parsed = parse_program(program.hlo)
  timeline = time_program(parsed, gpu, mesh, unknown_trips)
  sources = {each.kernel.source for each in timeline.kernels if each.kernel.kind == kernels.TRITON}
  names = {part for source in sources for part in source.split("/")}
  memory = program.memory
  return Summary(
    gpu=gpu,
    mesh=mesh,
    compile_seconds=program.seconds,
    arguments=memory.argument_size_in_bytes,
    temporaries=memory.temp_size_in_bytes,
    outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
    live=live_arrays(program.assignment, program.live_ranges, parsed),
    timeline=timeline,
    resources=kernel_resources(program, names, gpu) if sources else [],
    batch_size=batch_size,
    flops=flops,
  )


def as_json(summary: Summary) -> dict[str, Any]:
  """Returns a summary as JSON's types: everything that is printed, and each kernel and collective."""
  timeline = summary.timeline
  return {
    "gpu": summary.gpu.name,
    "mesh": dict(summary.mesh),
    "compile_seconds": summary.compile_seconds,
    "memory": {
      "arguments": summary.arguments,
      "temporaries": summary.temporaries,
      "outputs": summary.outputs,
      "peak": summary.peak,
      "live_at_peak": [dataclasses.asdict(each) for each in summary.live],
    },
    "kernels_by_kind": sum_by_kind(timeline.kernels),
    "kernels": [
      {
        **dataclasses.asdict(each.kernel),
        "count": each.count,
        "seconds": each.seconds,
        "bound": each.bound,
      }
      for each in timeline.kernels
    ],
    "triton_kernels": [dataclasses.asdict(each) for each in summary.resources],
    "collectives": [
      {
        **dataclasses.asdict(each.call),
        "count": each.count,
        "seconds": each.seconds,
        "exposed_seconds": each.exposed,
        "overlapping_kernels": each.overlapping,
        "leaves_node": each.leaves_node,
      }
      for each in timeline.collectives
    ],
    "least_step_seconds": timeline.seconds,
    "seconds_by_bound": timeline.seconds_by_bound,
    "most_sequences_per_second": summary.sequences_per_second,
    "largest_mfu": summary.mfu,
  }


def sum_by_source(timeline: Timeline) -> list[tuple[str, str, int, float]]:
  """Returns (kind, source, count, seconds) of the kernels, added up by source, slowest first."""
  counts: collections.Counter[tuple[str, str]] = collections.Counter()
  seconds: dict[tuple[str, str], float] = collections.defaultdict(float)
  for each in timeline.kernels:
    key = (each.kernel.kind, each.kernel.source)
    counts[key] += each.count
    seconds[key] += each.count * each.seconds
  order = sorted(seconds, key=lambda key: -seconds[key])
  return [(*key, counts[key], seconds[key]) for key in order]
