"""The minimum time that a GPU program can take: each kernel at the peaks of the GPU's data sheet.

A kernel takes at least as long as its matmuls at the peak of the tensor cores, its bytes at the memory
bandwidth, and its launch, whichever is longest (Williams et al. 2009, "Roofline"). Kernels run one after
the other in the order of XLA's schedule. Collectives run beside them, from the instruction that starts
them to the one that waits for them, one at a time. A real run is slower: no kernel reaches its peak.
Attention is counted for all pairs of positions, also those that masks exclude. A kernel that skips them, as
ours does with tiles of causal and packed rows, can be faster than its bound.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from rosetta_t5.gpu_program.hlo import Instruction, Program, short_source
from rosetta_t5.gpu_program.kernels import Kernel, kernel_of
from rosetta_t5.plan.estimate import seconds_on_links
from rosetta_t5.telemetry.gpus import Gpu

# About the time from the start of one small kernel to the next, and of the smallest all-reduce in a node.
# Both are orders of magnitude, not measured here; CUDA graphs launch somewhat faster.
LAUNCH_SECONDS = 2e-6
COLLECTIVE_SECONDS = 10e-6

MATMULS, MEMORY, LAUNCHES, INTERCONNECT = "matmuls", "memory", "launches", "interconnect"


@dataclasses.dataclass(frozen=True)
class TimedKernel:
  """A kernel, how often a step starts it, the minimum time of one run, and what bounds that time."""

  kernel: Kernel
  count: int
  seconds: float
  bound: str


@dataclasses.dataclass(frozen=True)
class TimedCollective:
  """A collective of a step.

  Attributes:
    call: the collective.
    count: how often a step starts it.
    seconds: the minimum time of one run.
    exposed: the part of these seconds in which the kernels wait for it.
    overlapping: the number of kernels between its start and the wait for it.
    leaves_node: whether it uses the network between nodes.
  """

  call: CollectiveCall
  count: int
  seconds: float
  exposed: float
  overlapping: int
  leaves_node: bool


@dataclasses.dataclass
class Timeline:
  """The schedule of a step.

  Attributes:
    kernels: all kernels, in order.
    collectives: all collectives, in the order in which they end.
    seconds: the time of the step.
  """

  kernels: list[TimedKernel] = dataclasses.field(default_factory=list)
  collectives: list[TimedCollective] = dataclasses.field(default_factory=list)
  seconds: float = 0.0

  @property
  def seconds_by_bound(self) -> dict[str, float]:
    """What bounds the step: the seconds bound by matmuls, memory, launches and interconnect."""
    total = dict.fromkeys((MATMULS, MEMORY, LAUNCHES, INTERCONNECT), 0.0)
    for each in self.kernels:
      total[each.bound] += each.count * each.seconds
    total[INTERCONNECT] += sum(each.count * each.exposed for each in self.collectives)
    return total


def time_kernel(kernel: Kernel, gpu: Gpu) -> tuple[float, str]:
  """Returns the minimum time of a kernel in seconds, and what bounds it."""
  bounds = {
    MATMULS: kernel.flops / gpu.peak(kernel.dtype) if kernel.flops else 0.0,
    MEMORY: kernel.bytes / gpu.bandwidth,
    LAUNCHES: LAUNCH_SECONDS,
  }
  bound = max(bounds, key=lambda name: bounds[name])
  return bounds[bound], bound


def time_program(
  program: Program, gpu: Gpu, mesh: Mapping[str, int], unknown_trips: int = 1
) -> Timeline:
  """Returns the timeline of a program.

  Args:
    mesh: the size of each mesh axis, outermost first.
    unknown_trips: how often a loop runs if the program does not say it, as in decoding.
  """
  scheduler = _Scheduler(program, gpu, mesh, unknown_trips)
  scheduler.run(program.entry, 1)
  scheduler.end_all()
  timeline = scheduler.timeline
  timeline.seconds = sum(timeline.seconds_by_bound.values())
  return timeline


@dataclasses.dataclass
class _Running:
  """A collective that has been started: when it ends, and the kernels that have started since."""

  call: CollectiveCall
  seconds: float
  leaves_node: bool
  ends: float
  kernels_before: int


@dataclasses.dataclass
class _Scheduler:
  """Walks through the instructions of a program in the order of its schedule.

  Attributes:
    unknown_trips: see `time_program`.
    timeline: the schedule so far.
    now: the time of the kernels' stream.
    links_free: when the links between GPUs are free again.
    running: the collectives that have been started, by the instruction that starts them.
  """

  program: Program
  gpu: Gpu
  mesh: Mapping[str, int]
  unknown_trips: int
  timeline: Timeline = dataclasses.field(default_factory=Timeline)
  now: float = 0.0
  links_free: float = 0.0
  running: dict[str, _Running] = dataclasses.field(default_factory=dict)

  def run(self, computation: str, count: int) -> None:
    """Runs a computation that a step executes `count` times."""
    for instruction in self.program.computations[computation].values():
      if instruction.opcode in ("while", "call", "conditional"):
        for name, times in self._calls(instruction):
          started = self.now
          self.run(name, count * times)
          self.now += (times - 1) * (self.now - started)
      elif instruction.opcode.endswith("-done"):
        self._wait_for(instruction, count)
      elif call := collective_of(self.program, computation, instruction, self.mesh):
        self._start(instruction, call, count)
      elif kernel := kernel_of(self.program, computation, instruction):
        seconds, bound = time_kernel(kernel, self.gpu)
        self.timeline.kernels.append(TimedKernel(kernel, count, seconds, bound))
        self.now += seconds

  def _calls(self, instruction: Instruction) -> Iterator[tuple[str, int]]:
    """Yields the computations that an instruction calls, and how often.

    Of a conditional, only the last branch counts, which `jax.lax.cond` runs if its predicate is true. The
    condition of a loop does not count, because it only compares two numbers.
    """
    if instruction.opcode == "conditional":
      yield from ((name, 1) for name in instruction.called[-1:])
      return
    known = instruction.backend_config.get("known_trip_count", {}).get("n", self.unknown_trips)
    times = int(known) if instruction.opcode == "while" else 1
    for name in instruction.called:
      yield name, times

  def _start(self, instruction: Instruction, call: CollectiveCall, count: int) -> None:
    seconds, leaves_node = seconds_on_links(call.sent, call.axes, self.mesh, self.gpu, 1.0)
    seconds = max(seconds, COLLECTIVE_SECONDS)
    self.links_free = max(self.now, self.links_free) + seconds
    started = len(self.timeline.kernels)
    running = _Running(call, seconds, leaves_node, self.links_free, started)
    self.running[instruction.name] = running
    if not instruction.opcode.endswith("-start"):
      self._end(running, count)

  def _wait_for(self, instruction: Instruction, count: int) -> None:
    for name in instruction.operands:
      if running := self.running.pop(name, None):
        self._end(running, count)

  def end_all(self) -> None:
    """Ends what has been started and is not waited for in the computation that started it."""
    for name in list(self.running):
      self._end(self.running.pop(name), 1)

  def _end(self, running: _Running, count: int) -> None:
    exposed = max(running.ends - self.now, 0.0)
    self.now += exposed
    overlapping = len(self.timeline.kernels) - running.kernels_before
    self.timeline.collectives.append(
      TimedCollective(
        running.call, count, running.seconds, exposed, overlapping, running.leaves_node
      )
    )


def sum_by_kind(kernels: Iterable[TimedKernel]) -> dict[str, dict[str, float]]:
  """Returns for each kind of kernel its number, FLOPs, bytes and seconds in a step."""
  sums: dict[str, dict[str, float]] = collections.defaultdict(
    lambda: dict.fromkeys(("count", "flops", "bytes", "seconds"), 0.0)
  )
  for each in kernels:
    row = sums[each.kernel.kind]
    row["count"] += each.count
    row["flops"] += each.count * each.kernel.flops
    row["bytes"] += each.count * each.kernel.bytes
    row["seconds"] += each.count * each.seconds
  return dict(sums)


# Kind → the bytes that one of n devices sends in a ring, for one byte of its operand.
_SENT = {
  "all-reduce": lambda n: 2 * (n - 1) / n,
  "all-gather": lambda n: n - 1,
  "reduce-scatter": lambda n: (n - 1) / n,
  "all-to-all": lambda n: (n - 1) / n,
  "collective-permute": lambda n: 1,
}
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(
  r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?\s*\{([^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")


@dataclasses.dataclass(frozen=True)
class CollectiveCall:
  """A collective of the program.

  Attributes:
    name: the instruction that starts it.
    kind: such as all-reduce.
    source: what in the model needs it.
    axes: the mesh axes whose devices take part.
    size: the bytes of its operands on one device.
    sent: the bytes that one device sends.
    arrays: the number of arrays that are sent together.
  """

  name: str
  kind: str
  source: str
  axes: tuple[str, ...]
  size: float
  sent: float
  arrays: int


def collective_of(
  program: Program, computation: str, instruction: Instruction, mesh: Mapping[str, int]
) -> CollectiveCall | None:
  """Returns the collective that an instruction starts; None if it starts none."""
  operands = list(program.operands(computation, instruction))
  if instruction.opcode == "async-start":
    inside = [i for name in instruction.called for i in program.computations[name].values()]
    instruction = next((i for i in inside if i.opcode in _SENT), instruction)
  kind = instruction.opcode.removesuffix("-start")
  if kind not in _SENT:
    return None
  group = _group(instruction.attributes, math.prod(mesh.values()))
  size = float(sum(operand.bytes for operand in operands))
  return CollectiveCall(
    name=instruction.name,
    kind=kind,
    source=short_source(instruction.source),
    axes=_axes(group, mesh),
    size=size,
    sent=size * _SENT[kind](max(len(group), 1)),
    arrays=sum(len(operand.arrays) for operand in operands),
  )


def _group(attributes: str, devices: int) -> list[int]:
  """Returns the first group of devices, as positions in the mesh; of pairs, the first that moves data."""
  if found := _LISTED.search(attributes):
    return [int(number) for number in found[1].split(",") if number]
  if found := _PAIRS.search(attributes):
    pairs = re.findall(r"(\d+),(\d+)", found[1])
    return next(([int(a), int(b)] for a, b in pairs if a != b), [0])
  if found := _IOTA.search(attributes):
    return _device_grid(found[3], found[4]).reshape(int(found[1]), int(found[2]))[0].tolist()
  if found := _NAMED.search(attributes):
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
    named = re.findall(r"'([^']+)'", found[4])
    grid = _device_grid(found[2] or ",".join(sizes.values()), found[3])
    grid = grid.reshape([int(size) for size in sizes.values()])
    return grid[tuple(slice(None) if name in named else 0 for name in sizes)].ravel().tolist()
  assert "replica_groups=" not in attributes or "replica_groups={}" in attributes, attributes[:300]
  return list(range(devices))


def _device_grid(shape: str, order: str | None) -> np.ndarray:
  """Returns the numbers of the devices in this shape, such as "4,2", with transposed dimensions."""
  sizes = [int(size) for size in shape.split(",")]
  axes = [int(axis) for axis in order.split(",")] if order else range(len(sizes))
  return np.arange(math.prod(sizes)).reshape(sizes).transpose(axes)


def _axes(group: list[int], mesh: Mapping[str, int]) -> tuple[str, ...]:
  """Returns the mesh axes along which the devices of a group differ."""
  coordinates = np.array(np.unravel_index(group, tuple(mesh.values())))
  differs = (coordinates != coordinates[:, :1]).any(axis=1)
  return tuple(name for name, is_different in zip(mesh, differs, strict=True) if is_different)
