"""Processes tell process 0 who they are before jax lets them meet.

jax ends, by a crash, the process whose index another one comes with, even hours into a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Sequence

from rosetta_t5.distributed.waiting import Waiting

_OURS = b"rosetta-t5 "
_HEARD_S, _CONNECTED_S, _AGAIN_S = 2.0, 5.0, 0.2
_LONGEST = 1000
# How long process 0 tells those that come late why nothing will come of it.
_LATE_S = 10.0
# How long an older run at the address may take to end: more than jax takes to see that a process is gone.
_GRACE_S = 60.0


def answer_roll_call(address: str, index: int, count: int, waiting: Waiting) -> None:
  """Waits until every process of the run has said who it is; process 0 calls the roll.

  Args:
    address: HOST:PORT of process 0; free again afterwards, for jax.
    index: this process.
    count: how many there are.
    waiting: learns of whom none is here.

  Raises:
    ValueError: two have one index, or they were told other counts (every process raises it); or
      something else is at the address.
  """
  who = f"process id {os.getpid()} on {socket.gethostname()}"
  roll: Roll | None = None
  strange_since: float | None = None
  while True:
    if index == 0 and roll is None and (listener := _listener(address, count)) is not None:
      roll = Roll(listener, count, who)
      waiting.missing = roll.missing
      threading.Thread(target=roll.call, name="roll call", daemon=True).start()
    answer = answer_to(address, index, count, who)
    if answer is not None and answer.startswith(_OURS):
      if refusal := answer.removeprefix(_OURS).decode().strip():
        raise ValueError(refusal)
      return
    strange_since = (strange_since or time.monotonic()) if answer else None
    if strange_since is not None and time.monotonic() - strange_since > _GRACE_S:
      raise ValueError(_strange_text(address, index))
    time.sleep(_AGAIN_S)


def answer_to(address: str, index: int, count: int, who: str) -> bytes | None:
  """Returns what comes back from the address for saying who this is; None if nothing answers."""
  host, _, port = address.rpartition(":")
  said = _OURS + json.dumps({"index": index, "count": count, "who": who}).encode() + b"\n"
  try:
    with socket.create_connection(
      (host.strip("[]"), int(port)), timeout=_CONNECTED_S
    ) as connection:
      connection.settimeout(None)
      connection.sendall(said)
      with connection.makefile("rb") as lines:
        # Another program need not speak in lines.
        begin = lines.read1(1)
        return begin and begin + (lines.readline() if begin == _OURS[:1] else b"")
  except OSError:
    return None


class Roll:
  """Those that have said who they are, at process 0."""

  def __init__(self, listener: socket.socket, count: int, who: str):
    """Begins with none.

    Args:
      listener: where they come.
      count: how many there are.
      who: process 0.
    """
    self._listener, self._count, self._who = listener, count, who
    self._here: dict[int, tuple[str, socket.socket]] = {}
    self._unanswered: list[tuple[str, socket.socket]] = []

  def missing(self) -> list[int]:
    """Returns the indices of which none is here."""
    here = {index for index, (_, connection) in [*self._here.items()] if _is_open(connection)}
    return [index for index in range(self._count) if index not in here]

  def call(self) -> None:
    """Waits for all, then lets them go on; or tells all why they cannot."""
    refusal = None
    with self._listener:
      while refusal is None and (len(self._here) < self._count or self.missing()):
        refusal = self._hear()
      if refusal is not None:
        self._refuse(refusal)
    # The address is free: jax's service can have it.
    self._answer(refusal or "", self._unanswered)

  def _refuse(self, refusal: str) -> None:
    """Tells those that are here, and for a while those that come; not process 0, which ends then."""
    until = time.monotonic() + _LATE_S
    while True:
      others = [each for each in self._unanswered if each[0] != self._who]
      self._unanswered = [each for each in self._unanswered if each[0] == self._who]
      self._answer(refusal, others)
      if len(self._here) == self._count or time.monotonic() >= until:
        return
      self._listener.settimeout(_AGAIN_S)
      with contextlib.suppress(TimeoutError):
        self._hear()

  def _hear(self) -> str | None:
    """Notes who comes; returns why the run cannot be."""
    connection, _ = self._listener.accept()
    try:
      connection.settimeout(_HEARD_S)
      with connection.makefile("rb") as lines:
        line = lines.readline(_LONGEST)
      connection.setblocking(False)
      caller = json.loads(line.removeprefix(_OURS)) if line.startswith(_OURS) else {}
      index, count, who = (caller[key] for key in ("index", "count", "who"))
    except (OSError, ValueError, KeyError, TypeError):
      connection.close()  # A stranger, or one that is gone.
      return None
    self._unanswered.append((who, connection))
    before = self._here.get(index)
    if before is not None and _is_open(before[1]):
      return (
        f"--process_index={index} is given to two processes, {before[0]} and {who}: each of the "
        f"{self._count} needs its own, from 0 to {self._count - 1}"
      )
    self._here[index] = who, connection
    if count != self._count:
      return (
        f"process {index}, {who}, was told --process_count={count}, but process 0, {self._who}, was "
        f"told {self._count}: give all the same"
      )
    return None

  def _answer(self, refusal: str, callers: Sequence[tuple[str, socket.socket]]) -> None:
    for _, connection in callers:
      with contextlib.suppress(OSError), connection:  # It may be gone.
        connection.sendall(_OURS + refusal.encode() + b"\n")


def _listener(address: str, count: int) -> socket.socket | None:
  """Returns a socket at the address's port; None where it is taken."""
  # As jax does: at all of this machine's names.
  where = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", f"[::]:{address.rpartition(':')[2]}")
  host, _, port = where.rpartition(":")
  host = host.strip("[]")
  is_dual = ":" in host and socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if is_dual else socket.AF_INET
  try:
    return socket.create_server(
      (host if is_dual else host.replace("::", ""), int(port)),
      family=family,
      backlog=max(count, 128),
      dualstack_ipv6=is_dual,
    )
  except OSError:
    return None


def _is_open(connection: socket.socket) -> bool:
  try:
    return connection.recv(1, socket.MSG_PEEK) != b""
  except BlockingIOError:
    return True
  except OSError:
    return False


def _strange_text(address: str, index: int) -> str:
  return (
    f"something else than this run's process 0 answers at {address}: a run that has begun already, or "
    f"another program. Is --process_index={index} given to two processes? Else end what is there, or "
    "give another port in --coordinator_address."
  )
