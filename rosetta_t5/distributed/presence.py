"""Ends all processes of a run when one of them fails or dies, and names that process.

The connections over which the processes have joined stay open. A process that fails sends its error over
them, and the operating system closes those of a process that dies. Process 0 passes both on.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import NoReturn

import jax

from rosetta_t5 import user_errors

EXIT_STATUS = 70
# How long a process whose collective failed waits for the news of which process was lost.
_LOSS_S = 10.0
# Processes that fail for the same reason have this time to print their own errors.
_GRACE_S = 3.0
# How long process 0, whose end would abort the others, waits for them to end.
_LAST_S = 15.0
_MAX_CHARACTERS = 4000
_LEAVES = b"\n"


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
      _keep_alive(connection)
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


def _keep_alive(connection: socket.socket) -> None:
  """Lets the operating system notice within 90 s that the other machine has failed."""
  connection.settimeout(5.0)
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
    if hasattr(socket, name):  # It is not on every operating system.
      connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


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
