"""Continuous batching: one loop that advances all running requests by one token at a time."""

from __future__ import annotations

import asyncio
import collections
import functools
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from rosetta_t5.decoding.slots import StepOutput
from rosetta_t5.serving.programs import BATCH_SIZES, Programs, Request

_COUNTS = ("requests_refused", "requests_cancelled", "prefix_hits", "steps", "tokens_generated")

# Compilations in this process; there are none after the start.
_process_counts = {"compilations_total": 0}


def _count_compilation(event: str, duration_secs: float, **_: str | int) -> None:
  _process_counts["compilations_total"] += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count_compilation)


class RequestError(Exception):
  """A request that gets no answer.

  Attributes:
    field: the field that is wrong.
    status: the status of HTTP.
    retry_after_s: the seconds after which the request may be sent again.
  """

  def __init__(
    self, message: str, field: str | None = None, status: int = 400, retry_after_s: int = 1
  ):
    super().__init__(message)
    self.field, self.status, self.retry_after_s = field, status, retry_after_s


STOPPING = "the server is stopping"


class Engine:
  """Runs requests in the slots of a model, in a task of the event loop; a thread waits for the device.

  Attributes:
    error: what ended it, if it has failed.
  """

  def __init__(self, programs: Programs, max_waiting: int):
    """Starts; called in the event loop.

    Args:
      programs: the compiled programs.
      max_waiting: how many sequences, and how many calls, may wait.
    """
    self._programs, self._max_waiting = programs, max_waiting
    self._waiting, self._calls = list[Request](), list[Request]()
    self._running: dict[int, Request] = {}
    # The inputs whose arrays each slot still has.
    self._contents: list[tuple[int, ...] | None] = [None] * programs.num_slots
    # The slot that was freed first is first.
    self._free = collections.deque(range(programs.num_slots))
    self._counts = dict.fromkeys(_COUNTS, 0)
    self._changed = asyncio.Event()
    # The event loop's own threads may all be busy with long texts.
    self._thread = ThreadPoolExecutor(1)
    self.error: BaseException | None = None
    self._loop = asyncio.create_task(self._run())

  def submit(self, requests: Sequence[Request]) -> None:
    """Appends requests to a queue: all of them are sequences, or all are calls.

    Raises:
      RequestError: too many requests would wait, or the engine has ended or failed.
    """
    queue = self._calls if requests[0].call else self._waiting
    if self._loop.done():
      text = f"the model has failed: {self.error}" if self.error else STOPPING
      raise RequestError(text, status=503)
    if len(queue) + len(requests) > self._max_waiting:
      self._counts["requests_refused"] += 1
      retry_after_s = 1 + len(queue) // self._programs.num_slots
      text = f"{len(queue)} requests are waiting already: try again in {retry_after_s} s"
      raise RequestError(text, status=429, retry_after_s=retry_after_s)
    queue.extend(requests)
    self._changed.set()

  def cancel(self, requests: Iterable[Request]) -> None:
    """Ends requests, whether they wait or run, that are not done."""
    for request in requests:
      self._counts["requests_cancelled"] += not request.is_done
      request.is_done = True

  async def call(self, name: str, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Any]:
    """Returns the result of `Programs.call` for each pair of inputs and target; see `submit`.

    A batch of them is computed between two steps, filled up with other calls of this name.
    """
    found: list[Any] = []
    for start in range(0, len(rows), BATCH_SIZES[-1]):
      batch = rows[start : start + BATCH_SIZES[-1]]
      requests = [Request(tuple(inputs), call=name, target=target) for inputs, target in batch]
      self.submit(requests)
      try:
        for request in requests:
          result = await request.results.get()
          if isinstance(result, BaseException):
            raise result
          found.append(result)
      finally:  # If the client has left, or after an error, nobody waits for the others.
        self.cancel(requests)
    return found

  def statistics(self) -> dict[str, float]:
    """Returns numbers about the requests; names that end in _total only grow."""
    return {
      "requests_waiting": len(self._waiting),
      "requests_running": len(self._running),
      **_process_counts,
      **{f"{name}_total": count for name, count in self._counts.items()},
    }

  async def stop(self) -> None:
    """Ends all requests with an error; the thread completes its step or call before it ends."""
    self._loop.cancel()
    await asyncio.wait([self._loop])
    self._thread.shutdown(wait=False)

  async def _run(self) -> None:
    # The newest step: its requests by slot, and its output.
    owners, output = dict[int, Request](), None
    try:
      while True:
        if not (self._waiting or self._calls or self._running or owners):
          self._changed.clear()
          await self._changed.wait()
        await self._run_calls()
        for slot in [slot for slot, request in self._running.items() if request.is_done]:
          del self._running[slot]
          self._free.append(slot)
        work, running = self._admit(), dict(self._running)
        new, result = await self._in_thread(self._advance, work, running, output)
        self._deliver(owners, result)
        owners, output = running, new
    except BaseException as error:
      self._fail(error)

  async def _in_thread(self, fn: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(self._thread, fn, *arguments)

  def _fail(self, error: BaseException) -> None:
    if isinstance(error, asyncio.CancelledError):
      error = RequestError(STOPPING, status=503)
    else:
      self.error = error
      traceback.print_exception(error)
    for request in [*self._waiting, *self._calls, *self._running.values()]:
      request.results.put_nowait(error)

  async def _run_calls(self) -> None:
    """Makes the first call that waits, with others of its name."""
    self._calls = [request for request in self._calls if not request.is_done]
    if not self._calls:
      return
    name = self._calls[0].call
    requests = [request for request in self._calls if request.call == name][: BATCH_SIZES[-1]]
    try:
      results = await self._in_thread(self._programs.call, name, requests)
    except Exception as error:  # It fails these calls, and not the model.
      results = [error] * len(requests)
    for request, result in zip(requests, results, strict=True):
      request.results.put_nowait(result)
      request.is_done = True

  def _admit(self) -> list[Callable[[], None]]:
    """Gives free slots to at most a batch of waiting requests, and returns what puts them there."""
    computed: dict[int, Request] = {}  # Those whose inputs are computed together.
    copied: list[Callable[[], None]] = []  # After these, also from their slots.
    self._waiting = [request for request in self._waiting if not request.is_done]
    for _ in range(min(len(self._waiting), len(self._free), BATCH_SIZES[-1])):
      request = self._waiting.pop(0)
      is_known = self._programs.keeps_inputs and request.inputs in self._contents
      source = self._contents.index(request.inputs) if is_known else None
      slot = source if source in self._free else self._free[0]
      assert slot is not None
      self._free.remove(slot)
      self._running[slot], self._contents[slot] = request, request.inputs
      if source is None:
        computed[slot] = request
      else:
        copied.append(functools.partial(self._programs.copy, slot, request, source))
    self._counts["prefix_hits"] += len(copied)
    return [functools.partial(self._programs.admit, computed), *copied] if computed else copied

  def _advance(
    self, work: Iterable[Callable[[], None]], running: Mapping[int, Request], output: Any
  ) -> tuple[StepOutput | None, Any]:
    """Dispatches work and a step, and waits for the output of the step before, while the device computes this one."""
    for each in work:
      each()
    new = self._programs.step(running) if running else None
    self._counts["steps"] += bool(running)
    return new, jax.device_get(output)

  def _deliver(self, owners: Mapping[int, Request], result: Any) -> None:
    """Sends the tokens of a step to their requests, some of which are then done."""
    for slot, request in owners.items():
      if result.is_new[slot] and not request.is_done:
        request.results.put_nowait((request.index, StepOutput(*(x[slot] for x in result))))
        request.is_done = bool(result.has_ended[slot])
        self._counts["tokens_generated"] += 1
