"""Waits until all processes of a run are present, and ends all of them when one fails or dies.

Every process first connects to process 0, at the coordinator's address, and reports its index and process
count. jax has no such check. It aborts a process, even hours into a run, when another one connects with
the same index.

These connections stay open. A process that fails sends its error over them, and the operating system
closes those of a process that dies. Process 0 passes both on.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax

from rosetta_t5 import user_errors

EXIT_STATUS = 70
# Seconds between two lines about the processes that are still missing.
REPORT_INTERVAL_S = 30.0
_SOCKET_TIMEOUT_S, _RETRY_S = 5.0, 0.2
_PREFIX = b"rosetta-t5 "
# How long a process whose collective failed waits for the news of which process was lost.
_LOSS_S = 10.0
# Processes that fail for the same reason have this time to print their own errors.
_GRACE_S = 3.0
# How long process 0, whose end would abort the others, waits for them to end.
_LAST_S = 15.0
_MAX_CHARACTERS, _MAX_SHOWN = 4000, 20
_LEAVES = b"\n"


def wait_for_processes(address: str, index: int, count: int, timeout_s: float) -> Presence:
  """Returns the connections of the run's processes once all are present. The address is then free for jax.

  Args:
    address: HOST:PORT of process 0.
    index: the index of this process, from 0.
    count: the number of processes.
    timeout_s: seconds to wait for the others.

  Raises:
    ValueError: two processes have the same index or were given different counts (every process
      raises it).
    SystemExit: the time is over; the exit status is that of a run that lost a process.
  """
  report: dict[str, Any] = {
    "index": index,
    "count": count,
    "name": f"process id {os.getpid()} on {socket.gethostname()}",
  }
  progress = _Progress(f"process {index} of {count}, coordinator {address}", timeout_s)
  while True:
    # Another process 0 on this machine may already listen, or an earlier run, which ends soon.
    if index == 0 and (listener := _listen(address, count)):
      return Presence(index, report["name"], call_roll(listener, report, progress.update))
    if connection := report_to_process_0(address, report, progress.update):
      return Presence(index, report["name"], {connection: f"process 0 at {address}"})
    time.sleep(_RETRY_S)


class _Progress:
  """Prints from time to time what a process waits for, and ends the process when the time is over."""

  def __init__(self, process: str, timeout_s: float):
    self._process, self._timeout_s = process, timeout_s
    self._started = self._reported = time.monotonic()

  def update(self, status: str) -> None:
    now = time.monotonic()
    if now - self._started >= self._timeout_s:
      print(
        f"error: {self._process} gave up after {self._timeout_s:.0f} s while {status}. Check that "
        "all processes run, that each has its own --process_index, and that they can reach process "
        "0. --initialization_timeout sets how long to wait.",
        file=sys.stderr,
        flush=True,
      )
      raise SystemExit(EXIT_STATUS)
    if now - self._reported >= REPORT_INTERVAL_S:
      self._reported = now
      seconds = f"{now - self._started:.0f} of at most {self._timeout_s:.0f} s"
      print(f"{self._process}: {status}, {seconds}", file=sys.stderr, flush=True)


def report_to_process_0(
  address: str, report: Mapping[str, Any], update: Callable[[str], None]
) -> socket.socket | None:
  """Returns a connection to process 0 once all processes are present; None if it does not listen.

  Args:
    address: HOST:PORT of process 0.
    report: the index and name of this process, and the process count that it was given.
    update: is called about once a second with what this process waits for.

  Raises:
    ValueError: process 0 has refused the run.
  """
  host, _, port = address.rpartition(":")
  try:
    connection = socket.create_connection((host.strip("[]"), int(port)), _SOCKET_TIMEOUT_S)
    connection.sendall(_PREFIX + json.dumps(report).encode() + b"\n")
    while not select.select([connection], [], [], 1.0)[0]:
      update("waiting for the other processes; process 0 is reachable")
  except OSError:
    update("waiting for process 0; nothing is reachable at its address")
    return None
  reply = read_line(connection)
  if reply == _PREFIX + b"\n":
    return connection
  connection.close()
  if reply.startswith(_PREFIX):
    raise ValueError(reply.removeprefix(_PREFIX).decode().strip())
  update("waiting for process 0; a run that has started, or another program, uses its address")
  return None


def call_roll(
  listener: socket.socket, report: Mapping[str, Any], update: Callable[[str], None]
) -> dict[socket.socket, str]:
  """Returns process 0's connections to the others, with their names, once all are present.

  Args:
    listener: the socket to which the others connect. It is closed.
    report: the index, name and process count of process 0.
    update: is called about once a second with what process 0 waits for.

  Raises:
    ValueError: two processes have the same index or were given different counts.
  """
  reports: dict[socket.socket, dict[str, Any]] = {}
  with listener:
    listener.settimeout(1.0)
    while len(reports) < report["count"] - 1:
      present = {each["index"] for each in reports.values()}
      missing = [str(index) for index in range(1, report["count"]) if index not in present]
      update(f"waiting for process {', '.join(missing[:_MAX_SHOWN])}")
      with contextlib.suppress(OSError):  # Nobody has connected, or has already ended.
        connection, _ = listener.accept()
        connection.settimeout(_SOCKET_TIMEOUT_S)
        line = read_line(connection)
        if line.startswith(_PREFIX):  # It is not a different program.
          reports[connection] = json.loads(line.removeprefix(_PREFIX))
        else:
          connection.close()
      for connection in [each for each in reports if not is_open(each)]:
        del reports[connection]
        connection.close()
  # The listener is closed now, so jax's service can use the address.
  refusal = _refusal([report, *reports.values()])
  for connection in reports:
    with contextlib.suppress(OSError):  # The process may have ended.
      connection.sendall(_PREFIX + refusal.encode() + b"\n")
    if refusal:
      connection.close()
  if refusal:
    raise ValueError(refusal)
  return {each: f"process {sent['index']}, {sent['name']}," for each, sent in reports.items()}


def _refusal(reports: Sequence[Mapping[str, Any]]) -> str:
  """Returns why these processes, of which process 0 is the first, cannot be one run; "" if they can."""
  names: dict[int, str] = {}
  expected = reports[0]["count"]
  for report in reports:
    index, count, name = report["index"], report["count"], report["name"]
    if count != expected:
      return (
        f"process {index}, {name}, has --process_count={count}, but process 0 has --process_count="
        f"{expected}: give all processes the same count"
      )
    if index in names:
      return (
        f"--process_index={index} is given to two processes, {names[index]} and {name}: each of the "
        f"{expected} processes needs its own index, from 0 to {expected - 1}"
      )
    names[index] = name
  return ""


def _listen(address: str, count: int) -> socket.socket | None:
  """Returns a socket that listens at the address's port; None if the port is in use."""
  # jax, too, listens on all interfaces unless this variable is set.
  bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", f"[::]:{address.rpartition(':')[2]}")
  host, _, port = bind.rpartition(":")
  host = host.strip("[]")
  is_dual = ":" in host and socket.has_dualstack_ipv6()
  try:
    return socket.create_server(
      (host if is_dual else host.replace("::", ""), int(port)),
      family=socket.AF_INET6 if is_dual else socket.AF_INET,
      backlog=max(count, 128),
      dualstack_ipv6=is_dual,
    )
  except OSError:
    return None


class Presence:
  """The connections of a process to the others: process 0 is connected to all, which are connected to it."""

  def __init__(self, index: int, name: str, peers: Mapping[socket.socket, str]) -> None:
    """Watches the connections from now on.

    Args:
      index: the index of this process.
      name: its host and process id, for messages.
      peers: the name of the process at the other end of each connection.
    """
    self._index, self._name, self._peers = index, f"process {index}, {name},", dict(peers)
    self._stderr = os.dup(2)  # While TensorFlow is imported, 2 is a buffer.
    self._is_ending = threading.Lock()
    for connection in peers:
      connection.settimeout(_SOCKET_TIMEOUT_S)
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
    poll = select.poll()  # Unlike select.select, it has no limit on the number of connections.
    by_number = {connection.fileno(): connection for connection in self._peers}
    for connection in self._peers:
      poll.register(connection, select.POLLIN)
    while by_number:
      for number, _ in poll.poll():
        peer = self._peers[by_number[number]]
        text = read_line(by_number[number])
        if text == _LEAVES:
          poll.unregister(number)
          del by_number[number]
        elif text:
          self._end_because_of_another(text.decode(errors="replace").strip("\n"), _GRACE_S)
        else:
          self._end_because_of_another(
            f"{peer} has died without a message: it was killed, for example because memory ran out, or "
            "its machine failed. Its log, or the kernel's log on its machine, may contain the reason. All "
            "saved checkpoints are complete: the same command on all processes resumes the run.",
            0.0,
          )

  def _end_because_of_another(self, text: str, grace_s: float) -> None:
    if self._index == 0:
      self._send(f"{text}\n".encode())
    time.sleep(grace_s)
    if self._is_ending.acquire(timeout=_LAST_S):  # Otherwise the main thread ends this process.
      reason = text.replace("\r", "\n")
      os.write(self._stderr, f"\nerror: this run ends because {reason}\n".encode())
      self._end(text, EXIT_STATUS)

  def _end(self, text: str, status: int) -> NoReturn:
    """Sends the reason to the connected processes and ends this one; process 0 first waits for the others."""
    self._send("\r".join(text[:_MAX_CHARACTERS].splitlines()).encode() + b"\n")
    user_errors.finish_output()
    if self._index == 0:
      deadline, waiting = time.monotonic() + _LAST_S, [*self._peers]
      while waiting and time.monotonic() < deadline:
        time.sleep(0.1)
        waiting = [connection for connection in waiting if is_open(connection, flags=0)]
    os._exit(status)

  def _send(self, line: bytes) -> None:
    for connection in self._peers:
      with contextlib.suppress(OSError):  # The other process has ended.
        connection.sendall(line)


def is_failed_collective(error: BaseException) -> bool:
  """Returns whether an error, or one of its causes, comes from a collective.

  jax raises such an error as its own type, or as a ValueError where an array is copied to the host.
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


def read_line(connection: socket.socket) -> bytes:
  """Returns the next line; b"" if the other process has ended."""
  try:
    line = bytearray()
    while not line.endswith(b"\n") and (byte := connection.recv(1)):
      line += byte
    return bytes(line) if line.endswith(b"\n") else b""
  except OSError:
    return b""


def is_open(connection: socket.socket, flags: int = socket.MSG_PEEK) -> bool:
  """Returns whether the process at the other end has not ended; without flags, discards what it sent."""
  try:
    connection.settimeout(0.0)
    return connection.recv(_MAX_CHARACTERS, flags) != b""
  except BlockingIOError:
    return True
  except OSError:
    return False
