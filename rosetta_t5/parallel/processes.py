"""Joins this process to the others of a run."""

from __future__ import annotations

import time

import jax
import numpy as np

_HEARTBEAT_TIMEOUT_S = 45


def join_processes(
  multiprocess_gpu: bool,
  coordinator_address: str | None = None,
  process_count: int | None = None,
  process_index: int | None = None,
  initialization_timeout: int = 300,
) -> None:
  """Connects to the other processes, if there are any; call it before a device is touched.

  Args:
    multiprocess_gpu: whether this is one of several processes. If so and no address is given, jax
      finds the others itself (Slurm, Open MPI, Kubernetes).
    coordinator_address: HOST:PORT of process 0.
    process_count: how many processes there are.
    process_index: which of them this is, from 0.
    initialization_timeout: seconds to wait for all of them.

  Raises:
    ValueError: arguments that go together are not all given, or contradict each other.
  """
  given = {
    "--coordinator_address": coordinator_address,
    "--process_count": process_count,
    "--process_index": process_index,
  }
  missing = [name for name, value in given.items() if value is None]
  if not multiprocess_gpu:
    if len(missing) < len(given):
      raise ValueError(
        f"{', '.join(name for name in given if name not in missing)}: has no effect without "
        "--multiprocess_gpu. Add it, or leave these out."
      )
    return
  if 0 < len(missing) < len(given):
    raise ValueError(
      f"{', '.join(given)} go together, and {', '.join(missing)} is not given. Give all three, or "
      "none under Slurm, where jax finds the processes itself."
    )
  if process_count is not None and not 0 <= (process_index or 0) < process_count:
    raise ValueError(
      f"--process_index={process_index} does not exist among --process_count={process_count}: "
      f"processes count from 0 to {process_count - 1}."
    )
  jax.distributed.initialize(
    coordinator_address,
    process_count,
    process_index,
    initialization_timeout=initialization_timeout,
    # When a process dies or freezes, the others end after this time.
    heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S,
  )


def drawn_seed() -> int:
  """Returns a seed drawn from the clock, the same on every process."""
  seed = np.int32(time.time())
  if jax.process_count() > 1:
    from jax.experimental import multihost_utils

    seed = multihost_utils.broadcast_one_to_all(seed)
  return int(seed)
