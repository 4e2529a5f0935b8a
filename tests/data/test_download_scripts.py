"""The scripts that check copies of the Pile and LAMBADA."""

from __future__ import annotations

import json
import pathlib

import pyarrow
import pytest

from rosetta_t5.data.download_scripts import check_pile, install_lambada


@pytest.fixture
def pile(tmp_path: pathlib.Path) -> pathlib.Path:
  folder = tmp_path / "the_pile"
  (folder / "train").mkdir(parents=True)
  line = json.dumps({"text": "a text", "meta": {"pile_set_name": "Books3"}}) + "\n"
  data = pyarrow.compress(line.encode() * 20, codec="zstd", asbytes=True)
  for name in (*(f"train/{n:02}" for n in range(30)), "val", "test"):
    (folder / f"{name}.jsonl.zst").write_bytes(data)
  return folder


def test_a_complete_copy_of_the_pile_has_no_problems(
  pile: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
  assert check_pile(["--data_dir", str(pile.parent), "--full"]) == 0
  assert f"No problems found. Train with --tfds_data_dir={pile.parent}" in capsys.readouterr().out


def test_a_broken_copy_of_the_pile_is_reported(
  pile: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
  (pile / "train/03.jsonl.zst").unlink()
  (pile / "test.jsonl.zst").write_bytes((pile / "val.jsonl.zst").read_bytes()[:30])
  assert check_pile(["--data_dir", str(pile.parent)]) == 1
  text = capsys.readouterr().out
  assert "1 of the 30 training shards are missing: 03.jsonl.zst" in text
  assert "test.jsonl.zst: line" in text


def test_without_a_copy_the_script_prints_that_the_public_copy_is_gone(
  tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
  assert check_pile(["--data_dir", str(tmp_path)]) == 1
  text = capsys.readouterr().out
  assert "gone since 2023" in text
  assert "c4_v220_span_corruption" in text


def test_lambadas_file_is_checked_and_copied_to_its_folder(
  tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
  path = tmp_path / "x.jsonl"
  path.write_text('{"text": "a b"}\n' * 5153)
  assert install_lambada(["--file", str(path), "--data_dir", str(tmp_path / "d")]) == 0
  assert (tmp_path / "d/lambada/lambada_test.jsonl").read_text() == path.read_text()
  path.write_text('{"text": "a b"}\n' * 5)
  assert install_lambada(["--file", str(path), "--data_dir", str(tmp_path / "d")]) == 1
  assert "it has 5 lines, not 5153" in capsys.readouterr().out
