"""Runs NVIDIA's and Pax's scripts, but prints the command that they would run."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

_SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts_gpu"
# Prints the arguments of `python -u` instead of running them, or fails if they contain $FAILS. Any other call
# runs Python.
_PYTHON = """#!/usr/bin/env bash
[[ $1 == -u ]] || exec "{python}" "$@"
[[ -z ${{FAILS:-}} || "$*" != *$FAILS* ]] || exit 2
printf '%s\\n' "$@" "XLA_FLAGS=$XLA_FLAGS" "CPUS=${{JAX_NUM_CPU_DEVICES:-}}"
"""


@pytest.fixture
def run(tmp_path: pathlib.Path):
  """Returns run(script, *arguments, **environment) → (exit status, stdout, stderr)."""
  python = tmp_path / "python"
  python.write_text(_PYTHON.format(python=sys.executable))
  python.chmod(0o755)
  (tmp_path / "spm.model").touch()
  root = str(_SCRIPTS.parent)
  kept = {"PATH": os.environ["PATH"], "PYTHONPATH": root, "PYTHON": str(python)}

  def run_script(script: str, *arguments: str, folder: pathlib.Path = _SCRIPTS, **environment: str):
    command = ["bash", str(folder / script), *arguments]
    done = subprocess.run(
      command,
      cwd=tmp_path,
      env=kept | environment,
      capture_output=True,
      text=True,
      check=False,
    )
    return done.returncode, done.stdout, done.stderr

  return run_script
