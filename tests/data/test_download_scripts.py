"""The scripts that check copies of the Pile and LAMBADA."""

from __future__ import annotations

import pathlib

import pytest

from rosetta_t5.data.download_scripts import check_pile, install_lambada


@pytest.fixture
def pile(tmp_path: pathlib.Path) -> pathlib.Path:
  folder = tmp_path / "the_pile"
  (folder / "train").mkdir(parents=True)
  for name in (*(f"train/{n:02}" for n in range(30)), "val", "test"):
    (folder / f"{name}.jsonl.zst").write_bytes(b"data")
  return folder


def test_a_copy_of_the_pile_is_described(
  pile: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
  assert check_pile(["--data_dir", str(pile.parent)]) == 0
  text = capsys.readouterr().out
  assert "train        30 files" in text
  assert f"Train with --tfds_data_dir={pile.parent}" in text
  (pile / "test.jsonl.zst").unlink()
  assert check_pile(["--data_dir", str(pile.parent)]) == 1
  assert "test          0 files" in capsys.readouterr().out


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
