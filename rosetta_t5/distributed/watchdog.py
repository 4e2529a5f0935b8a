"""Ends a run of several processes when one of them holds up the others, and says which and where.

A collective waits for ever for a process that does not come. Every process tells the others, through
jax's coordination service, where it stands; a frozen one is known by its silence.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import jax

from rosetta_t5.distributed.jax_internals import coordination_client

VARIABLE = "ROSETTA_T5_STALL_SECONDS"
EXIT_STATUS = 70
_DEFAULT_SECONDS = 1800.0
# Noted before jax's own heartbeat ends the run, which may come 20 seconds after a death.
_SILENCE_SECONDS = 12.0
_INTERVAL_S = 5.0
_STACK_FRAMES = 12
_STARTING = "starting"
_KEY = "rosetta_t5/watchdog"


class ProcessLostError(RuntimeError):
  """Another process of the run has died or is frozen, and this one ends because of it."""


@dataclasses.dataclass(frozen=True)
class Report:
  """Where a process says that it stands.

  Attributes:
    process: its index.
    place: host and process id, for people.
    position: what it does, the same words in every process that does the same.
    seconds: how long it has been doing that, or how long it has been silent.
    stack: its main thread's calls, if it has been at it for long.
    silent: whether it has stopped to report.
    left: whether it has said that it ends: it has done its part, or another process has failed it.
  """

  process: int
  place: str
  position: str
  seconds: float
  stack: str = ""
  silent: bool = False
  left: bool = False


def blocking(reports: Mapping[int, Report]) -> list[int]:
  """Returns the processes that hold up the others; none if all do the same and so wait for no one.

  The silent ones, or else those whose position fewest share: the others wait in one collective.
  """
  reports = {process: report for process, report in reports.items() if not report.left}
  silent = [process for process, report in reports.items() if report.silent]
  counts = collections.Counter(report.position for report in reports.values())
  if silent or len(counts) < 2:
    return silent
  if 0 < counts[_STARTING] < len(reports):
    return [process for process, report in reports.items() if report.position == _STARTING]
  # Of two processes at two positions, the one that computes is the one that waits.
  most = max(counts, key=lambda position: (counts[position], "computing" in position))
  return [process for process, report in reports.items() if report.position != most]


def is_stalled(reports: Mapping[int, Report], limit: float) -> bool:
  """Returns whether nobody has moved for `limit` seconds; a silent process is not waited for.

  One that takes long, while another has moved a moment ago, is only the slower one of them.
  """
  return all(report.silent or report.left or report.seconds >= limit for report in reports.values())


def is_failed_collective(error: BaseException) -> bool:
  """Returns whether an error, or what it was made of, is one of a collective.

  jax raises it as its own; where an array's values are fetched, as in a save, as a ValueError.
  """
  causes: list[BaseException] = [error]
  while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:
    causes.append(cause)
  if any("RESOURCE_EXHAUSTED" in str(each) for each in causes):
    return False
  return any(
    isinstance(each, jax.errors.JaxRuntimeError) or re.search("Gloo|NCCL|nccl", str(each))
    for each in causes
  )


class Watchdog:
  """Watches inside a `with`, where there are several processes."""

  def __init__(self, seconds: float | None = None) -> None:
    """Sets the time without progress after which the run ends.

    Args:
      seconds: None for the environment's ROSETTA_T5_STALL_SECONDS, else 1800; 0 for never.
    """
    given = os.environ.get(VARIABLE, _DEFAULT_SECONDS) if seconds is None else seconds
    self._limit = float(given)
    self._position, self._since = _STARTING, time.monotonic()
    self._ended = threading.Event()
    self._heard: dict[int, tuple[int, float]] = {}  # beat and when it was first heard, by process
    self._noted: dict[int, Report] = {}  # the silent processes that were told of
    self._failed, self._finished = False, False
    self._thread: threading.Thread | None = None

  def __enter__(self) -> Watchdog:
    self._since = time.monotonic()  # What came before, such as compiling, is no stall of the run.
    if jax.process_count() > 1 and self._limit > 0:
      self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
      self._thread.start()
    return self

  def __exit__(
    self,
    exception_type: type[BaseException] | None,
    exception: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    if self._thread is not None and exception is not None and is_failed_collective(exception):
      # It has lost a process, most often: which one, its silence tells.
      self._failed = True
      self._thread.join(_SILENCE_SECONDS + _INTERVAL_S)
    self._finished = exception is None
    self._ended.set()
    if self._thread is not None:
      self._thread.join()
    if self._failed and self._noted:
      # jax's own end would wait for the lost process, and then bury the text below a stack trace.
      atexit.register(_end_at_once)
      raise ProcessLostError(self._lost_text()) from exception

  def _lost_text(self) -> str:
    lost = " and ".join(f"process {n} ({report.place})" for n, report in self._noted.items())
    return (
      f"this run has lost {lost}, dead or frozen, while this process was {self._position}. The log "
      "over there may tell why, and on its machine the kernel's log, if memory ran out. What the run "
      "has saved is whole: start all its processes again with the same command, and it goes on from it"
    )

  def set_phase(self, position: str) -> None:
    """Says what this process begins to do, in words that are the same in every process."""
    self._position, self._since = position, time.monotonic()

  def watch_batches(self, source: Iterator[Any], step: int) -> Iterator[Any]:
    """Returns the source's batches, and says where the run stands as they are drawn.

    Args:
      source: yields batches for ever.
      step: updates made so far.
    """
    return source if self._thread is None else self._batches(source, step)

  def _batches(self, source: Iterator[Any], step: int) -> Iterator[Any]:
    while True:
      self.set_phase(f"waiting for the batch of step {step + 1}")
      batch = next(source)
      self.set_phase(f"computing step {step + 1}")
      yield batch
      step += 1

  def _watch(self) -> None:
    client = coordination_client()
    beat, warned, interval = 0, 0.0, min(_INTERVAL_S, self._limit / 5)
    # The first beat at once: who is never heard of cannot be missed.
    while not beat or not self._ended.wait(interval):
      beat += 1
      failed = self._failed  # As this beat says it.
      try:
        self._tell(client, beat, left=failed)
        reports = self._reports(client.key_value_dir_get(_KEY))
      except jax.errors.JaxRuntimeError:
        if self._failed:  # The run has left the others.
          return
        raise
      self._note_silence(reports)
      if failed:  # Nothing but the silence of others is of interest any more.
        if self._noted:
          return
        continue
      still = time.monotonic() - self._since
      heard_all = len(reports) == jax.process_count()
      if still < self._limit or not heard_all or not is_stalled(reports, self._limit):
        continue
      if guilty := blocking(reports):
        print(_describe(reports, guilty), file=sys.stderr, flush=True)
        if jax.process_index() in guilty:  # Its end would end the others before they have spoken.
          time.sleep(2 * interval)
        os._exit(EXIT_STATUS)
      if still > warned + self._limit and jax.process_index() == 0:
        warned = still
        print(f"slow: every process has been {self._position} for {still:.0f} s", file=sys.stderr)
    if self._finished:  # The others may go on for long: the first computes metrics, and writes.
      with contextlib.suppress(jax.errors.JaxRuntimeError):
        self._tell(client, beat + 1, left=True)

  def _tell(self, client: Any, beat: int, left: bool) -> None:
    key, text = f"{_KEY}/{jax.process_index()}", json.dumps(self._own(beat, left))
    client.key_value_set(key, text, allow_overwrite=True)

  def _note_silence(self, reports: Mapping[int, Report]) -> None:
    """Names the processes that are not heard of, once each time, long before the run is given up."""
    now = time.monotonic()
    silences = {process: now - heard for process, (_, heard) in self._heard.items()}
    silent = {
      process
      for process, seconds in silences.items()
      if seconds > _SILENCE_SECONDS and not reports[process].left
    }
    for process in sorted(silent - {*self._noted}):
      report = reports[process]
      print(
        f"silent: process {process} ({report.place}) has not been heard of for "
        f"{silences[process]:.0f} s; it last said that it was {report.position}. If it has died or is "
        "frozen, jax ends this run within a minute.",
        file=sys.stderr,
        flush=True,
      )
    self._noted = {process: reports[process] for process in sorted(silent)}

  def _own(self, beat: int, left: bool) -> dict[str, Any]:
    still = time.monotonic() - self._since
    return {
      "beat": beat,
      "place": f"{socket.gethostname()}, process id {os.getpid()}",
      "position": self._position,
      "seconds": still,
      "stack": _main_stack() if still > self._limit / 2 else "",
      "left": left,
    }

  def _reports(self, entries: list[tuple[str, str]]) -> dict[int, Report]:
    now, reports = time.monotonic(), {}
    for key, text in entries:
      process, said = int(key.rpartition("/")[2]), json.loads(text)
      beat = said.pop("beat")
      if self._heard.get(process, (None,))[0] != beat:
        self._heard[process] = (beat, now)
      silence = now - self._heard[process][1]
      if silent := silence > max(self._limit / 2, 3.0) and not said["left"]:
        said["seconds"] = silence
      reports[process] = Report(process=process, silent=silent, **said)
    return reports


def _end_at_once() -> None:
  """Ends this process as it exits; the one that others are connected through gives them time."""
  sys.stdout.flush()
  sys.stderr.flush()
  if jax.process_index() == 0 and jax.process_count() > 2:
    time.sleep(2 * _INTERVAL_S)
  os._exit(EXIT_STATUS)


def _main_stack() -> str:
  frame = sys._current_frames().get(threading.main_thread().ident or 0)
  return "".join(traceback.format_stack(frame, limit=None)[-_STACK_FRAMES:]) if frame else ""


def _describe(reports: Mapping[int, Report], guilty: list[int]) -> str:
  lines = ["error: this run makes no progress, and ends. Its processes:"]
  for process, report in sorted(reports.items()):
    silence = ", silent" if report.silent else ""
    mark = "  <- holds up the others" if process in guilty else ""
    lines.append(
      f"  {process} ({report.place}): {report.position}{silence} for {report.seconds:.0f} s{mark}"
    )
  for process in guilty:
    if stack := reports[process].stack:
      lines += [f"Process {process} stands at:", stack.rstrip()]
  lines.append(f"Progress is awaited for {VARIABLE} seconds (0: for ever).")
  return "\n".join(lines)
