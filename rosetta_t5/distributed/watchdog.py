"""Ends a run of several processes when one of them blocks the others, and names that process.

A collective waits forever for a process that does not take part. Every process therefore reports its
phase through jax's coordination service. A process that is frozen or dead is the concern of `presence` and of
jax's heartbeat.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from rosetta_t5.distributed.presence import EXIT_STATUS
from rosetta_t5.jax_internals import coordination_client

VARIABLE = "ROSETTA_T5_STALL_SECONDS"
_DEFAULT_LIMIT_S = 1800.0
_REPORT_INTERVAL_S = 5.0
_STARTING = "starting"
_KEY = "rosetta_t5/watchdog"


class Report(NamedTuple):
  """What one process last reported.

  Attributes:
    process: its index.
    host: its host name and process id, for messages.
    phase: what it is doing, in the same words as every other process that does the same.
    seconds: how long it has been in this phase.
    stack: the calls of its main thread, if it has been in this phase for long.
  """

  process: int
  host: str
  phase: str
  seconds: float
  stack: str = ""


def find_blocking(reports: Sequence[Report]) -> list[Report]:
  """Returns the processes that block the others; none if all are in the same phase.

  These are the processes whose phase is the rarest: the others wait for them in one collective.
  """
  counts = collections.Counter(report.phase for report in reports)
  if len(counts) < 2:
    return []
  # If there is one process in each of two phases, the one that computes is waiting for the other.
  common = max(counts, key=lambda phase: (phase != _STARTING, counts[phase], "computing" in phase))
  return [report for report in reports if report.phase != common]


def is_stalled(reports: Sequence[Report], limit_s: float) -> bool:
  """Returns whether no process has made progress for `limit_s` seconds.

  A process that takes long while another one makes progress is merely the slower one.
  """
  return all(report.seconds >= limit_s for report in reports)


class Watchdog(contextlib.ExitStack):
  """Watches the processes of a run inside a `with`; does nothing for a single process."""

  def __init__(self) -> None:
    """Reads ROSETTA_T5_STALL_SECONDS, the time without progress after which the run ends; 0 for never."""
    super().__init__()
    self._limit_s = float(os.environ.get(VARIABLE, _DEFAULT_LIMIT_S))
    self._ended = threading.Event()
    self.set_phase(_STARTING)

  def __enter__(self) -> Watchdog:
    self.set_phase(_STARTING)  # The time before the run, such as compilation, does not count.
    if jax.process_count() > 1 and self._limit_s > 0:
      thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
      thread.start()
      self.callback(thread.join)
      self.callback(self._ended.set)  # This is called first.
    return self

  @property
  def seconds_in_phase(self) -> float:
    """How long this process has been in its phase."""
    return time.monotonic() - self._phase_started

  def set_phase(self, phase: str) -> None:
    """Records what this process starts to do, in words that are the same in every process."""
    self._phase, self._phase_started = phase, time.monotonic()

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
    key = f"{_KEY}/{jax.process_index()}"
    # An error means that the process that runs the service has ended.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      while not self._ended.wait(interval):
        client.key_value_set(key, json.dumps(self._report()), allow_overwrite=True)
        reports = [Report(*json.loads(text)) for _, text in client.key_value_dir_get(_KEY)]
        self._end_if_stalled(sorted(reports), interval)
      # Process 0 may continue for long: it computes metrics and writes them.
      client.key_value_delete(key)

  def _report(self) -> Report:
    seconds, stack = self.seconds_in_phase, ""
    if seconds > self._limit_s / 2:
      frame = sys._current_frames()[threading.main_thread().ident or 0]
      stack = "".join(traceback.format_stack(frame, limit=12))
    host = f"{socket.gethostname()}, process id {os.getpid()}"
    return Report(jax.process_index(), host, self._phase, seconds, stack)

  def _end_if_stalled(self, reports: Sequence[Report], interval: float) -> None:
    all_reported = len(reports) == jax.process_count()
    if all_reported and is_stalled(reports, self._limit_s) and (blocking := find_blocking(reports)):
      print(_stall_text(reports, blocking), file=sys.stderr, flush=True)
      # The end of a process ends the others, which must have printed this before.
      is_blocking = jax.process_index() in [report.process for report in blocking]
      time.sleep(2 * interval if is_blocking else interval)
      os._exit(EXIT_STATUS)


def _stall_text(reports: Sequence[Report], blocking: Sequence[Report]) -> str:
  lines = ["error: this run ends because it makes no progress. Its processes:"]
  for report in reports:
    process = f"{report.process} ({report.host})"
    mark = "  <- blocks the others" if report in blocking else ""
    lines.append(f"  {process}: {report.phase} for {report.seconds:.0f} s{mark}")
  for report in blocking:
    if report.stack:
      lines += [f"The main thread of process {report.process} is at:", report.stack.rstrip()]
  lines.append(f"{VARIABLE} sets the time without progress after which a run ends (0: never).")
  return "\n".join(lines)
