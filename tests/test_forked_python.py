"""A command of the stand-in for Python sees what it would see in a new process."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest
from forked_python import python

PROGRAM = """
import sys
print(sys.argv, sys.path, __name__, sys.stdin.read())
"""
OPTIONS = """
import os, sys
import jax
print(sorted((name, str(value)) for name, value in jax.config.values.items()))
print(len(jax.devices()), sorted(os.environ))
sys.exit("the end")
"""


def run(program: str, *command: str, **environment: str) -> tuple[int, str, str]:
  done = subprocess.run(
    [program, *command], env=os.environ | environment, capture_output=True, text=True, input="typed"
  )
  return done.returncode, done.stdout, done.stderr


def test_its_arguments_and_search_path_are_those_of_a_new_process(tmp_path: pathlib.Path) -> None:
  (tmp_path / "program.py").write_text(PROGRAM)
  for command in (
    ["-c", PROGRAM],
    ["-m", "program", "two words"],
    [f"{tmp_path}/program.py", "-c"],
  ):
    variables = {"PYTHONPATH": f"{tmp_path}:/nowhere"}
    expected, got = (run(program, *command, **variables) for program in (sys.executable, python()))
    assert expected[0] == 0
    assert got == expected


@pytest.mark.slow
def test_its_variables_options_and_exit_status_are_those_of_a_new_process() -> None:
  variables = {"JAX_NUM_CPU_DEVICES": "3", "JAX_ENABLE_X64": "1", "JAX_LOG_COMPILES": "no"}
  expected, got = (run(name, "-c", OPTIONS, **variables) for name in (sys.executable, python()))
  assert expected[0] == 1
  assert got == expected


def test_it_dies_of_the_signal_that_its_command_dies_of() -> None:
  status, _, _ = run(python(), "-c", "import os; os.abort()")
  assert status == -signal.SIGABRT


@pytest.mark.parametrize(("sent", "output"), [(signal.SIGTERM, "caught\n"), (signal.SIGKILL, "")])
def test_a_signal_to_it_reaches_its_command(sent: signal.Signals, output: str) -> None:
  program = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("caught")))
print("ready", flush=True)
time.sleep(20)
print("not killed")
"""
  with subprocess.Popen([python(), "-c", program], stdout=subprocess.PIPE, text=True) as process:
    assert process.stdout.readline() == "ready\n"
    process.send_signal(sent)
    assert process.stdout.read() == output  # and the command has ended
  assert process.returncode == (0 if output else -sent)
