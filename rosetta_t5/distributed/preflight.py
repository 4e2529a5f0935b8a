"""What processes compare before a run begins: who is where, with which versions, and how fast they sum."""

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
from rosetta_t5.distributed.waiting import ranges_text

_PACKAGES = ("jax", "jaxlib", "flax", "rosetta-t5")
_MOST_LINES = 40
_BYTES_ON_GPU, _BYTES_ON_CPU = 256 * 2**20, 2**20


@dataclasses.dataclass(frozen=True)
class Facts:
  """What a process says of itself.

  Attributes:
    process: its index.
    host: its machine's name.
    devices: how many it has.
    kind: of what kind.
    versions: by package.
  """

  process: int
  host: str
  devices: int
  kind: str
  versions: Mapping[str, str]


def own_facts() -> Facts:
  """Returns this process's facts; takes hold of the devices."""
  local = jax.local_devices()
  versions = {"python": platform.python_version()}
  for package in _PACKAGES:
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      versions[package] = "from source"
  if local[0].platform == "gpu":
    versions["platform"] = local[0].client.platform_version.splitlines()[0]
  return Facts(
    jax.process_index(), socket.gethostname(), len(local), local[0].device_kind, versions
  )


def preflight(timeout: float, facts: Facts | None = None) -> None:
  """Compares all processes; process 0 prints who they are, and how long they take to sum an array.

  Args:
    timeout: seconds to wait for all of them.
    facts: this process's; None to ask it.

  Raises:
    ValueError: versions or kinds of devices differ. Every process raises it.
  """
  everyone = _exchanged(facts or own_facts(), timeout)
  if jax.process_index() == 0:
    print("\n".join(table(everyone)), flush=True)
  check_alike(everyone)
  size = _BYTES_ON_CPU if everyone[0].kind == "cpu" else _BYTES_ON_GPU
  seconds = time_all_reduce(size)
  if jax.process_index() == 0:
    n = jax.device_count()
    rate = 2 * (n - 1) / n * size / seconds / 1e9
    print(
      f"all-reduce of {size / 2**20:.0f} MiB over {n} devices: {seconds * 1e3:.3g} ms, "
      f"{rate:.3g} GB/s sent by each",
      flush=True,
    )


def table(everyone: Sequence[Facts]) -> list[str]:
  """Returns a line for each host, and one for the versions that most have."""
  hosts: dict[str, list[Facts]] = collections.defaultdict(list)
  for facts in everyone:
    hosts[facts.host].append(facts)
  devices = sum(facts.devices for facts in everyone)
  counted = ((len(everyone), "process", "es"), (len(hosts), "host", "s"), (devices, "device", "s"))
  processes, machines, all_devices = (f"{n} {name}{end * (n != 1)}" for n, name, end in counted)
  lines = [f"{processes} on {machines} with {all_devices}:"]
  width = max(map(len, hosts))
  for host, group in list(hosts.items())[:_MOST_LINES]:
    ranks = ranges_text([facts.process for facts in group])
    kinds = collections.Counter()  # type: collections.Counter[str]
    for facts in group:
      kinds[facts.kind] += facts.devices
    what = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    lines.append(f"  {host:{width}}  process{'es' * (len(group) > 1)} {ranks}: {what}")
  if len(hosts) > _MOST_LINES:
    lines.append(f"  … and {len(hosts) - _MOST_LINES} more hosts")
  versions = everyone[0].versions
  return [*lines, "  " + ", ".join(f"{name} {version}" for name, version in versions.items())]


def check_alike(everyone: Sequence[Facts]) -> None:
  """Raises ValueError if processes have other versions or kinds of devices than process 0."""
  first = everyone[0]
  wrong = []
  for facts in everyone[1:]:
    names = {**first.versions, **facts.versions}
    wrong += [
      f"process {facts.process} on {facts.host} has {name} {facts.versions.get(name)}, but process 0 "
      f"on {first.host} has {first.versions.get(name)}"
      for name in names
      if facts.versions.get(name) != first.versions.get(name)
    ]
    if (facts.kind, facts.devices) != (first.kind, first.devices):
      wrong.append(
        f"process {facts.process} on {facts.host} has {facts.devices} devices {facts.kind}, but "
        f"process 0 on {first.host} has {first.devices} {first.kind}"
      )
  if wrong:
    more = f"\n  … and {len(wrong) - _MOST_LINES} more" if len(wrong) > _MOST_LINES else ""
    raise ValueError(
      "the processes of this run are not alike, and could compute different programs:\n  "
      + "\n  ".join(wrong[:_MOST_LINES])
      + more
      + "\nInstall the same environment everywhere: the same container, or `make setup` from one lock."
    )


def time_all_reduce(size: int) -> float:
  """Returns the seconds that all devices take to sum an array of `size` bytes, the best of three."""
  mesh = Mesh(np.array(jax.devices()), ("all",), axis_types=(AxisType.Auto,))
  rows = NamedSharding(mesh, PartitionSpec("all"))
  shape = (jax.device_count(), size // 4)
  make = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=rows)
  whole = NamedSharding(mesh, PartitionSpec())
  add = jax.jit(lambda x: jnp.sum(x, axis=0), out_shardings=whole)
  array = make()
  add(array).block_until_ready()
  times = []
  for _ in range(3):
    started = time.perf_counter()
    total = add(array).block_until_ready()
    times.append(time.perf_counter() - started)
  if float(total[0]) != jax.device_count():
    raise ValueError(
      f"{jax.device_count()} devices summed ones to {float(total[0])}: a link or a device is broken"
    )
  return min(times)


def _exchanged(facts: Facts, timeout: float) -> list[Facts]:
  text = json.dumps(dataclasses.asdict(facts))
  return [Facts(**json.loads(each)) for each in allgather_text(text, "preflight", timeout)]
