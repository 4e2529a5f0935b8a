"""Runs a real Slurm with two nodes on this machine."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

NODES = ("node0", "node1")
_DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
_CONF = """\
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until its credentials have expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
KillWait=60
{nodes}
PartitionName=here Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
  """Returns why Slurm cannot run here, or None; installs the packages if that is possible."""
  if os.geteuid() != 0:
    return "starting Slurm requires root"
  if any(shutil.which(name) is None for name in _DAEMONS):
    if shutil.which("apt-get") is None:
      return "Slurm is not installed, and apt-get is not available"
    _install("slurm-wlm", "munge")
  absent = [name for name in _DAEMONS if shutil.which(name) is None]
  return f"not installed, and apt-get could not install: {', '.join(absent)}" if absent else None


def _install(*packages: str) -> None:
  # Without a network, apt-get would otherwise retry for minutes.
  apt = ("apt-get", "-q", "-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=10")
  environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
  for command in ((*apt, "update"), (*apt, "install", "-y", *packages)):
    with contextlib.suppress(subprocess.TimeoutExpired):
      subprocess.run(command, env=environment, capture_output=True, check=False, timeout=180)


class Cluster:
  """A cluster of two nodes, and the commands of a user."""

  def __init__(self, folder: pathlib.Path) -> None:
    self._folder = folder
    self._environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

  def run(self, *command: str, cwd: pathlib.Path | None = None, **variables: str) -> str:
    """Returns the output of a command; `variables` are added to its environment."""
    done = subprocess.run(
      command,
      env=self._environment | variables,
      cwd=cwd,
      capture_output=True,
      text=True,
      check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout

  def submit(
    self,
    script: pathlib.Path,
    *options: str,
    arguments: Sequence[str],
    cwd: pathlib.Path,
    environment: Mapping[str, str],
  ) -> str:
    """Submits a job and returns its number."""
    command = ("sbatch", "--parsable", *options, str(script), *arguments)
    return self.run(*command, cwd=cwd, **environment).strip()

  def state(self, job: str) -> str:
    """Returns PENDING, RUNNING, COMPLETED, FAILED, …"""
    text = self.run("scontrol", "show", "job", job)
    return text.split("JobState=")[1].split()[0]

  def wait(self, job: str, *states: str, seconds: float = 300) -> str:
    """Waits until the job is in one of these states and returns it; fails at the timeout."""
    end = time.monotonic() + seconds
    while (state := self.state(job)) not in states:
      assert time.monotonic() < end, f"job {job} is {state} after {seconds} s\n{self.logs()}"
      time.sleep(0.5)
    return state

  def logs(self) -> str:
    """Returns the last lines of the daemons' logs."""
    return "\n".join(
      f"== {path.name}\n{path.read_text()[-1500:]}" for path in self._folder.glob("*.log")
    )


@contextlib.contextmanager
def cluster(folder: pathlib.Path) -> Iterator[Cluster]:
  """Starts munge, the controller and the nodes, and ends them and their jobs afterwards."""
  _make_names_known()
  (folder / "state").mkdir(parents=True)
  (folder / "munge.key").write_bytes(os.urandom(128))
  (folder / "munge.key").chmod(0o400)
  ports = _free_ports(1 + len(NODES))
  nodes = "\n".join(
    f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=2"
    for name, port in zip(NODES, ports[1:], strict=True)
  )
  (folder / "slurm.conf").write_text(
    _CONF.format(
      host=socket.gethostname(), port=ports[0], folder=folder, nodes=nodes, names=",".join(NODES)
    )
  )
  conf = ("-D", "-f", str(folder / "slurm.conf"))
  here = f"{folder}/munge"
  commands: Sequence[tuple[str, ...]] = (
    (
      *("munged", "--foreground", "--force", f"--socket={here}.socket", f"--key-file={here}.key"),
      *(f"--pid-file={here}.pid", f"--log-file={here}.log", f"--seed-file={here}.seed"),
    ),
    ("slurmctld", *conf),
    *(("slurmd", *conf, "-N", name) for name in NODES),
  )
  with contextlib.ExitStack() as daemons:
    for command in commands:
      log = daemons.enter_context((folder / f"start-{command[-1].strip('/')[-5:]}.log").open("w"))
      daemon = subprocess.Popen(command, stdout=log, stderr=log)
      daemons.callback(_end, daemon)
      if command[0] == "munged":
        _wait_for(folder / "munge.socket")
    yield _ready(Cluster(folder))


def _ready(started: Cluster) -> Cluster:
  end = time.monotonic() + 60
  while started.run("sinfo", "-h", "-o", "%t %D").split() != ["idle", str(len(NODES))]:
    assert time.monotonic() < end, f"no nodes after 60 s\n{started.logs()}"
    time.sleep(0.5)
  return started


def _wait_for(path: pathlib.Path) -> None:
  end = time.monotonic() + 20
  while not path.exists():
    assert time.monotonic() < end, f"{path} does not exist after 20 s"
    time.sleep(0.1)


def _end(daemon: subprocess.Popen[bytes]) -> None:
  daemon.terminate()
  try:
    daemon.wait(10)
  except subprocess.TimeoutExpired:
    daemon.kill()
    daemon.wait()


def _make_names_known() -> None:
  hosts = pathlib.Path("/etc/hosts")
  known = hosts.read_text().split()
  if absent := [name for name in NODES if name not in known]:
    with hosts.open("a") as file:
      file.write(f"127.0.0.1 {' '.join(absent)}\n")


def _free_ports(count: int) -> list[int]:
  with contextlib.ExitStack() as sockets:
    taken = [sockets.enter_context(socket.socket()) for _ in range(count)]
    for each in taken:
      each.bind(("127.0.0.1", 0))
    return [each.getsockname()[1] for each in taken]
