"""Connects this process to the other processes of its run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax

from rosetta_t5.distributed.launchers import (
  LaunchInfo,
  check_coordinator_address,
  find_launch_info,
)
from rosetta_t5.distributed.preflight import run_preflight
from rosetta_t5.distributed.rendezvous import wait_for_processes

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
