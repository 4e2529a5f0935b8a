"""Compares the processes' environments before a run starts, and times an all-reduce."""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import json
import platform
import socket
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rosetta_t5.distributed.coordination import allgather_text
from rosetta_t5.distributed.rendezvous import format_ranges

_PACKAGES = ("jax", "jaxlib", "flax", "rosetta-t5")
_MAX_LINES = 40
_BYTES_ON_GPU, _BYTES_ON_CPU = 256 * 2**20, 2**20


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
  """What a process reports about itself."""

  process: int
  host: str
  devices: int
  device_kind: str
  versions: Mapping[str, str]


def run_preflight(timeout_s: float) -> None:
  """Compares all processes; process 0 prints a table of them and the time of an all-reduce.

  Raises:
    ValueError: versions or devices differ (every process raises it), or the sum is wrong.
  """
  own = json.dumps(dataclasses.asdict(describe_process()))
  processes = [
    ProcessInfo(**json.loads(text)) for text in allgather_text(own, "preflight", timeout_s)
  ]
  is_first = jax.process_index() == 0
  if is_first:
    print("\n".join(format_table(processes)), flush=True)
  check_same_environment(processes)
  size = _BYTES_ON_CPU if processes[0].device_kind == "cpu" else _BYTES_ON_GPU
  seconds = time_all_reduce(size)
  if is_first:
    count = jax.device_count()
    rate = 2 * (count - 1) / count * size / seconds / 1e9
    print(
      f"all-reduce of {size / 2**20:.0f} MiB over {count} devices: {seconds * 1e3:.3g} ms, "
      f"{rate:.3g} GB/s sent by each",
      flush=True,
    )


def describe_process() -> ProcessInfo:
  """Returns the facts about this process. It initializes the devices."""
  local = jax.local_devices()
  versions = {"python": platform.python_version()}
  for package in _PACKAGES:
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      versions[package] = "from source"
  if local[0].platform == "gpu":
    versions["platform"] = local[0].client.platform_version.splitlines()[0]
  return ProcessInfo(
    jax.process_index(), socket.gethostname(), len(local), local[0].device_kind, versions
  )


def format_table(processes: Sequence[ProcessInfo]) -> list[str]:
  """Returns one line for each host, and one line with the versions of process 0."""
  hosts: dict[str, list[ProcessInfo]] = collections.defaultdict(list)
  for process in processes:
    hosts[process.host].append(process)
  total = sum(process.devices for process in processes)
  lines = [
    f"{len(processes)} process{'es' * (len(processes) != 1)} on {len(hosts)} "
    f"host{'s' * (len(hosts) != 1)} with {total} device{'s' * (total != 1)}:"
  ]
  width = max(map(len, hosts))
  for host, group in list(hosts.items())[:_MAX_LINES]:
    ranks = format_ranges([process.process for process in group])
    counts: collections.Counter[str] = collections.Counter()
    for process in group:
      counts[process.device_kind] += process.devices
    devices = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    lines.append(f"  {host:{width}}  process{'es' * (len(group) > 1)} {ranks}: {devices}")
  if len(hosts) > _MAX_LINES:
    lines.append(f"  … and {len(hosts) - _MAX_LINES} more hosts")
  versions = (f"{name} {version}" for name, version in processes[0].versions.items())
  return [*lines, f"  {', '.join(versions)}"]


def check_same_environment(processes: Sequence[ProcessInfo]) -> None:
  """Raises ValueError if a process has different versions or devices from process 0."""
  first, *others = processes
  expected = _facts(first)
  differences = []
  for process in others:
    actual = _facts(process)
    differences += [
      f"process {process.process} on {process.host} has {actual.get(name, f'no {name}')}, but process "
      f"0 on {first.host} has {expected.get(name, f'no {name}')}"
      for name in {**expected, **actual}
      if actual.get(name) != expected.get(name)
    ]
  if len(differences) > _MAX_LINES:
    differences[_MAX_LINES:] = [f"… and {len(differences) - _MAX_LINES} more"]
  if differences:
    raise ValueError(
      "the processes of this run have different environments, and could compile different "
      "programs:\n  "
      + "\n  ".join(differences)
      + "\nInstall the same environment everywhere: the same container, or `make setup` from one lock."
    )


def _facts(process: ProcessInfo) -> dict[str, str]:
  versions = {name: f"{name} {version}" for name, version in process.versions.items()}
  return versions | {"devices": f"{process.devices} {process.device_kind} devices"}


def time_all_reduce(size: int) -> float:
  """Returns the seconds that all devices take to sum an array of `size` bytes, the best of three."""
  mesh = Mesh(np.array(jax.devices()), ("all",), axis_types=(AxisType.Auto,))
  rows, replicated = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("all",), ()))
  shape = (jax.device_count(), size // 4)
  array = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=rows)()
  sum_rows = jax.jit(lambda x: jnp.sum(x, axis=0), out_shardings=replicated)
  total = sum_rows(array).block_until_ready()
  times = []
  for _ in range(3):
    started = time.perf_counter()
    total = sum_rows(array).block_until_ready()
    times.append(time.perf_counter() - started)
  if float(total[0]) != jax.device_count():
    raise ValueError(
      f"an all-reduce of ones over {jax.device_count()} devices gave {float(total[0])}: a link or a "
      "device is faulty"
    )
  return min(times)
