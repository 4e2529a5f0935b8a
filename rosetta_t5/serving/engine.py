"""Continuous batching: one loop that advances all running requests by one token at a time."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

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
    self._waiting, self._calls = collections.deque[Request](), collections.deque[Request]()
    self._running: dict[int, Request] = {}
    # The inputs whose arrays each slot still has.
    self._contents: list[tuple[int, ...] | None] = [None] * programs.num_slots
    # The slot that was freed first is first.
    self._free = collections.deque(range(programs.num_slots))
    # The requests of the newest step, and its output.
    self._newest: tuple[dict[int, Request], StepOutput | None] = {}, None
    self._counts = dict.fromkeys(_COUNTS, 0)
    self._changed, self._is_stopping = asyncio.Event(), False
    # The event loop's own threads may all be busy with long texts.
    self._thread = ThreadPoolExecutor(1)
    self.error: BaseException | None = None
    self._loop = asyncio.create_task(self._run())

  def submit(self, request: Request) -> None:
    """Appends a request to a queue.

    Raises:
      RequestError: too many requests are waiting, or the engine is ending, or has failed.
    """
    queue = self._calls if request.call else self._waiting
    if self._is_stopping:
      text = f"the model has failed: {self.error}" if self.error else STOPPING
      raise RequestError(text, status=503)
    if len(queue) >= self._max_waiting:
      self._counts["requests_refused"] += 1
      retry_after_s = 1 + len(queue) // self._programs.num_slots
      text = f"{len(queue)} requests are waiting already: try again in {retry_after_s} s"
      raise RequestError(text, status=429, retry_after_s=retry_after_s)
    queue.append(request)
    self._changed.set()

  def cancel(self, request: Request, is_complete: bool = False) -> None:
    """Ends a request, whether it waits, runs or has ended; it counts as cancelled if it is not complete."""
    self._counts["requests_cancelled"] += not is_complete
    request.is_cancelled = True
    with contextlib.suppress(ValueError):
      (self._calls if request.call else self._waiting).remove(request)

  async def call(self, name: str, inputs: Iterable[int], target: Iterable[int] = ()) -> Any:
    """Returns the result of `Programs.call`, made between two steps with other calls of this name; see `submit`."""
    request = Request(tuple(inputs), call=name, target=tuple(target))
    self.submit(request)
    try:
      result = await request.results.get()
    except asyncio.CancelledError:
      self.cancel(request)
      raise
    if isinstance(result, BaseException):
      raise result
    return result

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
    self._is_stopping = True
    self._loop.cancel()
    await asyncio.wait([self._loop])
    self._thread.shutdown(wait=False)

  async def _run(self) -> None:
    try:
      while True:
        owners, output = self._newest
        if not (self._waiting or self._calls or self._running or owners):
          self._changed.clear()
          await self._changed.wait()
        await self._run_calls()
        for slot, request in [*self._running.items()]:
          if request.is_cancelled:
            self._release(slot)
        work, running = self._admit(), dict(self._running)
        new, result = await self._in_thread(self._advance, work, running, output)
        self._newest = running, new
        if owners:
          self._deliver(owners, result)
    except BaseException as error:
      self._fail(error)

  async def _in_thread(self, fn: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(self._thread, fn, *arguments)

  def _fail(self, error: BaseException) -> None:
    self._is_stopping = True
    if isinstance(error, asyncio.CancelledError):
      error = RequestError(STOPPING, status=503)
    else:
      self.error = error
      traceback.print_exception(error)
    for request in [*self._waiting, *self._calls, *self._running.values()]:
      request.results.put_nowait(error)

  async def _run_calls(self) -> None:
    """Makes the first call that waits, with others of its name."""
    if not self._calls:
      return
    name = self._calls[0].call
    requests = [request for request in self._calls if request.call == name][: BATCH_SIZES[-1]]
    for request in requests:
      self._calls.remove(request)
    results: list[Any] = [RequestError(STOPPING, status=503)] * len(requests)
    try:
      results = await self._in_thread(self._programs.call, name, requests)
    except Exception as error:  # It fails these calls, and not the model.
      results = [error] * len(requests)
    finally:
      for request, result in zip(requests, results, strict=True):
        request.results.put_nowait(result)

  def _release(self, slot: int) -> None:
    del self._running[slot]
    self._free.append(slot)

  def _admit(self) -> list[Callable[[], None]]:
    """Gives free slots to at most a batch of waiting requests, and returns what puts them there."""
    computed: dict[int, Request] = {}  # Those whose inputs are computed together.
    copied: list[Callable[[], None]] = []  # After these, also from their slots.
    for _ in range(min(len(self._waiting), len(self._free), BATCH_SIZES[-1])):
      request = self._waiting.popleft()
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

  def _deliver(self, owners: Mapping[int, Request], result: StepOutput) -> None:
    """Sends the tokens of a step to their requests, and frees the slots of those that have ended."""
    for slot in np.flatnonzero(result.is_new).tolist():
      request = owners.get(slot)
      if request is None or self._running.get(slot) is not request:
        continue
      request.results.put_nowait((request.index, StepOutput(*(x[slot] for x in result))))
      self._counts["tokens_generated"] += 1
      if result.has_ended[slot]:
        self._release(slot)
