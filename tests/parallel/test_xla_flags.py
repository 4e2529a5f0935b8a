"""XLA's flags for a run: what the installed jax knows, and the user's own."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from rosetta_t5.parallel.xla_flags import assemble, known_flags, main, read_flags

_FILES = sorted(
  (pathlib.Path(__file__).parents[2] / "scripts_gpu" / "xla_flags").glob("*.txt"), key=str
)
KNOWN = "--xla_cpu_enable_fast_math=false"
# A flag of T5X's days that is gone, and the beginning of one that is there.
GONE = "--xla_gpu_simplify_all_fp_conversions=true"
BEGINNING = "--xla_cpu_enable_fast=false"


def test_a_flag_that_this_jax_does_not_know_is_left_out_and_named():
  assert assemble([KNOWN, GONE, BEGINNING], "") == (KNOWN, [GONE, BEGINNING])


def test_the_users_flags_stay_and_win():
  users = "--xla_cpu_enable_fast_math=true --mine"
  assert assemble([KNOWN], users) == (users, [])


def test_what_is_left_out_is_told_beside_the_flags(tmp_path, capsys, monkeypatch):
  monkeypatch.delenv("XLA_FLAGS", raising=False)
  (tmp_path / "flags.txt").write_text(f"# a comment\n{KNOWN}  # why\n\n{GONE}\n")
  main([str(tmp_path / "flags.txt")])
  shown = capsys.readouterr()
  assert shown.out == f"{KNOWN}\n"
  assert shown.err == f"xla_flags: left out, this jax does not know it: {GONE}\n"


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.name)
def test_every_flag_of_a_shipped_file_is_known_to_this_jax(path):
  names = {flag.removeprefix("--").partition("=")[0] for flag in read_flags(path)}
  assert known_flags(names) == names


def test_xla_takes_what_is_assembled_and_ends_on_what_is_left_out():
  def run(flags):
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    program = "import jax; jax.devices()"
    return subprocess.run(
      [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )

  flags, _ = assemble([flag for path in _FILES for flag in read_flags(path)] + [GONE], "")
  assert run(flags).returncode == 0
  ended = run(GONE)
  assert ended.returncode != 0
  assert "Unknown flag" in ended.stderr
