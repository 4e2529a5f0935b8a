"""The process that owns a MODEL_DIR's lock, and whether it is still running."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import socket
import time

_PROC = pathlib.Path("/proc")


@dataclasses.dataclass(frozen=True)
class LockOwner:
  """A process that trains in a MODEL_DIR.

  Attributes:
    host: the name of its machine, for messages.
    machine: identifies the machine and, for a container, the process namespace.
    pid: its process id on that machine.
    born: when the process started, in clock ticks. It distinguishes processes that reuse a pid.
    since: when it locked the folder.
    job: its Slurm job id; "" if it has none. A requeued job keeps its id.
    restart: how often the job was requeued before.
  """

  host: str
  machine: str
  pid: int
  born: str
  since: str
  job: str = ""
  restart: int = 0

  def __str__(self) -> str:
    """Describes the process for messages."""
    job = f", Slurm job {self.job}" if self.job else ""
    return f"process {self.pid} on {self.host}{job}, since {self.since}"

  @classmethod
  def from_json(cls, text: str) -> LockOwner | None:
    """Returns the owner stored in a lock file; None if the file is incomplete."""
    try:
      fields = json.loads(text)
      return cls(**{field.name: fields[field.name] for field in dataclasses.fields(cls)})
    except (ValueError, KeyError, TypeError):
      return None

  def to_json(self, beat: int) -> str:
    """Returns the content of the lock file: this owner and its heartbeat counter."""
    return json.dumps(dataclasses.asdict(self) | {"beat": beat}, indent=1)


def current_process() -> LockOwner:
  """Returns the calling process."""
  return LockOwner(
    host=socket.gethostname(),
    machine=_machine_id(),
    pid=os.getpid(),
    born=_start_time(os.getpid()) or "",
    since=time.strftime("%Y-%m-%d %H:%M:%S %z"),
    job=os.environ.get("SLURM_JOB_ID", ""),
    restart=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
  )


def is_running(owner: LockOwner) -> bool:
  """Returns whether a process of this machine is still running."""
  if (_PROC / "self").exists():
    return _start_time(owner.pid) == owner.born
  try:
    os.kill(owner.pid, 0)
  except ProcessLookupError:
    return False
  except PermissionError:
    pass
  return True


def _machine_id() -> str:
  try:
    boot_id = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {os.readlink(_PROC / 'self/ns/pid')}"
  except OSError:  # not Linux
    return socket.gethostname()


def _start_time(pid: int) -> str | None:
  """Returns when a process started; None if it has ended, even if it is still a zombie."""
  try:
    stat = (_PROC / str(pid) / "stat").read_text()
  except OSError:
    return None
  # The program's name is in parentheses and may contain spaces. After it come the state and, as the
  # 20th field, the start time.
  fields = stat.rpartition(")")[2].split()
  return None if fields[0] in "ZX" else fields[19]
