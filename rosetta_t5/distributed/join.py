"""Joins this process to the others of a run."""

from __future__ import annotations

import os

import jax

from rosetta_t5.distributed.launchers import LaunchInfo, check_coordinator, find_launch_info
from rosetta_t5.distributed.preflight import preflight
from rosetta_t5.distributed.roll_call import answer_roll_call
from rosetta_t5.distributed.waiting import Waiting

_HEARTBEAT_TIMEOUT_S = 45
_GRACE_S = 60


def join_processes(
  multiprocess_gpu: bool,
  coordinator_address: str | None = None,
  process_count: int | None = None,
  process_index: int | None = None,
  initialization_timeout: int = 1800,
) -> None:
  """Connects to the other processes, if there are any, and compares them with this one.

  To be called before a device is touched. What is not given is found in the environment of Slurm,
  PBS, Open MPI and other mpiexecs, and Kubernetes.

  Args:
    multiprocess_gpu: whether this is one of several processes.
    coordinator_address: HOST:PORT of process 0.
    process_count: how many processes there are.
    process_index: which of them this is, from 0.
    initialization_timeout: seconds to wait for all of them.

  Raises:
    ValueError: something is not given and not to be found, contradicts something else, or the
      processes are not alike.
  """
  given = {
    "--coordinator_address": coordinator_address,
    "--process_count": process_count,
    "--process_index": process_index,
  }
  if not multiprocess_gpu:
    if names := [name for name, value in given.items() if value is not None]:
      raise ValueError(
        f"{', '.join(names)}: has no effect without --multiprocess_gpu. Add it, or leave these out."
      )
    return
  place = find_launch_info()
  if place is not None:
    coordinator_address = coordinator_address or place.coordinator
    process_count = place.count if process_count is None else process_count
    process_index = place.index if process_index is None else process_index
  address, count, index = coordinator_address, process_count, process_index
  if address is None or count is None or index is None:
    missing = [n for n, v in zip(given, (address, count, index), strict=True) if v is None]
    raise ValueError(_incomplete(missing, place))
  if not 0 <= index < count:
    raise ValueError(
      f"--process_index={index} does not exist among --process_count={count}: "
      f"processes count from 0 to {count - 1}."
    )
  check_coordinator(address, place)
  _meet(address, count, index, _local_devices(place), initialization_timeout)
  preflight(initialization_timeout)


def _incomplete(missing: list[str], place: LaunchInfo | None) -> str:
  if place is None:
    return (
      f"{', '.join(missing)} is not given, and nothing known has started this process (looked for "
      "Slurm, PBS, Open MPI, mpiexec, Kubernetes). Give --coordinator_address, --process_count and "
      "--process_index, or leave out --multiprocess_gpu for one process."
    )
  return (
    f"{', '.join(missing)} is not given, and the environment of {place.launcher} does not say it. "
    "Give it."
  )


def _local_devices(place: LaunchInfo | None) -> list[int] | None:
  """The device of this process among its node's; None leaves it to jax, which knows some launchers."""
  if place is None or place.launcher in ("Slurm", "Open MPI") or place.local_index is None:
    return None
  visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
  return None if visible and "," not in visible else [place.local_index]


def _meet(
  address: str, count: int, index: int, local_devices: list[int] | None, timeout: int
) -> None:
  with Waiting(address, index, count, timeout) as waiting:
    answer_roll_call(address, index, count, waiting)
    jax.distributed.initialize(
      address,
      count,
      index,
      local_device_ids=local_devices,
      # jax ends the process by a crash when its time is over: `Waiting` comes first, with words.
      initialization_timeout=timeout + _GRACE_S,
      # When a process dies or freezes, the others end after this time.
      heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S,
    )
