"""Tests the manifest of a folder's files."""

import re

import pytest

from rosetta_t5 import manifest


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "inner").mkdir()
  (tmp_path / "a.txt").write_text("text")
  (tmp_path / "inner" / "b.bin").write_bytes(bytes(range(256)) * 10_000)
  manifest.write(tmp_path)
  return tmp_path


def _damage(path, change):
  content = bytearray(path.read_bytes())
  change(content)
  path.write_bytes(content)


def flip(content):
  content[len(content) // 2] ^= 1


def truncate(content):
  del content[-1]


def test_an_unchanged_folder_is_verified_and_one_without_a_manifest_is_read_as_it_is(folder):
  assert manifest.verify(folder)
  (folder / manifest.NAME).unlink()
  assert not manifest.verify(folder)


@pytest.mark.parametrize("change", [flip, truncate])
@pytest.mark.parametrize("name", ["a.txt", "inner/b.bin"])
def test_a_damaged_file_is_named(folder, name, change):
  _damage(folder / name, change)
  with pytest.raises(manifest.DamagedFileError, match=re.escape(str(folder / name))):
    manifest.verify(folder)


def test_a_missing_file_and_a_damaged_manifest_are_named(folder):
  (folder / "a.txt").unlink()
  with pytest.raises(manifest.DamagedFileError, match=r"a\.txt is missing"):
    manifest.verify(folder)
  _damage(folder / manifest.NAME, truncate)
  with pytest.raises(manifest.DamagedFileError, match=manifest.NAME):
    manifest.verify(folder)


def test_processes_share_the_files_and_a_part_can_be_selected(folder):
  _damage(folder / "inner" / "b.bin", flip)
  assert manifest.verify(folder, share=(0, 2))
  with pytest.raises(manifest.DamagedFileError):
    manifest.verify(folder, share=(1, 2))
  assert manifest.verify(folder, lambda name: not name.startswith("inner/"))
