"""Damaged files of every kind that others write are read, or refused with the name of the file."""

from __future__ import annotations

import faulthandler
import os
import pathlib
import time

import hypothesis
import pytest
from hypothesis import strategies as st
from limited_memory import limited_memory
from mutations import damaged
from parsers import PARSERS, Parser

from rosetta_t5.checkpoints import UnreadableCheckpointError

# How long all parsers together are tried by the slow test.
FUZZ_SECONDS = float(os.environ.get("FUZZ_SECONDS", "600"))
_QUICK = hypothesis.settings(
  derandomize=True,
  database=None,
  deadline=None,
  suppress_health_check=list(hypothesis.HealthCheck),
)
_RANDOM = hypothesis.settings(_QUICK, max_examples=200, derandomize=False)
_MEMORY = 2 << 30
_CPU_SECONDS = 10
_HANG_SECONDS = 120
# Errors of Python's own operations, whose texts do not explain what is wrong with a file.
_UNEXPLAINED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError)


def _assert_damage_is_refused(
  parser: Parser, folder: pathlib.Path, settings: hypothesis.settings
) -> None:
  """Damages each file of a parser in many ways, one at a time.

  If a library ends the process, the file that caused it remains in the folder.
  """
  intact = {
    file: (file.read_bytes(), structure)
    for pattern, structure in parser.files.items()
    for file in folder.glob(pattern)
  }
  parser.read(folder)

  @settings
  @hypothesis.given(st.data())
  def check(data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(sorted(intact)))
    original, structure = intact[file]
    content = data.draw(damaged(original, structure))
    file.unlink()  # so that memory that is mapped to the old file remains
    file.write_bytes(content)
    try:
      error = _read(parser, folder)
    finally:  # so that hypothesis can reduce the damage
      file.unlink()
      file.write_bytes(original)
    if error is not None:
      # TensorFlow does not say which of a task's files is damaged.
      names = (str(folder), "the data of the task")
      is_named = any(name in str(error) for name in names) or getattr(error, "filename", None)
      assert is_named, f"the message names no file and no task: {error!r}"
      is_wrapped = isinstance(error, UnreadableCheckpointError)
      assert not (is_wrapped and isinstance(error.__cause__, _UNEXPLAINED)), repr(error)

  check()


def _read(parser: Parser, folder: pathlib.Path) -> Exception | None:
  """Returns the error that a user would see; fails for other errors, and for what takes too long."""
  started = time.process_time()
  faulthandler.dump_traceback_later(_HANG_SECONDS, exit=True)
  try:
    with limited_memory(_MEMORY):
      parser.read(folder)
  except (ValueError, OSError, MemoryError) as error:
    return error
  finally:
    faulthandler.cancel_dump_traceback_later()
    assert time.process_time() - started < _CPU_SECONDS
  return None


@pytest.mark.slow
@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_a_damaged_file_is_read_or_refused(parser: Parser, tmp_path: pathlib.Path) -> None:
  parser.write(tmp_path)
  settings = hypothesis.settings(_QUICK, max_examples=parser.examples)
  _assert_damage_is_refused(parser, tmp_path, settings)


@pytest.mark.slow
@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_random_damage_is_refused_for_minutes(parser: Parser, tmp_path: pathlib.Path) -> None:
  parser.write(tmp_path)
  end = time.monotonic() + FUZZ_SECONDS / len(PARSERS)
  while time.monotonic() < end:
    _assert_damage_is_refused(parser, tmp_path, _RANDOM)
