"""Ends a run of several processes when one of them blocks the others, and names that process.

A collective waits forever for a process that does not take part. Every process therefore reports its
phase through jax's coordination service; a process whose reports stop is frozen or dead.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from rosetta_t5.distributed.presence import EXIT_STATUS
from rosetta_t5.jax_internals import coordination_client

VARIABLE = "ROSETTA_T5_STALL_SECONDS"
# A process is reported as silent after this time. jax's heartbeat may end the run 20 s after a death.
SILENCE_S = 12.0
_DEFAULT_LIMIT_S = 1800.0
_REPORT_INTERVAL_S = 5.0
_STACK_FRAMES = 12
_STARTING = "starting"
_KEY = "rosetta_t5/watchdog"


@dataclasses.dataclass(frozen=True)
class Report:
  """What one process last reported.

  Attributes:
    process: its index.
    host: its host name and process id, for messages.
    phase: what it is doing, in the same words as every other process that does the same.
    seconds: how long it has been in this phase.
    stack: the calls of its main thread, if it has been in this phase for long.
    has_left: whether it has finished its part.
    silent_seconds: how long ago this report arrived.
  """

  process: int
  host: str
  phase: str
  seconds: float
  stack: str = ""
  has_left: bool = False
  silent_seconds: float = 0.0


Reports = Mapping[int, Report]


def find_silent(reports: Reports, limit_s: float) -> list[int]:
  """Returns the processes that should still report but have not done so for `limit_s` seconds."""
  return [
    process
    for process, report in sorted(reports.items())
    if report.silent_seconds > limit_s and not report.has_left
  ]


def find_blocking(reports: Reports, silence_s: float = SILENCE_S) -> list[int]:
  """Returns the processes that block the others; none if all are in the same phase.

  These are the silent processes, or else those whose phase is the rarest: the others wait for them
  in one collective.
  """
  if silent := find_silent(reports, silence_s):
    return silent
  active = {process: report for process, report in reports.items() if not report.has_left}
  counts = collections.Counter(report.phase for report in active.values())
  if len(counts) < 2:
    return []
  if counts[_STARTING]:
    return [process for process, report in active.items() if report.phase == _STARTING]
  # If there is one process in each of two phases, the one that computes is waiting for the other.
  common = max(counts, key=lambda phase: (counts[phase], "computing" in phase))
  return [process for process, report in active.items() if report.phase != common]


def is_stalled(reports: Reports, limit_s: float, silence_s: float = SILENCE_S) -> bool:
  """Returns whether no process has made progress for `limit_s` seconds.

  A process that takes long while another one makes progress is merely the slower one.
  """
  silent = find_silent(reports, silence_s)
  return all(
    process in silent or report.has_left or report.seconds >= limit_s
    for process, report in reports.items()
  )


class Watchdog:
  """Watches the processes of a run inside a `with`; does nothing for a single process."""

  def __init__(self, seconds: float | None = None) -> None:
    """Sets the time without progress after which the run ends.

    Args:
      seconds: None for the environment variable ROSETTA_T5_STALL_SECONDS, or else 1800; 0 never ends
        the run.
    """
    limit = os.environ.get(VARIABLE, _DEFAULT_LIMIT_S) if seconds is None else seconds
    self._limit_s = float(limit)
    self._ended = threading.Event()
    self._arrivals: dict[int, tuple[int, float]] = {}  # process → (report number, when it arrived)
    self._silent: list[int] = []  # the processes that are reported as silent
    self._finished = False
    self._thread: threading.Thread | None = None
    self.set_phase(_STARTING)

  def __enter__(self) -> Watchdog:
    self.set_phase(_STARTING)  # The time before the run, such as compilation, does not count.
    if jax.process_count() > 1 and self._limit_s > 0:
      self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
      self._thread.start()
    return self

  def __exit__(self, _: object, exception: BaseException | None, traceback: object) -> None:
    self._finished = exception is None
    self._ended.set()
    if self._thread is not None:
      self._thread.join()

  @property
  def seconds_in_phase(self) -> float:
    """How long this process has been in its phase."""
    return time.monotonic() - self._phase_started

  def set_phase(self, phase: str) -> None:
    """Records what this process starts to do, in words that are the same in every process."""
    self._phase, self._phase_started, self._warned_s = phase, time.monotonic(), 0.0

  def watch_batches(self, source: Iterator[Any], step: int) -> Iterator[Any]:
    """Yields the batches of the source, and sets the phase as they are drawn.

    Args:
      source: yields batches.
      step: the optimizer steps made so far.
    """
    self.set_phase(f"waiting for the batch of step {step + 1}")
    for number, batch in enumerate(source, start=step + 1):
      self.set_phase(f"computing step {number}")
      yield batch
      self.set_phase(f"waiting for the batch of step {number + 1}")

  def _watch(self) -> None:
    client = coordination_client()
    interval = min(_REPORT_INTERVAL_S, self._limit_s / 5)
    # The first report is sent at once: nobody could miss a process that has never reported.
    # An error means that the process that runs the service has ended.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      for number in itertools.count(1):
        self._send_report(client, number)
        reports = self._read_reports(client)
        self._warn_of_silence(reports)
        self._end_if_stalled(reports, interval)
        if self._ended.wait(interval):
          break
      if self._finished:  # Process 0 may continue for long: it computes metrics and writes them.
        self._send_report(client, number + 1, has_left=True)

  def _send_report(self, client: Any, number: int, has_left: bool = False) -> None:
    seconds = self.seconds_in_phase
    report = {
      "number": number,
      "host": f"{socket.gethostname()}, process id {os.getpid()}",
      "phase": self._phase,
      "seconds": seconds,
      "stack": _main_stack() if seconds > self._limit_s / 2 else "",
      "has_left": has_left,
    }
    key = f"{_KEY}/{jax.process_index()}"
    client.key_value_set(key, json.dumps(report), allow_overwrite=True)

  def _read_reports(self, client: Any) -> dict[int, Report]:
    now, reports = time.monotonic(), {}
    for key, text in client.key_value_dir_get(_KEY):
      process, fields = int(key.rpartition("/")[2]), json.loads(text)
      number = fields.pop("number")
      if self._arrivals.get(process, (None,))[0] != number:
        self._arrivals[process] = (number, now)
      silent_seconds = now - self._arrivals[process][1]
      reports[process] = Report(process=process, silent_seconds=silent_seconds, **fields)
    return reports

  def _warn_of_silence(self, reports: Reports) -> None:
    """Names silent processes, each once, long before the run ends because of them."""
    silent = find_silent(reports, SILENCE_S)
    for process in silent:
      report = reports[process]
      if process not in self._silent:
        print(
          f"silent: process {process} ({report.host}) has not reported for "
          f"{report.silent_seconds:.0f} s; its last report was: {report.phase}. If it is "
          "frozen, jax ends this run within two minutes.",
          file=sys.stderr,
          flush=True,
        )
    self._silent = silent

  def _end_if_stalled(self, reports: Reports, interval: float) -> None:
    seconds, limit_s, silence_s = self.seconds_in_phase, self._limit_s, max(self._limit_s / 2, 3.0)
    all_reported = len(reports) == jax.process_count()
    if seconds < limit_s or not all_reported or not is_stalled(reports, limit_s, silence_s):
      return
    if blocking := find_blocking(reports, silence_s):
      print(_stall_text(reports, blocking, silence_s), file=sys.stderr, flush=True)
      # The end of a process ends the others, which must have printed this before.
      time.sleep(2 * interval if jax.process_index() in blocking else interval)
      os._exit(EXIT_STATUS)
    if seconds > self._warned_s + limit_s and jax.process_index() == 0:
      self._warned_s = seconds
      print(f"slow: every process has been {self._phase} for {seconds:.0f} s", file=sys.stderr)


def _main_stack() -> str:
  frame = sys._current_frames().get(threading.main_thread().ident or 0)
  return "".join(traceback.format_stack(frame)[-_STACK_FRAMES:]) if frame else ""


def _stall_text(reports: Reports, blocking: list[int], silence_s: float) -> str:
  lines = ["error: this run ends because it makes no progress. Its processes:"]
  silent = find_silent(reports, silence_s)
  for process, report in sorted(reports.items()):
    is_silent = process in silent
    seconds = report.silent_seconds if is_silent else report.seconds
    duration = f"{', silent' * is_silent} for {seconds:.0f} s"
    mark = "  <- blocks the others" if process in blocking else ""
    lines.append(f"  {process} ({report.host}): {report.phase}{duration}{mark}")
  for process in blocking:
    if stack := reports[process].stack:
      lines += [f"The main thread of process {process} is at:", stack.rstrip()]
  lines.append(f"{VARIABLE} sets the time without progress after which a run ends (0: never).")
  return "\n".join(lines)
