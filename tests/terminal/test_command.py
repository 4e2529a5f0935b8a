"""How a command begins."""

from __future__ import annotations

import subprocess
import sys

BEGIN = "from rosetta_t5.terminal.command import begin; begin('test')"


def test_low_ulimits_are_reported():
  shell = f'ulimit -v 9000000 -u 900; exec "{sys.executable}" -c "{BEGIN}"'
  run = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
  first, address_space, threads = run.stderr.splitlines()
  assert first == "test is loading its libraries …"
  assert address_space.startswith("note     ulimit -v is 9,000,000: ")
  assert threads.startswith("note     ulimit -u is 900: ")
