"""Finds out from a launcher's environment variables which process of a run this one is.

jax detects Slurm and Open MPI itself, but its port depends on the job alone, so two job steps that
run at once would share it; and it does not know PBS or other implementations of mpiexec.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping

_LOOPBACK = re.compile(r"(localhost(\..*)?|127(\.\d+){3}|::1|0\.0\.0\.0)")
_FIRST_PORT, _PORT_COUNT = 12345, 20000

# (launcher, rank, number of processes, rank on the node, number of processes on the node).
_MPI_VARIABLES = (
  (
    "Open MPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
  ),
  # Cray PALS.
  ("mpiexec", "PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
  # MPICH, Intel MPI and the mpiexec of PBS.
  ("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
  ("mpiexec", "PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "MPI_LOCALNRANKS"),
)


@dataclasses.dataclass(frozen=True)
class LaunchInfo:
  """What a launcher's environment specifies about this process; None for what it does not specify.

  Attributes:
    launcher: the launcher's name, for messages.
    coordinator: HOST:PORT of process 0.
    count: the number of processes.
    index: the index of this process, from 0.
    local_index: its index among the processes on its node.
    nodes: the number of nodes.
  """

  launcher: str
  coordinator: str | None = None
  count: int | None = None
  index: int | None = None
  local_index: int | None = None
  nodes: int | None = None


def find_launch_info(environ: Mapping[str, str] = os.environ) -> LaunchInfo | None:
  """Returns what the launcher specifies, or None if no known launcher started this process."""
  found = (find(environ) for find in (_find_pbs, _find_slurm, _find_mpi, _find_kubernetes))
  return next((info for info in found if info is not None), None)


def check_coordinator_address(address: str, info: LaunchInfo | None) -> None:
  """Raises ValueError if a run on several nodes has a loopback address as its coordinator."""
  host = address.rpartition(":")[0].strip("[]")
  if info is None or (info.nodes or 1) == 1 or not _LOOPBACK.fullmatch(host):
    return
  raise ValueError(
    f"--coordinator_address={address} is a loopback address, which means a different machine on each "
    f"node, but {info.launcher} started this run on {info.nodes} nodes. Give the host name of "
    "process 0's node, or omit the flag, so that the address is found automatically."
  )


def _find_slurm(environ: Mapping[str, str]) -> LaunchInfo | None:
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


def _find_pbs(environ: Mapping[str, str]) -> LaunchInfo | None:
  """PBS lists the nodes in a file, one line for each slot; its mpiexec numbers the processes."""
  mpi, node_file = _find_mpi(environ), environ.get("PBS_NODEFILE")
  if mpi is None or not node_file:
    return None
  slots = pathlib.Path(node_file).read_text().split()
  return dataclasses.replace(
    mpi,
    launcher=f"PBS ({mpi.launcher})",
    coordinator=_address(slots[0], environ.get("PBS_JOBID", "0")) if slots else None,
    count=mpi.count or len(slots) or None,
    nodes=len(set(slots)) or None,
  )


def _find_mpi(environ: Mapping[str, str]) -> LaunchInfo | None:
  for launcher, rank, size, local_rank, local_size in _MPI_VARIABLES:
    if rank in environ:
      count, on_node = _number(environ, size), _number(environ, local_size)
      return LaunchInfo(
        launcher,
        coordinator=_open_mpi_address(environ),
        count=count,
        index=_number(environ, rank),
        local_index=_number(environ, local_rank),
        nodes=-(-count // on_node) if count and on_node else None,
      )
  return None


def _open_mpi_address(environ: Mapping[str, str]) -> str | None:
  """Open MPI publishes the address of mpirun; process 0 runs on the same host by default."""
  uri = re.match(r"(\d+).*?tcp4?://([\d.]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
  return _address(uri[2], uri[1]) if uri else None


def _find_kubernetes(environ: Mapping[str, str]) -> LaunchInfo | None:
  """An Indexed Job numbers its pods, but does not specify their count or process 0's address."""
  if "KUBERNETES_SERVICE_HOST" not in environ or "JOB_COMPLETION_INDEX" not in environ:
    return None
  return LaunchInfo("Kubernetes", index=_number(environ, "JOB_COMPLETION_INDEX"))


def _address(host: str | None, job: str, step: str | None = None) -> str | None:
  """Returns HOST:PORT with a port that no other job or job step on that host uses."""
  if not host:
    return None
  number = int((re.match(r"\d+", job) or ["0"])[0]) * 16 + int(step or 0) % 16
  return f"{host}:{_FIRST_PORT + number % _PORT_COUNT}"


def _first_host(nodes: str) -> str | None:
  """Returns the first host of a Slurm host list such as gpu[017-024,030],login1."""
  match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
  return "".join(part or "" for part in match.groups()) if match else None


def _number(environ: Mapping[str, str], *names: str) -> int | None:
  """Returns the value of the first variable that is set, if it is a number."""
  text = next((environ[name] for name in names if environ.get(name)), "")
  return int(text) if text.isdigit() else None
