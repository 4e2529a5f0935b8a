"""Waits until all processes of a run are present, and ends all of them when one fails or dies.

Every process first connects to process 0, at the coordinator's address, and reports its index and process
count. jax has no such check. It aborts a process, even hours into a run, when another one connects with
the same index.

These connections stay open. A process that fails sends its error over them, and the operating system
closes those of a process that dies. Process 0 passes both on.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from rosetta_t5 import user_errors
from rosetta_t5.terminal import Bar, progress_bar

EXIT_STATUS = 70
_SOCKET_TIMEOUT_S, _RETRY_S = 5.0, 0.2
_PREFIX = "rosetta-t5 "
# How long a process whose collective failed waits for the news of which process was lost.
_LOSS_S = 10.0
# Processes that fail for the same reason have this time to print their own errors.
_GRACE_S = 3.0
_MAX_CHARACTERS, _MAX_BYTES, _MAX_SHOWN = 4000, 1 << 16, 20
_LEAVES = ""


def wait_for_processes(address: str, index: int, count: int, timeout_s: float) -> Presence:
  """Returns the connections of the run's processes once all are present. The address is then free for jax.

  Args:
    address: HOST:PORT of process 0.
    index: the index of this process, from 0.
    count: the number of processes.
    timeout_s: seconds to wait for the others.

  Raises:
    ValueError: two processes have the same index or were given different counts (every process
      raises it), or the time is over.
  """
  name = f"process {index}, process id {os.getpid()} on {socket.gethostname()},"
  report = {"index": index, "count": count, "name": name}
  label = f"process {index} of {count}, coordinator {address}"
  deadline = time.monotonic() + timeout_s
  with progress_bar(label, stream=sys.stderr) as bar:
    while time.monotonic() < deadline:
      # Another process 0 on this machine may already listen, or an earlier run, which ends soon.
      if index == 0 and (listener := _listen(address, count)):
        peers = call_roll(listener, report, deadline, bar)
      else:
        peers = report_to_process_0(address, report, deadline, bar)
      if peers is not None:
        return Presence(index, name, peers)
      time.sleep(_RETRY_S)
  raise ValueError(
    f"{bar.line()}: {timeout_s:.0f} s are over. Check that all processes run, that each has its own "
    "--process_index, and that they can reach process 0. --initialization_timeout sets how long to wait."
  )


def report_to_process_0(
  address: str, report: Mapping[str, Any], deadline: float, bar: Bar
) -> dict[Connection, str] | None:
  """Returns the connection to process 0 once all processes are present; None if it does not answer.

  Args:
    address: HOST:PORT of process 0.
    report: the index and name of this process, and the process count that it was given.
    deadline: when to give up, as `time.monotonic()`.
    bar: shows what this process waits for.

  Raises:
    ValueError: process 0 has refused the run.
  """
  host, _, port = address.rpartition(":")
  bar.update(text="waiting for process 0, which does not answer at this address")
  with contextlib.suppress(OSError, EOFError):
    connection = _open(socket.create_connection((host.strip("[]"), int(port)), _SOCKET_TIMEOUT_S))
    connection.send_bytes((_PREFIX + json.dumps(report)).encode())
    while not connection.poll(1.0) and time.monotonic() < deadline:
      bar.update(text="waiting for other processes; process 0 is present")
    if not connection.poll():
      return None
    reply = connection.recv_bytes(_MAX_BYTES).decode(errors="replace")
    if reply == _PREFIX:
      return {connection: f"process 0 at {address}"}
    if reply.startswith(_PREFIX):
      raise ValueError(reply.removeprefix(_PREFIX))
  return None


def call_roll(
  listener: socket.socket, report: Mapping[str, Any], deadline: float, bar: Bar
) -> dict[Connection, str] | None:
  """Returns process 0's connections to the others, with their names; None if some are missing.

  Args:
    listener: the socket to which the others connect. It is closed.
    report: the index, name and process count of process 0.
    deadline: when to give up, as `time.monotonic()`.
    bar: shows what process 0 waits for.

  Raises:
    ValueError: two processes have the same index or were given different counts.
  """
  reports: dict[Connection, dict[str, Any]] = {}
  with listener:
    listener.settimeout(1.0)
    while len(reports) < report["count"] - 1:
      present = {each["index"] for each in reports.values()}
      missing = [str(index) for index in range(1, report["count"]) if index not in present]
      bar.update(text=f"waiting for process {', '.join(missing[:_MAX_SHOWN])}")
      if time.monotonic() >= deadline:
        return None
      with contextlib.suppress(OSError, EOFError):  # Nobody has connected, or has already ended.
        connection = _open(listener.accept()[0])
        if connection.poll(_SOCKET_TIMEOUT_S):
          text = connection.recv_bytes(_MAX_BYTES).decode(errors="replace")
          if text.startswith(_PREFIX):  # It is not a different program.
            reports[connection] = json.loads(text.removeprefix(_PREFIX))
      for ended in wait([*reports], 0):
        del reports[ended]  # type: ignore[arg-type]
  # The listener is closed now, so jax's service can use the address.
  refusal = _refusal([report, *reports.values()])
  for connection in reports:
    with contextlib.suppress(OSError):  # The process may have ended.
      connection.send_bytes((_PREFIX + refusal).encode())
  if refusal:
    raise ValueError(refusal)
  return {connection: sent["name"] for connection, sent in reports.items()}


def _refusal(reports: Sequence[Mapping[str, Any]]) -> str:
  """Returns why these processes, of which process 0 is the first, cannot be one run; "" if they can."""
  count, indices = reports[0]["count"], collections.Counter(each["index"] for each in reports)
  wrong = [each for each in reports if each["count"] != count or indices[each["index"]] > 1]
  listed = "\n".join(f"  {each['name']} has --process_count={each['count']}" for each in wrong)
  return listed and (
    f"each process of a run needs its own --process_index, from 0 to {count - 1}, and all of them the "
    f"--process_count of process 0, {count}:\n{listed}"
  )


def _open(connected: socket.socket) -> Connection:
  connected.settimeout(None)
  return Connection(connected.detach())


def _listen(address: str, count: int) -> socket.socket | None:
  """Returns a socket that listens at the address's port; None if the port is in use."""
  is_dual = socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if is_dual else socket.AF_INET
  try:
    return socket.create_server(
      ("", int(address.rpartition(":")[2])), family=family, backlog=count, dualstack_ipv6=is_dual
    )
  except OSError:
    return None


class Presence:
  """The connections of a process to the others: process 0 is connected to all, which are connected to it."""

  def __init__(self, index: int, name: str, peers: Mapping[Connection, str]) -> None:
    """Watches the connections from now on.

    Args:
      index: the index of this process.
      name: its index, host and process id, for messages.
      peers: the name of the process at the other end of each connection.
    """
    self._index, self._name, self._peers = index, name, dict(peers)
    self._stderr = os.dup(2)  # While TensorFlow is imported, 2 is a buffer.
    self._is_ending = threading.Lock()
    threading.Thread(target=self._watch, name="presence", daemon=True).start()
    atexit.register(self._send, _LEAVES)
    user_errors.around_failure = self.ending_because_of

  @contextlib.contextmanager
  def ending_because_of(self, error: Exception) -> Iterator[None]:
    """A context in which an error is printed. It ends this process at once, and the others soon after.

    Nothing is waited for that needs the other processes, such as jax's shutdown.
    """
    if is_failed_collective(error):
      time.sleep(_LOSS_S)  # Another process was lost. The thread ends this one when it knows which.
    self._is_ending.acquire()
    status: object = 1
    try:
      yield
    except SystemExit as end:
      status = end.code
    except Exception as uncaught:
      sys.excepthook(type(uncaught), uncaught, uncaught.__traceback__)
    text = f"{type(error).__name__}: {user_errors.strip_gin_notes(str(error))}"
    self._end(f"{self._name} failed: {text}", status if isinstance(status, int) else 1)

  def _watch(self) -> None:
    watched: list[Any] = [*self._peers]
    while watched:
      for connection in wait(watched):
        try:
          text = connection.recv_bytes(_MAX_BYTES).decode()  # type: ignore[union-attr]
        except (EOFError, OSError):
          self._end_because_of_another(
            f"{self._peers[connection]} has died without a message: it was killed, for example because "  # type: ignore[index]
            "memory ran out, or its machine failed. Its log, or the kernel's log on its machine, may "
            "contain the reason. All saved checkpoints are complete: the same command on all processes "
            "resumes the run.",
            0.0,
          )
          return
        if text != _LEAVES:
          self._end_because_of_another(text, _GRACE_S)
          return
        watched.remove(connection)

  def _end_because_of_another(self, text: str, grace_s: float) -> None:
    time.sleep(grace_s)
    if self._is_ending.acquire(blocking=False):  # Otherwise the main thread ends this process.
      os.write(self._stderr, f"\nerror: this run ends because {text}\n".encode())
      self._end(text, EXIT_STATUS)

  def _end(self, text: str, status: int) -> NoReturn:
    """Sends the reason to the connected processes and ends this one."""
    self._send(text)
    user_errors.finish_output()
    if self._index == 0:
      # The end of process 0 aborts the others, which print the reason before.
      time.sleep(2 * _GRACE_S)
    os._exit(status)

  def _send(self, text: str) -> None:
    for connection in self._peers:
      with contextlib.suppress(OSError):  # The other process has ended.
        connection.send_bytes(text[:_MAX_CHARACTERS].encode())


def is_failed_collective(error: BaseException) -> bool:
  """Returns whether an error, or one of its causes, comes from a collective.

  jax raises such an error as its own type, or as a ValueError where an array is copied to the host.
  """
  text = "".join(traceback.format_exception(error))
  is_failed = re.search("^jax.*JaxRuntimeError|Gloo|NCCL|nccl", text, re.MULTILINE)
  return bool(is_failed) and "RESOURCE_EXHAUSTED" not in text
