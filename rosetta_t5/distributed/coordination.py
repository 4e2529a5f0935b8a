"""Joins the processes of a run, compares what must be the same in all of them, and sends texts between them.

The texts are sent through jax's coordination service, a key-value store on the host of process 0: waiting for
one keeps no device busy.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import re
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from rosetta_t5 import __version__
from rosetta_t5.distributed.presence import wait_for_processes
from rosetta_t5.jax_internals import coordination_client

# The variables in which a launcher states the rank of a process, the number of processes, and the rank
# on the node. srun also sets those of an MPI, and Cray PALS those of MPICH.
_LAUNCHERS = (
  ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
  ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
  ("PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID"),
  ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH, Intel MPI and the mpiexec of PBS
  ("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK"),
  ("JOB_COMPLETION_INDEX", "", ""),  # an Indexed Job of Kubernetes
)
_FIRST_PORT, _PORT_COUNT = 12345, 20000
# When a process freezes, the others end after this time. A job that is suspended for a minute continues.
_HEARTBEAT_TIMEOUT_S = 100
# The service keeps every key, so each call needs a new one: calls are numbered.
_call_numbers = itertools.count()
# How long a process waits for the text of another one, which may read more, or from a slower disk.
_TIMEOUT_S = 3600.0
# JAX's environment variables on which the losses depend. The configuration does not contain them.
CHANGES_NUMBERS = (
  "JAX_ENABLE_X64",
  "JAX_DEFAULT_MATMUL_PRECISION",
  "JAX_DEFAULT_PRNG_IMPL",
  "JAX_THREEFRY_PARTITIONABLE",
  "JAX_RANDOM_SEED_OFFSET",
)
_PACKAGES = ("jax", "jaxlib", "flax")
_MAX_CHARACTERS = 150  # of a value in a message
_MAX_LINES = 40


class LaunchInfo(NamedTuple):
  """What a launcher's environment specifies about this process; None for what it does not specify.

  Attributes:
    coordinator: HOST:PORT of process 0.
    process_count: the number of processes.
    process_index: the index of this process, from 0.
    local_index: its index among the processes on its node.
  """

  coordinator: str | None = None
  process_count: int | None = None
  process_index: int | None = None
  local_index: int | None = None


def find_launch_info(environ: Mapping[str, str] = os.environ) -> LaunchInfo:
  """Returns what the environment variables of Slurm, PBS, an MPI or Kubernetes specify.

  jax detects Slurm and Open MPI itself, but its port depends on the job alone, so two job steps that
  run at once would share it; and it does not know PBS or other implementations of mpiexec.
  """

  def number(name: str) -> int | None:
    return int(environ[name]) if environ.get(name, "").isdigit() else None

  names = next((names for names in _LAUNCHERS if names[0] in environ), None)
  if names is None:
    return LaunchInfo()
  index, count, local_index = map(number, names)
  if names[0] == "SLURM_PROCID":
    count = count or number("SLURM_NTASKS")
  node_file = environ.get("PBS_NODEFILE")
  slots = pathlib.Path(node_file).read_text().split() if node_file else []  # one on each line
  return LaunchInfo(_coordinator(slots, environ), count or len(slots) or None, index, local_index)


def _coordinator(slots: list[str], environ: Mapping[str, str]) -> str | None:
  """Returns HOST:PORT of process 0, with a port that no other job or job step on that host uses."""
  nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
  if slots:
    host, job = slots[0], environ.get("PBS_JOBID", "0")
  elif found := re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes):  # gpu[017-024,030]
    host, job = "".join(part or "" for part in found.groups()), environ["SLURM_JOB_ID"]
  # Open MPI publishes the address of mpirun; process 0 runs on the same host by default.
  elif uri := re.match(r"(\d+).*?tcp4?://([\d.]+)", environ.get("OMPI_MCA_orte_hnp_uri", "")):
    host, job = uri[2], uri[1]
  else:
    return None
  step = int(environ.get("SLURM_STEP_ID", 0))
  number = int((re.match(r"\d+", job) or ["0"])[0]) * 16 + step % 16
  return f"{host}:{_FIRST_PORT + number % _PORT_COUNT}"


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
    ValueError: an argument is missing or contradicts another one, the processes do not all arrive in
      time, or they have different settings, versions or devices.
  """
  flags: dict[str, Any] = {
    "--coordinator_address": coordinator_address or None,
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
  for name, found in zip(flags, info, strict=False):
    flags[name] = found if flags[name] is None else flags[name]
  if missing := [name for name, value in flags.items() if value is None]:
    raise ValueError(
      f"{', '.join(missing)} is missing, and the environment variables of this process, which a launcher "
      "(Slurm, PBS, Open MPI, mpiexec or Kubernetes) sets, do not specify it. Give the flag, or omit "
      "--multiprocess_gpu to run a single process."
    )
  address, count, index = flags.values()
  if not 0 <= index < count:
    raise ValueError(
      f"--process_index must be from 0 to {count - 1}, because --process_count={count}, got {index}."
    )
  wait_for_processes(address, index, count, initialization_timeout)
  own_settings = settings()
  # The device of this process on its node. If it can see only one, or no launcher numbers it, jax chooses.
  visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",")
  local_ids = None if info.local_index is None or "," not in visible else [info.local_index]
  jax.distributed.initialize(
    address, count, index, local_ids, heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S
  )
  _run_preflight(own_settings)


def _run_preflight(settings: Mapping[str, str]) -> None:
  """Compares all processes; process 0 prints their number, hosts, devices and versions.

  Args:
    settings: the configuration of the run, by name.

  Raises:
    ValueError: settings, versions or devices differ (every process raises it).
  """
  local = jax.local_devices()
  versions = {"rosetta-t5": __version__, "python": platform.python_version()}
  versions |= {package: importlib.metadata.version(package) for package in _PACKAGES}
  if local[0].platform == "gpu":
    versions["platform"] = local[0].client.platform_version.splitlines()[0]
  devices = f"{len(local)} {local[0].device_kind}"
  environment = {name: os.environ[name] for name in CHANGES_NUMBERS if name in os.environ}
  check_same({**versions, "devices": devices, **environment, **settings}, "settings")
  hosts = {*allgather_text(socket.gethostname(), "hosts")}
  if jax.process_index() == 0:
    names = ", ".join(sorted(hosts)[:_MAX_LINES])
    each = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"{jax.process_count()} processes on {names}, each with {devices}; {each}", flush=True)


def check_same(values: Mapping[str, str], what: str) -> None:
  """Raises ValueError on every process if a value of one differs from that of process 0.

  Args:
    values: texts by name, in the order in which differences are reported.
    what: what the values are, for the message.
  """
  expected = json.loads(broadcast_text(json.dumps(dict(values)), what))
  names = [name for name in {**values, **expected} if expected.get(name) != values.get(name)]
  line = ""
  if names:
    own, first = (
      " ".join(side.get(names[0], "absent").split())[:_MAX_CHARACTERS]
      for side in (values, expected)
    )
    process = f"process {jax.process_index()} on {socket.gethostname()}"
    line = f"\n  {process}: {names[0]} is {own}, but {first} on process 0 ({len(names)} differ)"
  lines = [*filter(None, allgather_text(line, f"compare {what}"))]
  if lines:
    raise ValueError(
      f"the processes of this run have different {what}, and would compute different things:"
      + "".join(lines[:_MAX_LINES])
      + "\nStart all processes with the same command, files and installed packages."
    )


def broadcast_text(text: str, name: str) -> str:
  """Returns the text of process 0 on every process; see `allgather_text`."""
  return allgather_text(text, name, senders=1)[0]


def allgather_text(text: str, name: str, senders: int | None = None) -> list[str]:
  """Returns the texts of all processes, ordered by process index, on every process.

  All processes must make the same calls in the same order.

  Args:
    text: the text of this process.
    name: identifies the call in error messages; the same on every process.
    senders: the number of processes, from process 0 on, whose texts are returned; None for all.
  """
  if jax.process_count() == 1:
    return [text]
  client, key = coordination_client(), f"rosetta_t5/{name}/{next(_call_numbers)}"
  keys = [f"{key}/{index}" for index in range(senders or jax.process_count())]
  if jax.process_index() < len(keys):
    client.key_value_set(keys[jax.process_index()], text)
  return [str(client.blocking_key_value_get(key, int(_TIMEOUT_S * 1000))) for key in keys]


def draw_seed() -> int:
  """Returns a seed drawn from the clock, the same on every process."""
  return int(broadcast_text(str(int(time.time()) % 2**31), "seed"))
