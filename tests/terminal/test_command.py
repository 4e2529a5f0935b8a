"""How a command begins."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from rosetta_t5 import cli

BEGIN = "from rosetta_t5.terminal.command import begin; begin('test')"


def test_low_ulimits_are_reported():
  shell = f'ulimit -v 9000000 -u 900; exec "{sys.executable}" -c "{BEGIN}"'
  run = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
  first, address_space, threads = run.stderr.splitlines()
  assert first == "test is loading its libraries …"
  assert address_space.startswith("note     ulimit -v is 9,000,000: ")
  assert threads.startswith("note     ulimit -u is 900: ")


def test_a_removed_working_directory_is_reported(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  monkeypatch.chdir(tmp_path)
  tmp_path.rmdir()
  with pytest.raises(SystemExit) as end:
    cli.main(["--version"])
  assert end.value.code == 1
  assert (
    "error: the working directory was removed: change to another one" in capsys.readouterr().err
  )
