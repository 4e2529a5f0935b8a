"""Continuous batching: one loop that advances all running requests by one token at a time."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import itertools
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rosetta_t5.decoding.slots import StepOutput
from rosetta_t5.serving.programs import BATCH_SIZES, Programs, Task

# A decoder's request may use the cache of a slot whose sequence has the same beginning, if at most this
# many of its inputs remain to be computed, one in a step.
_RECOMPUTED = 8
# The number of steps that are dispatched before the results of the first are read.
_IN_FLIGHT = 2
_COUNTS = ("requests_refused", "requests_cancelled", "prefix_hits", "steps", "tokens_generated")

_compilations = collections.Counter[str]()


def _count_compilation(event: str, duration_secs: float, **_: str | int) -> None:
  _compilations[event] += 1


jax.monitoring.register_event_duration_secs_listener(_count_compilation)


class Overloaded(Exception):
  """Too many requests are waiting; `retry_after_s` grows with their number."""

  def __init__(self, waiting: int, retry_after_s: int):
    super().__init__(f"{waiting} requests are waiting already: try again in {retry_after_s} s")
    self.retry_after_s = retry_after_s


class Stopping(Exception):
  """The server is ending and accepts no requests."""


class NewToken(NamedTuple):
  """A token that a step generated.

  Attributes:
    request: the index of the request among those that share its queue.
    id: the token.
    log_prob: its log probability, if the request wants it.
    top: the most probable tokens with their log probabilities, if the request wants them.
    is_last: whether the sequence has ended.
  """

  request: int
  id: int
  log_prob: float
  top: tuple[tuple[int, float], ...]
  is_last: bool


@dataclasses.dataclass(eq=False)
class Request:
  """A sequence to generate.

  Attributes:
    task: what is generated.
    events: receives each `NewToken`, or the exception that ended the request.
    index: that of the request among those that share `events`.
    is_cancelled: when True, the request ends before the next step.
  """

  task: Task
  events: asyncio.Queue[NewToken | BaseException]
  index: int = 0
  is_cancelled: bool = False


class Job(NamedTuple):
  """A call of `Programs.call` between two steps, together with those of other jobs of the same name."""

  name: str
  row: tuple[Sequence[int], Sequence[int]]
  result: asyncio.Future[Any]

  @property
  def is_cancelled(self) -> bool:
    """Whether nobody waits for the result."""
    return self.result.cancelled()


class Engine:
  """Runs requests in the slots of a model, in a task of the event loop; threads wait for the device.

  Attributes:
    error: what ended it, if it has failed.
  """

  def __init__(self, programs: Programs, max_waiting: int):
    """Starts; called in the event loop.

    Args:
      programs: the compiled programs.
      max_waiting: how many requests may wait for a slot.
    """
    self._programs, self._max_waiting = programs, max_waiting
    self._waiting: collections.deque[Request] = collections.deque()
    self._jobs: collections.deque[Job] = collections.deque()
    self._running: dict[int, Request] = {}
    # The tokens whose arrays each slot still has: those of an encoder's inputs, or of a decoder's sequence.
    self._contents: list[list[int]] = [[] for _ in range(programs.num_slots)]
    # The slot that was freed first is first.
    self._free = collections.deque(range(programs.num_slots))
    self._in_flight: collections.deque[tuple[dict[int, Request], StepOutput]] = collections.deque()
    self._counts = dict.fromkeys(_COUNTS, 0)
    self._changed, self._is_stopping = asyncio.Event(), False
    self.error: BaseException | None = None
    self._loop = asyncio.create_task(self._run())

  def submit(self, request: Request) -> None:
    """Appends a request to the queue.

    Raises:
      Overloaded: too many requests are waiting.
      Stopping: the engine is ending, or has failed.
    """
    self._append(self._waiting, request)

  async def call(self, name: str, row: tuple[Sequence[int], Sequence[int]]) -> Any:
    """Returns the result of `Programs.call` for a pair of inputs and targets; see `submit`."""
    job = Job(name, row, asyncio.get_running_loop().create_future())
    self._append(self._jobs, job)
    return await job.result

  def _append(self, queue: collections.deque[Any], item: Request | Job) -> None:
    if self._is_stopping:
      raise Stopping(f"the model has failed: {self.error}" if self.error else "")
    if len(queue) >= self._max_waiting:
      live = [waiting for waiting in queue if not waiting.is_cancelled]
      queue.clear()
      queue.extend(live)
    if len(queue) >= self._max_waiting:
      self._counts["requests_refused"] += 1
      raise Overloaded(len(queue), 1 + len(queue) // self._programs.num_slots)
    queue.append(item)
    self._changed.set()

  def statistics(self) -> dict[str, float]:
    """Returns numbers about the requests; names that end in _total only grow."""
    return {
      "requests_waiting": len(self._waiting),
      "requests_running": len(self._running),
      # Of the whole process. After the start, nothing is compiled.
      "compilations_total": _compilations["/jax/core/compile/backend_compile_duration"],
      **{f"{name}_total": count for name, count in self._counts.items()},
    }

  async def stop(self) -> None:
    """Ends all requests, after the current step."""
    self._is_stopping = True
    self._loop.cancel()
    await asyncio.wait([self._loop])

  async def _run(self) -> None:
    try:
      while True:
        if not (self._waiting or self._jobs or self._running or self._in_flight):
          self._changed.clear()
          await self._changed.wait()
        await self._run_jobs()
        self._release_cancelled()
        work = self._admit()
        if self._running:
          work.append(self._step)
        # The device computes a step while the results of the one before are read.
        if len(self._in_flight) >= (_IN_FLIGHT - 1 if self._running else 1):
          owners, output = self._in_flight.popleft()
          self._deliver(owners, await asyncio.to_thread(_do, work, output))
        else:
          await asyncio.to_thread(_do, work)
    except BaseException as error:
      self._fail(error)

  def _fail(self, error: BaseException) -> None:
    if isinstance(error, asyncio.CancelledError):
      error = Stopping()
    else:
      self.error, self._is_stopping = error, True
      traceback.print_exception(error)
    for request in [*self._waiting, *self._running.values()]:
      request.events.put_nowait(error)
    for job in self._jobs:
      _set_result(job, error)

  async def _run_jobs(self) -> None:
    if not self._jobs:
      return
    name = self._jobs[0].name
    equal = itertools.takewhile(lambda job: job.name == name, self._jobs)
    taken = [*itertools.islice(equal, BATCH_SIZES[-1])]
    for _ in taken:
      self._jobs.popleft()
    if not (jobs := [job for job in taken if not job.is_cancelled]):
      return
    try:
      results = await asyncio.to_thread(self._programs.call, name, [job.row for job in jobs])
    except Exception as error:  # It fails these jobs, and not the model.
      results = [error] * len(jobs)
    for job, result in zip(jobs, results, strict=True):
      _set_result(job, result)

  def _release_cancelled(self) -> None:
    for slot, request in [*self._running.items()]:
      if request.is_cancelled:
        self._counts["requests_cancelled"] += 1
        self._release(slot)

  def _release(self, slot: int) -> None:
    del self._running[slot]
    self._free.append(slot)

  def _admit(self) -> list[Callable[[], None]]:
    """Gives free slots to at most a batch of waiting requests, and returns what puts them there."""
    work: list[Callable[[], None]] = []
    computed: dict[int, Task] = {}  # The inputs that are computed together.
    for _ in range(min(len(self._waiting), len(self._free), BATCH_SIZES[-1])):
      if (request := self._waiting.popleft()).is_cancelled:
        continue
      source, position = self._most_similar(request.task.inputs)
      slot = source if source in self._free else self._free[0]
      assert slot is not None
      self._free.remove(slot)
      self._running[slot] = request
      if source is None:
        computed[slot] = request.task
      else:
        self._counts["prefix_hits"] += 1
        if source in computed:
          work.append(functools.partial(self._programs.admit, computed))
          computed = {}
        work.append(functools.partial(self._programs.copy, slot, request.task, source, position))
      # The steps compute a decoder's other inputs.
      is_partial = source is not None and self._programs.is_decoder
      self._contents[slot] = list(request.task.inputs[: position + 1 if is_partial else None])
    return [*work, functools.partial(self._programs.admit, computed)] if computed else work

  def _most_similar(self, inputs: Sequence[int]) -> tuple[int | None, int]:
    """Returns a slot with the arrays of inputs, and the first position to compute from them."""
    if not self._programs.can_rewind:
      return None, 0
    wanted = list(inputs)
    if not self._programs.is_decoder:
      return (self._contents.index(wanted) if wanted in self._contents else None), 0
    # The arrays of a sequence's newest token may not have been computed yet.
    common = [_common(wanted, tokens[:-1]) for tokens in self._contents]
    slot = int(np.argmax(common))
    position = min(common[slot], len(wanted) - 1)
    is_similar = position and len(wanted) - 1 - position <= _RECOMPUTED
    return (slot, position) if is_similar else (None, 0)

  def _step(self) -> None:
    owners = dict(self._running)
    is_kept = np.isin(np.arange(self._programs.num_slots), [*owners])
    longest = max(len(request.task.inputs) for request in owners.values())
    self._in_flight.append((owners, self._programs.step(longest, is_kept)))
    self._counts["steps"] += 1

  def _deliver(self, owners: Mapping[int, Request], result: StepOutput) -> None:
    """Sends the tokens of a step to their requests, and frees the slots of those that have ended."""
    for slot in np.flatnonzero(result.is_new).tolist():
      request = owners.get(slot)
      if request is None or self._running.get(slot) is not request:
        continue
      top: tuple[tuple[int, float], ...] = ()
      if request.task.controls.reports_probabilities:
        pairs = zip(result.top_tokens[slot], result.top_log_probs[slot], strict=True)
        top = tuple((int(token), float(log_prob)) for token, log_prob in pairs)
      token, is_last = int(result.token[slot]), bool(result.has_ended[slot])
      new = NewToken(request.index, token, float(result.log_prob[slot]), top, is_last)
      request.events.put_nowait(new)
      self._counts["tokens_generated"] += 1
      if self._programs.is_decoder:
        missing = request.task.inputs[len(self._contents[slot]) :]
        self._contents[slot] += [*missing, token]
      if is_last:
        self._release(slot)


def _do(work: Iterable[Callable[[], None]], output: Any = None) -> Any:
  """Dispatches work to the device, and waits for the output of an earlier step."""
  for each in work:
    each()
  return jax.device_get(output)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
  """Returns how many tokens two sequences begin with together."""
  return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))  # noqa: B905


def _set_result(job: Job, result: Any) -> None:
  if job.is_cancelled:
    return
  if isinstance(result, BaseException):
    job.result.set_exception(result)
  else:
    job.result.set_result(result)
