"""Waits until all processes of a run are present, before jax connects them.

Process 0 takes a roll call at the coordinator address: every process reports its index and process
count there. jax has no such check. It aborts a process, even hours into a run, when another one
connects with the same index.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rosetta_t5.distributed.presence import EXIT_STATUS, Presence, is_open, read_line

# Seconds between two lines about the processes that are still missing.
REPORT_INTERVAL_S = 30.0
# Seconds that an earlier run at the same address has to end: jax needs up to 100 to notice a lost process.
FOREIGN_SERVER_GRACE_S = 120.0
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S, _RETRY_S = 5.0, 2.0, 0.2
_MAX_MESSAGE_BYTES, _MAX_SHOWN = 1000, 20
_PREFIX = b"rosetta-t5 "


def wait_for_processes(address: str, index: int, count: int, timeout_s: float) -> Presence:
  """Returns the connections of the run's processes once all are present. The address is then free for jax.

  Args:
    address: HOST:PORT of process 0.

  Raises:
    ValueError: two processes have the same index or were given different counts (every process
      raises it), or a different program uses the address.
    SystemExit: the time is over; the exit status is that of a run that lost a process.
  """
  name = f"process id {os.getpid()} on {socket.gethostname()}"
  progress = _Progress(address, index, count, timeout_s)
  roll_call: RollCall | None = None
  foreign_since: float | None = None
  while True:
    if index == 0 and roll_call is None and (listener := _listen(address, count)) is not None:
      roll_call = RollCall(listener, count)
      progress.missing = roll_call.missing
      threading.Thread(target=roll_call.run, name="roll call", daemon=True).start()
    reply, connection = report_presence(
      address, index, count, name, lambda: progress.update(is_connected=True)
    )
    if connection is not None and reply.startswith(_PREFIX):
      if refusal := reply.removeprefix(_PREFIX).decode().strip():
        raise ValueError(refusal)
      if roll_call is None:
        return Presence(index, name, {connection: f"process 0 at {address}"})
      connection.close()
      return Presence(index, name, roll_call.peers())
    if connection is not None:
      connection.close()
    foreign_since = (foreign_since or time.monotonic()) if reply else None
    if foreign_since is not None and time.monotonic() - foreign_since > FOREIGN_SERVER_GRACE_S:
      raise ValueError(
        f"{address} is used by a run that has already started or by another program, not by process "
        f"0 of this run. Check that --process_index={index} is given to only one process. Otherwise "
        "end that program, or choose another port in --coordinator_address."
      )
    progress.update(is_connected=False)
    time.sleep(_RETRY_S)


def report_presence(
  address: str, index: int, count: int, name: str, while_waiting: Callable[[], None] = lambda: None
) -> tuple[bytes, socket.socket | None]:
  """Reports this process at the address; returns the reply, and the connection if something listens there.

  The reply comes when all processes are present or the run is refused. `while_waiting` is called
  about once a second until then.
  """
  host, _, port = address.rpartition(":")
  report = json.dumps({"index": index, "count": count, "name": name})
  try:
    connection = socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S)
    connection.sendall(_PREFIX + report.encode() + b"\n")
    while not select.select([connection], [], [], 1.0)[0]:
      while_waiting()
    # A different program may not end its reply with a newline.
    reply = connection.recv(1)
    return reply + read_line(connection) if reply == _PREFIX[:1] else reply, connection
  except OSError:
    return b"", None


class RollCall:
  """Collects the reports of all processes, at process 0, and replies to them when all are present."""

  def __init__(self, listener: socket.socket, count: int):
    """Starts without any process.

    Args:
      listener: the socket to which the processes connect.
      count: the number of processes.
    """
    self._listener, self._count = listener, count
    self._reports: list[tuple[dict[str, Any], socket.socket]] = []

  def peers(self) -> dict[socket.socket, str]:
    """Returns the connections to the processes other than process 0, with their names."""
    return {
      connection: f"process {report['index']}, {report['name']},"
      for report, connection in self._reports
      if report["index"] != 0
    }

  def missing(self) -> list[int]:
    """Returns the indices of the processes that have not joined, or have left again."""
    # A copy, because process 0 calls this while the thread of the roll call adds processes.
    present = {report["index"] for report, connection in [*self._reports] if is_open(connection)}
    return [index for index in range(self._count) if index not in present]

  def run(self) -> None:
    """Replies to all processes: with no text, or with the reason why the run is refused."""
    with self._listener:
      while len(self._reports) < self._count:
        self._accept()
        for entry in [*self._reports]:
          if not is_open(entry[1]):
            entry[1].close()
            self._reports.remove(entry)
    # The listener is closed now, so jax's service can use the address.
    refusal = self._refusal()
    for report, connection in self._reports:
      with contextlib.suppress(OSError):  # The process may have ended.
        connection.sendall(_PREFIX + refusal.encode() + b"\n")
      if refusal or report["index"] == 0:
        connection.close()

  def _accept(self) -> None:
    connection, _ = self._listener.accept()
    try:
      connection.settimeout(_READ_TIMEOUT_S)
      with connection.makefile("rb") as stream:
        line = stream.readline(_MAX_MESSAGE_BYTES)
      report = json.loads(line.removeprefix(_PREFIX)) if line.startswith(_PREFIX) else {}
      self._reports.append(({key: report[key] for key in ("index", "count", "name")}, connection))
    except (OSError, ValueError, KeyError, TypeError):
      connection.close()  # It is a different program, or the process has already ended.

  def _refusal(self) -> str:
    """Returns why these processes cannot be one run; "" if they can."""
    names: dict[int, str] = {}
    for report, _ in self._reports:
      index, count, name = report["index"], report["count"], report["name"]
      if count != self._count:
        return (
          f"process {index}, {name}, has --process_count={count}, but process 0 has --process_count="
          f"{self._count}: give all processes the same count"
        )
      if index in names:
        return (
          f"--process_index={index} is given to two processes, {names[index]} and {name}: each of the "
          f"{self._count} processes needs its own index, from 0 to {self._count - 1}"
        )
      names[index] = name
    return ""


class _Progress:
  """Prints from time to time which processes are missing, and ends the process when the time is over."""

  def __init__(self, address: str, index: int, count: int, timeout_s: float):
    self._address, self._index, self._timeout_s = address, index, timeout_s
    self._process = f"process {index} of {count}"
    self._started = self._reported = time.monotonic()
    self.missing: Callable[[], Sequence[int]] = list

  def update(self, is_connected: bool) -> None:
    now, status = time.monotonic(), self._status(is_connected)
    if now - self._started >= self._timeout_s:
      print(
        f"error: {self._process} gave up after {self._timeout_s:.0f} s while {status}. Check that "
        "all processes run, that each has its own --process_index, and that they can reach that "
        "address. --initialization_timeout sets how long to wait.",
        file=sys.stderr,
        flush=True,
      )
      raise SystemExit(EXIT_STATUS)
    if now - self._reported >= REPORT_INTERVAL_S:
      self._reported = now
      seconds = f"{now - self._started:.0f} of at most {self._timeout_s:.0f} s"
      print(f"{self._process}: {status}, {seconds}", file=sys.stderr, flush=True)

  def _status(self, is_connected: bool) -> str:
    if self._index == 0:
      missing = ", ".join(map(str, self.missing()[:_MAX_SHOWN]))
      return f"waiting at {self._address} for {f'process {missing}' if missing else 'the others'}"
    if is_connected:
      return f"waiting for the other processes; process 0 is reachable at {self._address}"
    return f"waiting for process 0; nothing is reachable at {self._address}"


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
