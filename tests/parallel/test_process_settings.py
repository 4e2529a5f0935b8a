"""XLA_FLAGS of a run contain the flags that the installed jax knows, and the user's own."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest
from forked_python import python

from rosetta_t5.parallel.process_settings import assemble_flags, find_known_flags, main, read_flags

_FILES = sorted(
  (pathlib.Path(__file__).parents[2] / "scripts_gpu" / "xla_flags").glob("*.txt"), key=str
)
KNOWN = "--xla_cpu_enable_fast_math=false"
# A flag of T5X's time that no longer exists, and the prefix of one that does.
GONE = "--xla_gpu_simplify_all_fp_conversions=true"
BEGINNING = "--xla_cpu_enable_fast=false"


def test_unknown_flags_are_omitted_and_returned():
  assert assemble_flags([KNOWN, GONE, BEGINNING], "") == (KNOWN, [GONE, BEGINNING])


def test_the_users_flags_take_precedence():
  users = "--xla_cpu_enable_fast_math=true --mine"
  assert assemble_flags([KNOWN], users) == (users, [])


def test_omitted_flags_are_named_on_stderr(tmp_path, capsys, monkeypatch):
  monkeypatch.delenv("XLA_FLAGS", raising=False)
  (tmp_path / "flags.txt").write_text(f"# a comment\n{KNOWN}  # why\n\n{GONE}\n")
  main([str(tmp_path / "flags.txt")])
  shown = capsys.readouterr()
  assert shown.out == f"{KNOWN}\n"
  assert shown.err == f"xla_flags: omitted, because this jax does not know it: {GONE}\n"


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.name)
def test_this_jax_knows_every_flag_of_the_shipped_files(path):
  names = {flag.removeprefix("--").partition("=")[0] for flag in read_flags(path)}
  assert find_known_flags(names) == names


def test_xla_accepts_the_assembled_flags_and_aborts_on_the_omitted_ones():
  def run(flags):
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    program = "import jax; jax.devices()"
    return subprocess.run(
      [python(), "-c", program], env=environment, capture_output=True, text=True, check=False
    )

  flags, _ = assemble_flags([flag for path in _FILES for flag in read_flags(path)] + [GONE], "")
  assert run(flags).returncode == 0
  ended = run(GONE)
  assert ended.returncode != 0
  assert "Unknown flag" in ended.stderr
