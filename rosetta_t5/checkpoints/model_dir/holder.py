"""Who holds a MODEL_DIR: a process on a machine, perhaps of a Slurm job, and whether it still runs."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import socket
import time

_PROC = pathlib.Path("/proc")


@dataclasses.dataclass(frozen=True)
class Holder:
  """A process that trains in a MODEL_DIR.

  Attributes:
    host: its machine's name, for people.
    machine: tells machines apart, and containers of one machine that see other processes.
    pid: its number there.
    born: when the machine started it, in ticks; numbers of processes are used again, this is not.
    since: when it took the folder.
    job: its Slurm job, "" for none. A job keeps its number when it is requeued.
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
    """Says who it is in a sentence."""
    job = f", Slurm job {self.job}" if self.job else ""
    return f"process {self.pid} on {self.host}{job}, since {self.since}"

  @classmethod
  def read(cls, text: str) -> Holder | None:
    """Returns the holder that a lock file names; None where it is not (yet) complete."""
    try:
      fields = json.loads(text)
      return cls(**{field.name: fields[field.name] for field in dataclasses.fields(cls)})
    except (ValueError, KeyError, TypeError):
      return None

  def text(self, beat: int) -> str:
    """Returns what the lock file says: this holder, and a number that changes while it lives."""
    return json.dumps(dataclasses.asdict(self) | {"beat": beat}, indent=1)


def this_process() -> Holder:
  """Returns the process that asks."""
  return Holder(
    host=socket.gethostname(),
    machine=_machine(),
    pid=os.getpid(),
    born=_born(os.getpid()) or "",
    since=time.strftime("%Y-%m-%d %H:%M:%S %z"),
    job=os.environ.get("SLURM_JOB_ID", ""),
    restart=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
  )


def is_running(holder: Holder) -> bool:
  """Returns whether a process of this machine still runs."""
  if (_PROC / "self").exists():
    return _born(holder.pid) == holder.born
  try:
    os.kill(holder.pid, 0)
  except ProcessLookupError:
    return False
  except PermissionError:
    pass
  return True


def _machine() -> str:
  try:
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
  except OSError:  # no Linux
    return socket.gethostname()


def _born(pid: int) -> str | None:
  """Returns when a process was started; None if it has ended, be it that no one has asked how."""
  try:
    stat = (_PROC / str(pid) / "stat").read_text()
  except OSError:
    return None
  # After the program's name, which is in brackets and may have spaces: state, ..., start time.
  fields = stat.rpartition(")")[2].split()
  return None if fields[0] in "ZX" else fields[19]
