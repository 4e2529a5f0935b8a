"""Values that all processes of a run share or must have in common, sent through jax's coordination service.

The service is a key-value store on the host of process 0, so waiting for a value keeps no device busy.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
import socket
import time
from collections.abc import Mapping

import jax

from rosetta_t5 import __version__
from rosetta_t5.jax_internals import coordination_client

# The service keeps every key, so each call needs a new one: calls are numbered.
_call_numbers = itertools.count()
_SEED_TIMEOUT_S = 600.0


def broadcast_text(text: str, name: str, timeout_s: float) -> str:
  """Returns the text of process 0 on every process.

  All processes must make the same calls in the same order.

  Args:
    text: the text to send. Only that of process 0 is used.
    name: identifies the call in error messages; the same on every process.
    timeout_s: seconds that the other processes wait for process 0.
  """
  if jax.process_count() == 1:
    return text
  client, key = coordination_client(), _next_key(name)
  if jax.process_index() == 0:
    client.key_value_set(key, text)
    return text
  return str(client.blocking_key_value_get(key, int(timeout_s * 1000)))


def allgather_text(text: str, name: str, timeout_s: float) -> list[str]:
  """Returns the texts of all processes, ordered by process index, on every process.

  All processes must make the same calls in the same order.

  Args:
    text: the text of this process.
    name: identifies the call in error messages; the same on every process.
    timeout_s: seconds that each process waits for the others.
  """
  if jax.process_count() == 1:
    return [text]
  client, key = coordination_client(), _next_key(name)
  client.key_value_set(f"{key}/{jax.process_index()}", text)
  keys = [f"{key}/{index}" for index in range(jax.process_count())]
  return [str(client.blocking_key_value_get(key, int(timeout_s * 1000))) for key in keys]


def _next_key(name: str) -> str:
  return f"rosetta_t5/{name}/{next(_call_numbers)}"


def draw_seed() -> int:
  """Returns a seed drawn from the clock, the same on every process."""
  return int(broadcast_text(str(int(time.time()) % 2**31), "seed", _SEED_TIMEOUT_S))


# JAX's environment variables on which the losses depend. The configuration does not contain them.
CHANGES_NUMBERS = (
  "JAX_ENABLE_X64",
  "JAX_DEFAULT_MATMUL_PRECISION",
  "JAX_DEFAULT_PRNG_IMPL",
  "JAX_THREEFRY_PARTITIONABLE",
  "JAX_RANDOM_SEED_OFFSET",
)
_PACKAGES = ("jax", "jaxlib", "flax")
_MAX_CHARACTERS = 150  # of a value in a table
_MAX_LINES = 40


def run_preflight(settings: Mapping[str, str], timeout_s: float) -> None:
  """Compares all processes; process 0 prints their number, hosts, devices and versions.

  Args:
    settings: the configuration of the run, by name.
    timeout_s: seconds that each process waits for the others.

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
  check_same({**versions, "devices": devices, **environment, **settings}, "settings", timeout_s)
  hosts = {*allgather_text(socket.gethostname(), "hosts", timeout_s)}
  if jax.process_index() == 0:
    names = ", ".join(sorted(hosts)[:_MAX_LINES])
    each = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"{jax.process_count()} processes on {names}, each with {devices}; {each}", flush=True)


def check_same(facts: Mapping[str, str], what: str, timeout_s: float) -> None:
  """Raises ValueError on every process if a fact of one differs from that of process 0.

  Args:
    facts: values by name, in the order in which differences are reported.
    what: what the facts are, for the message.
    timeout_s: seconds that each process waits for the others.
  """
  expected = json.loads(broadcast_text(json.dumps(dict(facts)), what, timeout_s))
  names = [name for name in {**facts, **expected} if expected.get(name) != facts.get(name)]
  row = [f"{jax.process_index()} on {socket.gethostname()}"]
  for name in names[:1]:
    values = (_shorten(either.get(name, "absent")) for either in (expected, facts))
    row += [name, *values, str(len(names))]
  reports = map(json.loads, allgather_text(json.dumps(row), f"compare {what}", timeout_s))
  rows = [["process", "first difference", "process 0", "this process", "in all"]]
  rows += [report for report in reports if len(report) > 1]
  if len(rows) == 1:
    return
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
  if len(lines) > _MAX_LINES:
    lines[_MAX_LINES:] = [f"… and {len(lines) - _MAX_LINES} more processes"]
  raise ValueError(
    f"the processes of this run have different {what}, and would compute different things:\n  "
    + "\n  ".join(lines)
    + "\nStart all processes with the same command, files and installed packages."
  )


def _shorten(value: str) -> str:
  value = " ".join(value.split())
  return value if len(value) <= _MAX_CHARACTERS else f"{value[:_MAX_CHARACTERS]}…"
