"""Times several implementations in turns, each in a process of its own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import time
from collections.abc import Callable, Mapping
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

Run = Callable[[], Any]

_WARMUP_RUNS = 2  # the first one compiles


class TimedRun(NamedTuple):
  """One run.

  Attributes:
    seconds: how long it took.
    cpu_seconds: the CPU time of the process, summed over cores; other programs hardly affect it.
    result: what the function returned.
  """

  seconds: float
  cpu_seconds: float
  result: Any


# The function that is timed; set in the process of its implementation.
_run: Run | None = None


def time_in_turns(makers: Mapping[str, Callable[[], Run]], runs: int) -> dict[str, list[TimedRun]]:
  """Returns the timed runs of each implementation, by name.

  Every implementation has its own process, so that it does not share threads and memory with the
  others. They take turns, so that a change in the machine's speed affects all of them.

  Args:
    makers: name → a function that returns the function to be timed. It is pickled, and called in the
      process of the implementation.
    runs: the number of timed runs of each implementation.

  Raises:
    ValueError: a process has died.
  """
  spawn = multiprocessing.get_context("spawn")
  timed: dict[str, list[TimedRun]] = {name: [] for name in makers}
  with contextlib.ExitStack() as stack:
    pools = {
      name: stack.enter_context(concurrent.futures.ProcessPoolExecutor(1, spawn)) for name in makers
    }
    for turn in range(_WARMUP_RUNS + runs):
      for name, pool in pools.items():
        try:
          timed[name].append(pool.submit(_time_run, None if turn else makers[name]).result())
        except BrokenProcessPool:
          raise ValueError(f"the process of {name!r} has died; did its memory run out?") from None
  return {name: results[_WARMUP_RUNS:] for name, results in timed.items()}


def _time_run(make_run: Callable[[], Run] | None) -> TimedRun:
  """Times one run; `make_run`, if given, makes the function first."""
  global _run
  _run = make_run() if make_run else _run
  assert _run is not None
  started, cpu_started = time.perf_counter(), time.process_time()
  result = _run()
  return TimedRun(time.perf_counter() - started, time.process_time() - cpu_started, result)
