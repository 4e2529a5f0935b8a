"""Connects this process to the other processes of its run, which a launcher's environment describes.

jax detects Slurm and Open MPI itself, but its port depends on the job alone, so two job steps that
run at once would share it; and it does not know PBS or other implementations of mpiexec.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from rosetta_t5.distributed.coordination import run_preflight
from rosetta_t5.distributed.presence import wait_for_processes

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


# When a process freezes, the others end after this time. A job that is suspended for a minute continues.
_HEARTBEAT_TIMEOUT_S = 100


def join_processes(
  multiprocess_gpu: bool,
  coordinator_address: str | None = None,
  process_count: int | None = None,
  process_index: int | None = None,
  initialization_timeout: int = 1800,
  settings: Callable[[], Mapping[str, str]] = dict,
) -> None:
  """Connects to the other processes of the run, if there are any, and compares their settings.

  From then on, an error that ends one process, or its death, ends the others too.

  Call it before any device is used. Arguments that are not given are taken from the environment
  variables of Slurm, PBS, Open MPI and other mpiexecs, or Kubernetes.

  Args:
    multiprocess_gpu: whether the run has several processes.
    coordinator_address: HOST:PORT of process 0.
    process_count: the number of processes.
    process_index: the index of this process, from 0.
    initialization_timeout: seconds to wait for all processes.
    settings: returns the configuration of the run, by name, which must be the same in all processes. It
      is called when the processes have met, so that an error in it ends all of them.

  Raises:
    ValueError: an argument is missing or contradicts another one, or the processes have different
      settings, versions or devices.
    SystemExit: the processes do not all arrive in time.
  """
  flags: dict[str, Any] = {
    "--coordinator_address": coordinator_address,
    "--process_count": process_count,
    "--process_index": process_index,
  }
  if not multiprocess_gpu:
    if given := [name for name, value in flags.items() if value is not None]:
      raise ValueError(
        f"{', '.join(given)} has no effect without --multiprocess_gpu. Add that flag, or omit these."
      )
    return
  info = find_launch_info()
  if info is not None:
    found = (info.coordinator, info.count, info.index)
    flags = {
      name: default if value in (None, "") else value
      for (name, value), default in zip(flags.items(), found, strict=True)
    }
  if missing := [name for name, value in flags.items() if value in (None, "")]:
    raise ValueError(_missing_text(missing, info))
  address, count, index = flags.values()
  if count < 1:
    raise ValueError(f"--process_count must be at least 1, got {count}.")
  if not 0 <= index < count:
    raise ValueError(
      f"--process_index must be from 0 to {count - 1}, because --process_count={count}, got {index}."
    )
  check_coordinator_address(address, info)
  wait_for_processes(address, index, count, initialization_timeout)
  own_settings = settings()
  jax.distributed.initialize(
    address,
    count,
    index,
    local_device_ids=_local_device_ids(info),
    heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S,
  )
  run_preflight(own_settings, initialization_timeout)


def _missing_text(missing: list[str], info: LaunchInfo | None) -> str:
  if info is None:
    return (
      f"{', '.join(missing)} is missing, and no known launcher started this process (Slurm, PBS, "
      "Open MPI, mpiexec or Kubernetes). Give --coordinator_address, --process_count and "
      "--process_index, or omit --multiprocess_gpu to run a single process."
    )
  return (
    f"{', '.join(missing)} is missing: the environment variables of {info.launcher} do not specify "
    "it. Give the flag."
  )


def _local_device_ids(info: LaunchInfo | None) -> list[int] | None:
  """Returns the device of this process on its node; None lets jax choose."""
  if info is None or info.local_index is None or info.launcher in ("Slurm", "Open MPI"):
    return None
  visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
  return None if visible and "," not in visible else [info.local_index]
