"""Which of a run's processes this one is, as the launcher's environment says: Slurm, PBS, MPI, Kubernetes."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping

_LOOPBACK = re.compile(r"(localhost(\..*)?|127(\.\d+){3}|::1|0\.0\.0\.0)")
_FIRST_PORT, _PORTS = 12345, 20000

# How mpiexecs number processes: (index, count, index on its node). Open MPI; Cray's PALS; MPICH,
# Intel MPI and PBS's own mpiexec.
_MPI = (
  ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
  ("PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID"),
  ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
  ("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK"),
)


@dataclasses.dataclass(frozen=True)
class LaunchInfo:
  """A process among those of its run; None is what the environment does not say.

  Attributes:
    launcher: who started it, for people.
    coordinator: HOST:PORT of process 0.
    count: how many processes there are.
    index: which of them this is.
    local_index: which of those on its node.
    nodes: how many nodes they are on.
  """

  launcher: str
  coordinator: str | None = None
  count: int | None = None
  index: int | None = None
  local_index: int | None = None
  nodes: int | None = None


def find_launch_info(environ: Mapping[str, str] = os.environ) -> LaunchInfo | None:
  """Returns this process's place, or None if nothing known has started it."""
  for find in (_pbs, _slurm, _mpi, _kubernetes):
    if (place := find(environ)) is not None:
      return place
  return None


def check_coordinator(address: str, place: LaunchInfo | None) -> None:
  """Raises ValueError if process 0's address is this very machine's, and there are several machines."""
  host = address.rpartition(":")[0].strip("[]")
  if place is None or (place.nodes or 1) == 1 or not _LOOPBACK.fullmatch(host):
    return
  raise ValueError(
    f"--coordinator_address={address} means, on each node, that node itself, but {place.launcher} "
    f"has started this run on {place.nodes} nodes: give the name of process 0's node, or leave the "
    "address out, and it is found"
  )


def _slurm(environ: Mapping[str, str]) -> LaunchInfo | None:
  if "SLURM_PROCID" not in environ or "SLURM_JOB_ID" not in environ:
    return None
  nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
  return LaunchInfo(
    "Slurm",
    coordinator=_address(_first_host(nodes), environ["SLURM_JOB_ID"], environ.get("SLURM_STEP_ID")),
    count=_number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    index=_number(environ, "SLURM_PROCID"),
    local_index=_number(environ, "SLURM_LOCALID"),
    nodes=_number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
  )


def _pbs(environ: Mapping[str, str]) -> LaunchInfo | None:
  """PBS lists a job's nodes in a file, once for each slot; its mpiexec numbers the processes."""
  mpi = _mpi(environ)
  if mpi is None or not environ.get("PBS_NODEFILE"):
    return None
  try:
    slots = pathlib.Path(environ["PBS_NODEFILE"]).read_text().split()
  except OSError as error:
    raise ValueError(
      f"PBS_NODEFILE={environ['PBS_NODEFILE']} cannot be read ({error.strerror}): it lists the nodes "
      "of the job. Pass it on to the processes, or give --coordinator_address"
    ) from None
  coordinator = _address(slots[0], environ.get("PBS_JOBID", "0")) if slots else None
  return dataclasses.replace(
    mpi,
    launcher=f"PBS ({mpi.launcher})",
    coordinator=coordinator,
    count=mpi.count or len(slots) or None,
    nodes=len(set(slots)) or None,
  )


def _mpi(environ: Mapping[str, str]) -> LaunchInfo | None:
  for index, count, local in _MPI:
    if index in environ:
      size = _number(environ, count)
      here = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", "PALS_LOCAL_SIZE", "MPI_LOCALNRANKS")
      nodes = -(-size // here) if size and here else None
      return LaunchInfo(
        "Open MPI" if index.startswith("OMPI") else "mpiexec",
        coordinator=_of_open_mpi(environ),
        count=size,
        index=_number(environ, index),
        local_index=_number(environ, local),
        nodes=nodes,
      )
  return None


def _of_open_mpi(environ: Mapping[str, str]) -> str | None:
  """Open MPI tells where mpirun runs, which is where process 0 is unless it is told otherwise."""
  found = re.search(r"tcp4?://([\d.]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
  job = re.match(r"(\d+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
  return _address(found[1], job[1] if job else "0") if found else None


def _kubernetes(environ: Mapping[str, str]) -> LaunchInfo | None:
  """An Indexed Job numbers its pods; where process 0 is and how many there are, its author knows."""
  if "KUBERNETES_SERVICE_HOST" not in environ or "JOB_COMPLETION_INDEX" not in environ:
    return None
  return LaunchInfo("Kubernetes", index=_number(environ, "JOB_COMPLETION_INDEX"))


def _address(host: str | None, job: str, step: str | None = None) -> str | None:
  """Process 0's address: a port that no other job on its node has."""
  if not host:
    return None
  number = int((re.match(r"\d+", job) or ["0"])[0]) * 16 + int(step or 0) % 16
  return f"{host}:{_FIRST_PORT + number % _PORTS}"


def _first_host(nodes: str) -> str | None:
  """Returns the first of hosts as Slurm writes them: gpu[017-024,030],login1."""
  match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
  return "".join(part or "" for part in match.groups()) if match else None


def _number(environ: Mapping[str, str], *names: str) -> int | None:
  found = next((environ[name] for name in names if environ.get(name)), "")
  return int(found) if found.isdigit() else None
