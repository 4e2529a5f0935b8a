"""Runs NVIDIA's and Pax's scripts, but prints the command that they would run."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import forked_python
import pytest

_SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts_gpu"
# Prints the arguments of `python -u` instead of running them, or fails if they contain $FAILS. Any other call
# runs Python. The XLA flags that jax knows, for which its libraries are searched, are found once per file and
# XLA_FLAGS.
_PYTHON = """#!/usr/bin/env bash
if [[ ${{2:-}} == rosetta_t5.parallel.process_settings ]]; then
  hash=$(md5sum <<< "$3 ${{XLA_FLAGS:-}}")
  found={found}/${{hash%% *}}
  if [[ ! -e $found ]]; then
    "{forked_python}" "$@" > "$found.$$" || exit
    mv "$found.$$" "$found"
  fi
  exec cat "$found"
fi
[[ $1 == -u ]] || exec "{python}" "$@"
[[ -z ${{FAILS:-}} || "$*" != *$FAILS* ]] || exit 2
printf '%s\\n' "$@" "XLA_FLAGS=$XLA_FLAGS" "CPUS=${{JAX_NUM_CPU_DEVICES:-}}"
"""


@pytest.fixture(scope="session")
def found_flags(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Returns the folder of the XLA flags that have been found."""
  return tmp_path_factory.mktemp("found_flags")


@pytest.fixture
def run(tmp_path: pathlib.Path, found_flags: pathlib.Path):
  """Returns run(script, *arguments, **environment) → (exit status, stdout, stderr)."""
  python = tmp_path / "python"
  python.write_text(
    _PYTHON.format(python=sys.executable, forked_python=forked_python.python(), found=found_flags)
  )
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
