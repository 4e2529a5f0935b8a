"""Files and folders appear under their names whole or not at all; checksums show those that were damaged later."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess

import pytest
from forked_python import python

from rosetta_t5.files import (
  CHECKSUMS_NAME,
  DamagedFileError,
  complete_folder,
  verify_checksums,
  write_atomically,
  write_checksums,
)

KILLED = """
import os, signal, sys
from rosetta_t5.files import complete_folder
with complete_folder(sys.argv[1]) as folder:
  folder.mkdir()
  (folder / "half").write_text("1")
  os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
  try:
    with pytest.raises(OSError, match="File too large"):
      write_atomically(tmp_path / "file", bytes(1000))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert not list(tmp_path.iterdir())


def test_a_folder_gets_its_name_when_it_is_complete_and_replaces_what_is_there(tmp_path):
  for number in ("1", "2"):
    with complete_folder(tmp_path / "a/folder") as folder:
      folder.mkdir(parents=True)
      (folder / number).write_text("")
  assert [path.name for path in (tmp_path / "a").rglob("*")] == ["folder", "2"]


def test_after_an_error_the_earlier_folder_is_left_and_nothing_else(tmp_path):
  (tmp_path / "folder").mkdir()
  (tmp_path / "folder/earlier").write_text("")

  def fail():
    with complete_folder(tmp_path / "folder") as folder:
      folder.mkdir()
      (folder / "half").write_text("")
      raise ValueError("half")

  with pytest.raises(ValueError, match="half"):
    fail()
  assert [path.name for path in tmp_path.rglob("*")] == ["folder", "earlier"]


def test_a_killed_process_leaves_no_folder_of_the_final_name_and_the_next_call_writes_it(tmp_path):
  command = [python(), "-c", KILLED, os.fspath(tmp_path / "folder")]
  assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
  assert not (tmp_path / "folder").exists()
  with complete_folder(tmp_path / "folder") as folder:
    folder.mkdir()
    (folder / "whole").write_text("")
  assert [path.name for path in tmp_path.rglob("*")] == ["folder", "whole"]


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "inner").mkdir()
  (tmp_path / "a.txt").write_text("text")
  (tmp_path / "inner" / "b.bin").write_bytes(bytes(range(256)) * 10_000)
  write_checksums(tmp_path)
  return tmp_path


def _damage(path, change):
  content = bytearray(path.read_bytes())
  change(content)
  path.write_bytes(content)


def flip(content):
  content[len(content) // 2] ^= 1


def truncate(content):
  del content[-1]


def test_an_unchanged_folder_is_verified_and_one_without_checksums_is_read_as_it_is(folder):
  assert verify_checksums(folder)
  (folder / CHECKSUMS_NAME).unlink()
  assert not verify_checksums(folder)


@pytest.mark.parametrize("change", [flip, truncate])
@pytest.mark.parametrize("name", ["a.txt", "inner/b.bin"])
def test_a_damaged_file_is_named(folder, name, change):
  _damage(folder / name, change)
  with pytest.raises(DamagedFileError, match=re.escape(str(folder / name))):
    verify_checksums(folder)


def test_a_missing_file_and_damaged_checksums_are_named(folder):
  (folder / "a.txt").unlink()
  with pytest.raises(DamagedFileError, match=r"a\.txt is missing"):
    verify_checksums(folder)
  _damage(folder / CHECKSUMS_NAME, truncate)
  with pytest.raises(DamagedFileError, match=CHECKSUMS_NAME):
    verify_checksums(folder)


def test_processes_share_the_files_and_a_part_can_be_selected(folder):
  _damage(folder / "inner" / "b.bin", flip)
  assert verify_checksums(folder, share=(0, 2))
  with pytest.raises(DamagedFileError):
    verify_checksums(folder, share=(1, 2))
  assert verify_checksums(folder, lambda name: not name.startswith("inner/"))
