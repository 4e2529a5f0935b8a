"""The private names of jax that rosetta_t5/jax_internals.py uses are where it expects them."""

from __future__ import annotations

import pathlib
import socket
import subprocess

import jax
from forked_python import python

ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = """
import sys
import jax
from rosetta_t5.jax_internals import coordination_client
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 1, 0)
client = coordination_client()
client.key_value_set("folder/key", "old")
client.key_value_set("folder/key", "text", allow_overwrite=True)
assert client.blocking_key_value_get("folder/key", 1000) == "text"
assert client.key_value_dir_get("folder") == [("folder/key", "text")]
"""
ADVICE = f"""
jax {jax.__version__} has no key-value client where rosetta_t5/jax_internals.py looks for it,
or the client's methods have changed. Look at how orbax.checkpoint uses jax's coordination service
(`multihost` in its source), or whether jax.distributed has a public interface by now, and change that
module. Until then, lower the upper bound of jax in setup.cfg.
"""


def test_the_coordination_client_stores_and_returns_text():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
  command = [python(), "-c", PROGRAM, port]
  done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
  assert done.returncode == 0, f"{ADVICE}\n{done.stderr}"


def test_no_other_module_uses_private_names_of_jax():
  found = [
    path.relative_to(ROOT).as_posix()
    for package in ("rosetta_t5", "t5x")
    for path in (ROOT / package).rglob("*.py")
    if "jax._src" in path.read_text()
  ]
  assert found == ["rosetta_t5/jax_internals.py"]
