"""Continuous batching: a thread that advances all running requests by one token at a time."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rosetta_t5.decoding.slots import StepOutput
from rosetta_t5.serving.programs import BATCH_SIZES, NO_SLOT, Programs

# A decoder's request may use the cache of a slot whose sequence has the same beginning, if at most this
# many of its inputs remain to be computed, one in a step.
_RECOMPUTED = 8
# The number of steps that are dispatched before the results of the first are read.
_IN_FLIGHT = 2

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
    id: the token.
    log_prob: its log probability, if the request wants it.
    top: the most probable tokens with their log probabilities, if the request wants them.
    is_last: whether the sequence has ended.
  """

  id: int
  log_prob: float
  top: tuple[tuple[int, float], ...]
  is_last: bool


@dataclasses.dataclass(eq=False)
class Request:
  """A sequence to generate.

  Attributes:
    inputs: the tokens of the inputs; with a decoder, those that the sequence begins with.
    max_tokens: the maximum number of tokens to generate.
    controls: the fields of `SlotControls` that differ from the defaults.
    events: receives each `NewToken`, or the exception that ended the request.
    is_cancelled: when True, the request ends before the next step.
  """

  inputs: tuple[int, ...]
  max_tokens: int
  controls: Mapping[str, Any]
  events: asyncio.Queue[NewToken | BaseException] = dataclasses.field(default_factory=asyncio.Queue)
  is_cancelled: bool = False


class Job(NamedTuple):
  """A call that is made between two steps, with up to `BATCH_SIZES[-1]` rows of equal jobs together.

  Attributes:
    fn: receives the rows and returns a result for each.
    row: the row of this job.
    result: receives the result.
  """

  fn: Callable[[Sequence[Any]], Sequence[Any]]
  row: Any
  result: asyncio.Future[Any]

  @property
  def is_cancelled(self) -> bool:
    """Whether nobody waits for the result."""
    return self.result.cancelled()


class Engine:
  """Runs requests in the slots of a model, in a thread of its own."""

  def __init__(self, programs: Programs, max_waiting: int, loop: asyncio.AbstractEventLoop):
    """Starts the thread.

    Args:
      programs: the compiled programs.
      max_waiting: how many requests may wait for a slot.
      loop: the event loop of the requests.
    """
    self._programs, self._max_waiting, self._loop = programs, max_waiting, loop
    self._waiting: collections.deque[Request] = collections.deque()
    self._jobs: collections.deque[Job] = collections.deque()
    self._running: list[Request | None] = [None] * programs.num_slots
    # The tokens whose arrays each slot still has: those of an encoder's inputs, or of a decoder's sequence.
    self._contents: list[list[int]] = [[] for _ in range(programs.num_slots)]
    # The slot that was freed first is first.
    self._free = collections.deque(range(programs.num_slots))
    self._in_flight: collections.deque[tuple[list[Request | None], StepOutput]] = (
      collections.deque()
    )
    self._taken: list[Request] = []  # Those that are about to join.
    self._length = programs.slot_lengths[0]
    self._state = programs.empty_state()
    self._changed = threading.Condition()
    self._is_stopping = False
    self.error: BaseException | None = None
    self.counts = collections.Counter[str]()
    self._thread = threading.Thread(target=self._run, name="decoding steps", daemon=True)
    self._thread.start()

  def submit(self, request: Request) -> None:
    """Appends a request to the queue.

    Raises:
      Overloaded: too many requests are waiting.
      Stopping: the engine is ending, or has failed.
    """
    self._append(self._waiting, request)

  async def run(self, fn: Callable[[Sequence[Any]], Sequence[Any]], row: Any) -> Any:
    """Returns the result of `fn` for a row, computed between two steps; see `Job` and `submit`."""
    job = Job(fn, row, self._loop.create_future())
    self._append(self._jobs, job)
    return await job.result

  def _append(self, queue: collections.deque[Any], item: Request | Job) -> None:
    with self._changed:
      if self._is_stopping:
        raise Stopping(
          f"the model has failed: {self.error}" if self.error else "the server is stopping"
        )
      if len(queue) >= self._max_waiting:
        live = [waiting for waiting in queue if not waiting.is_cancelled]
        queue.clear()
        queue.extend(live)
      if len(queue) >= self._max_waiting:
        self.counts["requests_refused_total"] += 1
        raise Overloaded(len(queue), 1 + len(queue) // self._programs.num_slots)
      queue.append(item)
      self._changed.notify()

  def statistics(self) -> dict[str, float]:
    """Returns numbers about the requests; names that end in _total only grow."""
    return {
      "requests_waiting": len(self._waiting),
      "requests_running": sum(request is not None for request in self._running),
      # Of the whole process. After the start, nothing is compiled.
      "compilations_total": _compilations["/jax/core/compile/backend_compile_duration"],
      **self.counts,
    }

  def stop(self) -> None:
    """Cancels all requests and ends the thread; called in the event loop."""
    with self._changed:
      self._is_stopping = True
      for request in [*self._waiting, *filter(None, self._running)]:
        request.is_cancelled = True
      for job in self._jobs:
        job.result.cancel()
      self._changed.notify()
    self._thread.join()

  def _run(self) -> None:
    try:
      while self._wait_for_work():
        self._run_jobs()
        self._release_cancelled()
        self._admit()
        if any(self._running):
          self._step()
        while len(self._in_flight) >= (_IN_FLIGHT if any(self._running) else 1):
          self._deliver(*self._in_flight.popleft())
    except BaseException as error:
      traceback.print_exception(error)
      with self._changed:
        self.error, self._is_stopping = error, True
      lost = [*self._waiting, *self._taken, *filter(None, self._running)]
      self._send([(request, error) for request in lost])
      for job in self._jobs:
        self._loop.call_soon_threadsafe(_set_result, job.result, error)

  def _wait_for_work(self) -> bool:
    with self._changed:
      has_work = lambda: self._waiting or self._jobs or any(self._running)  # noqa: E731
      self._changed.wait_for(lambda: has_work() or self._is_stopping)
      return bool(has_work())

  def _run_jobs(self) -> None:
    if not self._jobs:
      return
    with self._changed:
      fn = self._jobs[0].fn
      jobs = list(itertools.takewhile(lambda job: job.fn == fn, self._jobs))[: BATCH_SIZES[-1]]
      for _ in jobs:
        self._jobs.popleft()
    if not (jobs := [job for job in jobs if not job.is_cancelled]):
      return
    try:
      results = fn([job.row for job in jobs])
    except Exception as error:  # It fails these jobs, and not the model.
      results = [error] * len(jobs)
    for job, result in zip(jobs, results, strict=True):
      self._loop.call_soon_threadsafe(_set_result, job.result, result)

  def _release_cancelled(self) -> None:
    for slot, request in enumerate(self._running):
      if request is not None and request.is_cancelled:
        self.counts["requests_cancelled_total"] += 1
        self._release(slot)

  def _release(self, slot: int) -> None:
    self._running[slot] = None
    self._free.append(slot)

  def _take_waiting(self) -> list[Request]:
    """Returns the next requests, at most a batch of those for which there are slots."""
    taken: list[Request] = []
    with self._changed:
      while self._waiting and len(taken) < min(len(self._free), BATCH_SIZES[-1]):
        request = self._waiting.popleft()
        if not request.is_cancelled:
          taken.append(request)
    return taken

  def _admit(self) -> None:
    """Puts waiting requests into free slots."""
    self._taken = taken = self._take_waiting()
    if not taken:
      return
    if not self._programs.is_decoder:
      self._fit_lengths([*taken, *filter(None, self._running)])
    computed: list[Request] = []
    for request in taken:
      source, position = self._most_similar(request)
      if any(request.inputs == other.inputs for other in computed) and self._programs.can_rewind:
        with self._changed:  # It waits for the next step, when these inputs are in a slot.
          self._waiting.appendleft(request)
      elif source is None:
        computed.append(request)
      else:
        self.counts["prefix_hits_total"] += 1
        slot = self._claim(request, source)
        if self._programs.is_decoder:  # The steps compute the other inputs.
          del self._contents[slot][position + 1 :]
        new = self._admission([slot], [request])
        new = new._replace(position=np.array([position], np.int32))
        self._state = self._programs.copy(self._state, self._length, source, new)
    if computed:
      slots = [self._claim(request) for request in computed]
      missing = next(n for n in BATCH_SIZES if n >= len(computed)) - len(computed)
      rows = self._programs.prefill([request.inputs for request in computed])
      new = self._admission([*slots, *[NO_SLOT] * missing], computed + computed[:1] * missing)
      self._state = self._programs.insert(self._state, self._length, rows, new)
    self._taken = []

  def _admission(self, slots: Sequence[int], requests: Sequence[Request]) -> Any:
    is_decoder = self._programs.is_decoder
    prefixes = [request.inputs if is_decoder else () for request in requests]
    limits = [request.max_tokens for request in requests]
    return self._programs.admission(slots, prefixes, limits, [r.controls for r in requests])

  def _fit_lengths(self, requests: Sequence[Request]) -> None:
    """Makes the slots as long as the longest inputs."""
    needed = max(self._programs.length_of(len(request.inputs)) for request in requests)
    if needed != self._length:
      self._state = self._programs.resize(self._state, self._length, needed)
      self._contents = [tokens if len(tokens) <= needed else [] for tokens in self._contents]
      self._length = needed

  def _most_similar(self, request: Request) -> tuple[int | None, int]:
    """Returns a slot with the arrays of a request's inputs, and the first position to compute from them."""
    if not self._programs.can_rewind:
      return None, 0
    wanted = list(request.inputs)
    if not self._programs.is_decoder:
      return (self._contents.index(wanted) if wanted in self._contents else None), 0
    # The arrays of a sequence's newest token may not have been computed yet.
    common = [_common(wanted, tokens[:-1]) for tokens in self._contents]
    slot = int(np.argmax(common))
    position = min(common[slot], len(wanted) - 1)
    is_similar = position and len(wanted) - 1 - position <= _RECOMPUTED
    return (slot, position) if is_similar else (None, 0)

  def _claim(self, request: Request, preferred: int | None = None) -> int:
    """Returns the slot of a request: the preferred one if it is free."""
    slot = preferred if preferred in self._free else self._free[0]
    assert slot is not None
    self._free.remove(slot)
    self._running[slot], self._contents[slot] = request, list(request.inputs)
    return slot

  def _step(self) -> None:
    is_kept = np.array([request is not None for request in self._running])
    self._state, output = self._programs.step(self._state, self._length, is_kept)
    for x in output:
      x.copy_to_host_async()
    self._in_flight.append((list(self._running), output))
    self.counts["steps_total"] += 1

  def _deliver(self, owners: Sequence[Request | None], output: StepOutput) -> None:
    """Sends the tokens of a step to their requests, and frees the slots of those that have ended."""
    result = StepOutput(*jax.device_get(output))
    events: list[tuple[Request, NewToken | BaseException]] = []
    for slot in np.flatnonzero(result.is_new).tolist():
      request = owners[slot]
      if request is None or self._running[slot] is not request:
        continue
      top: tuple[tuple[int, float], ...] = ()
      if request.controls.get("reports_probabilities"):
        pairs = zip(result.top_tokens[slot], result.top_log_probs[slot], strict=True)
        top = tuple((int(token), float(log_prob)) for token, log_prob in pairs)
      token, is_last = int(result.token[slot]), bool(result.has_ended[slot])
      events.append((request, NewToken(token, float(result.log_prob[slot]), top, is_last)))
      if self._programs.is_decoder:
        missing = request.inputs[len(self._contents[slot]) :]
        self._contents[slot] += [*missing, token]
      if is_last:
        self._release(slot)
    self.counts["tokens_generated_total"] += len(events)
    self._send(events)

  def _send(self, events: Sequence[tuple[Request, NewToken | BaseException]]) -> None:
    def put() -> None:
      for request, event in events:
        request.events.put_nowait(event)

    if events:
      self._loop.call_soon_threadsafe(put)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
  """Returns how many tokens two sequences begin with together."""
  return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))  # noqa: B905


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
  if future.cancelled():
    return
  if isinstance(result, BaseException):
    future.set_exception(result)
  else:
    future.set_result(result)
