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
from collections.abc import Iterable, Iterator, Mapping

from rosetta_t5.gpu_program.collectives import CollectiveCall, collective_of
from rosetta_t5.gpu_program.hlo import Instruction, Program
from rosetta_t5.gpu_program.kernels import Kernel, kernel_of
from rosetta_t5.plan.hardware import seconds_on_links
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
