"""The command `rosetta-t5 vocab`."""

from __future__ import annotations

import pathlib

import pytest

from rosetta_t5 import cli

TEXT = [f"the {a} {b} of the {c}" for a in ("red", "old") for b in ("cat", "hat") for c in ("sea",)]


def test_vocab_train_writes_a_model_and_prints_how_to_use_it(
  tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
  (tmp_path / "a.txt").write_text("\n".join(TEXT))
  out = tmp_path / "new/pieces.model"
  train = ["vocab", "train", "--input", str(tmp_path / "*.txt"), "--out", str(out), "--size"]
  assert cli.main([*train, "16"]) == 0
  assert f"sentencepiece_model_file = '{out}'" in capsys.readouterr().out
  assert cli.main(["vocab", "show", str(out), "the red cat"]) == 0
  assert "16 pieces" in capsys.readouterr().out
  with pytest.raises(SystemExit):
    cli.main([*train, "17"])
  assert f"{out} exists, and models may have been trained with it" in capsys.readouterr().err
  assert cli.main(["vocab", "show", str(out), "the red cat"]) == 0
  assert "16 pieces" in capsys.readouterr().out


def test_user_errors_are_printed_without_a_stack_trace(
  tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
  not_a_model = tmp_path / "text.model"
  not_a_model.write_text("some text")
  for path, message in (
    ("/nowhere.model", "error: There is no vocabulary file /nowhere.model"),
    (str(not_a_model), f"error: {not_a_model} is not a SentencePiece model"),
  ):
    with pytest.raises(SystemExit) as ended:
      cli.main(["vocab", "show", path])
    assert ended.value.code == 1
    assert capsys.readouterr().err.strip().startswith(message)
