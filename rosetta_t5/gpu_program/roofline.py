"""The minimum time that a GPU program can take: each kernel at the peaks of the GPU's data sheet.

A kernel takes at least as long as its matmuls at the peak of the tensor cores, its bytes at the memory
bandwidth, and its launch, whichever is longest (Williams et al. 2009, "Roofline"). Kernels run one after
the other in the order of XLA's schedule. Collectives run beside them, from the instruction that starts
them to the one that waits for them, one at a time. A real run is slower: no kernel reaches its peak.
Attention is counted for all pairs of positions, also those that masks exclude. A kernel that skips them, as
ours does with tiles of causal and packed rows, can be faster than its bound.
"""

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rosetta_t5.gpu_program.hlo import Computation, Instruction
from rosetta_t5.gpu_program.kernels import Collective, Kernel, collective_of, kernel_of
from rosetta_t5.plan.estimate import seconds_on_links
from rosetta_t5.telemetry.gpus import Gpu

# About the time from the start of one small kernel to the next, and of the smallest all-reduce in a node.
# Both are orders of magnitude, not measured here; CUDA graphs launch somewhat faster.
LAUNCH_SECONDS = 2e-6
COLLECTIVE_SECONDS = 10e-6

MATMULS, MEMORY, LAUNCHES, INTERCONNECT = "matmuls", "memory", "launches", "interconnect"


@dataclasses.dataclass
class Timeline:
  """The schedule of a step.

  Attributes:
    kernels: all kernels, in order.
    collectives: all collectives, in the order in which they end.
  """

  kernels: list[Kernel] = dataclasses.field(default_factory=list)
  collectives: list[Collective] = dataclasses.field(default_factory=list)

  @property
  def seconds_by_bound(self) -> dict[str, float]:
    """What bounds the step: the seconds bound by matmuls, memory, launches and interconnect."""
    total = dict.fromkeys((MATMULS, MEMORY, LAUNCHES, INTERCONNECT), 0.0)
    for each in self.kernels:
      total[each.bound] += each.count * each.seconds
    total[INTERCONNECT] += sum(each.count * each.exposed_seconds for each in self.collectives)
    return total

  @property
  def seconds(self) -> float:
    """The time of the step."""
    return sum(self.seconds_by_bound.values())


def time_program(
  program: Computation, gpu: Gpu, mesh: Mapping[str, int], unknown_trips: int = 1
) -> Timeline:
  """Returns the timeline of a program.

  Args:
    mesh: the size of each mesh axis, outermost first.
    unknown_trips: how often a loop runs if the program does not say it, as in decoding.
  """
  scheduler = _Scheduler(gpu, mesh, unknown_trips)
  scheduler.run(program, 1)
  for name in list(scheduler.running):  # not waited for in the computation that started them
    scheduler.end(name, 1)
  return scheduler.timeline


@dataclasses.dataclass
class _Scheduler:
  """Walks through the instructions of a program in the order of its schedule.

  Attributes:
    unknown_trips: see `time_program`.
    timeline: the schedule so far.
    now: the time of the kernels' stream.
    links_free: when the links between GPUs are free again.
    running: by the instruction that starts it, a collective, and when it ends.
  """

  gpu: Gpu
  mesh: Mapping[str, int]
  unknown_trips: int
  timeline: Timeline = dataclasses.field(default_factory=Timeline)
  now: float = 0.0
  links_free: float = 0.0
  running: dict[str, tuple[Collective, float]] = dataclasses.field(default_factory=dict)

  def run(self, computation: Computation, count: int) -> None:
    """Runs a computation that a step executes `count` times."""
    for instruction in computation.values():
      if instruction.opcode in ("while", "call", "conditional"):
        for called, times in self._calls(instruction):
          started = self.now
          self.run(called, count * times)
          self.now += (times - 1) * (self.now - started)
      elif instruction.opcode.endswith("-done"):
        for operand in instruction.operands:
          self.end(operand.name, count)
      elif collective := collective_of(instruction, self.mesh):
        self._start(instruction.name, collective)
        if not instruction.opcode.endswith("-start"):
          self.end(instruction.name, count)
      elif kernel := kernel_of(instruction):
        self._compute(kernel, count)

  def _calls(self, instruction: Instruction) -> Iterator[tuple[Computation, int]]:
    """Yields the computations that an instruction calls, and how often.

    Of a conditional, only the last branch counts, which `jax.lax.cond` runs if its predicate is true. The
    condition of a loop does not count, because it only compares two numbers.
    """
    called = instruction.called[-1:] if instruction.opcode == "conditional" else instruction.called
    known = instruction.backend_config.get("known_trip_count", {}).get("n", self.unknown_trips)
    for computation in called:
      yield computation, int(known) if instruction.opcode == "while" else 1

  def _compute(self, kernel: Kernel, count: int) -> None:
    bounds = {
      MATMULS: kernel.flops / self.gpu.peak(kernel.dtype) if kernel.flops else 0.0,
      MEMORY: kernel.bytes / self.gpu.bandwidth,
      LAUNCHES: LAUNCH_SECONDS,
    }
    bound = max(bounds, key=lambda name: bounds[name])
    timed = dataclasses.replace(kernel, count=count, seconds=bounds[bound], bound=bound)
    self.timeline.kernels.append(timed)
    self.now += timed.seconds

  def _start(self, name: str, collective: Collective) -> None:
    sent, axes = collective.sent, collective.axes
    seconds, leaves_node = seconds_on_links(sent, axes, self.mesh, self.gpu)
    seconds = max(seconds, COLLECTIVE_SECONDS)
    self.links_free = max(self.now, self.links_free) + seconds
    timed = dataclasses.replace(collective, seconds=seconds, leaves_node=leaves_node)
    self.running[name] = timed, self.links_free

  def end(self, name: str, count: int) -> None:
    """Waits for a collective, if an instruction of this name has started one."""
    if name not in self.running:
      return
    collective, ends = self.running.pop(name)
    exposed = max(ends - self.now, 0.0)
    self.now += exposed
    timed = dataclasses.replace(collective, count=count, exposed_seconds=exposed)
    self.timeline.collectives.append(timed)


def add_up(
  kernels: Iterable[Kernel | Collective],
  *names: str,
  added: Sequence[str] = ("flops", "bytes", "seconds"),
) -> dict[Any, dict[str, float]]:
  """Returns sums of those kernels or collectives in a step that have the same attributes.

  Args:
    names: attributes, such as "kind" or "kind", "source"; they are the keys.
    added: the attributes that are added up, besides the number.
  """
  sums: dict[Any, dict[str, float]] = {}
  key_of = operator.attrgetter(*names)
  for each in kernels:
    row = sums.setdefault(key_of(each), dict.fromkeys(("count", *added), 0.0))
    row["count"] += each.count
    for name in added:
      row[name] += each.count * getattr(each, name)
  return sums
