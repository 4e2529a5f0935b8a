"""The command `rosetta-t5 vocab`."""

from __future__ import annotations

import inspect
import json.decoder
import pathlib
import re

import pytest
import sentencepiece

from rosetta_t5 import cli
from rosetta_t5.data.tensorflow_import import import_seqio
from rosetta_t5.data.vocabularies.sentencepiece_models import (
  KEEP_WHITE_SPACE,
  count_lost,
  describe_lost,
  load_sentencepiece,
  lost_text_problems,
  train_sentencepiece,
)

TEXT = [f"the {a} {b} of the {c}" for a in ("red", "old") for b in ("cat", "hat") for c in ("sea",)]


def test_vocab_train_writes_a_model_and_prints_how_to_use_it(
  tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
  (tmp_path / "a.txt").write_text("\n".join(TEXT))
  out = tmp_path / "new/pieces.model"
  train = ["vocab", "train", "--input", str(tmp_path / "*.txt"), "--out", str(out), "--size"]
  assert cli.main([*train, "16"]) == 0
  assert f"sentencepiece_model_file = '{out}'" in capsys.readouterr().out
  assert cli.main(["vocab", "show", str(out), "the red cat <extra_id_0> the <extra_id_99>"]) == 0
  text = capsys.readouterr().out
  assert "16 pieces and 100 sentinels" in text
  vocabulary = import_seqio().SentencePieceVocabulary(str(out), extra_ids=100)
  ids = vocabulary.encode("the red cat <extra_id_0> the <extra_id_99>")
  assert {115, 16} <= set(ids)
  assert f"▁<extra_id_0> ▁ t h e ▁<extra_id_99>\n{' '.join(map(str, ids))}\n" in text
  with pytest.raises(SystemExit):
    cli.main([*train, "17"])
  assert f"{out} exists, and models may have been trained with it" in capsys.readouterr().err
  assert cli.main(["vocab", "show", str(out), "the red cat"]) == 0
  assert "16 pieces" in capsys.readouterr().out


@pytest.fixture
def rows(tmp_path: pathlib.Path) -> str:
  """Texts of lowercase words, in which digits, capitals and é are rare."""
  words = [a + b + c + d + a for a in "bcdfgh" for b in "aeiou" for c in "lmnprst" for d in "aio"]
  lines = [" ".join(words[n % 3 :: 3]) for n in range(60)]
  lines[7] = f"0123456789 QX & £5 é\n{lines[7]}"
  path = tmp_path / "rows.jsonl"
  path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
  return str(path)


def test_vocab_train_loses_no_digit_and_no_other_character(
  rows: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
  text = "In 1984, Q & X paid £5; é 漢"
  train = ["vocab", "train", "--input", rows, "--size", "1000", "--out"]
  assert cli.main([*train, str(tmp_path / "a.model"), "--model_type", "bpe"]) == 0
  printed = capsys.readouterr().out
  assert "equals the text, except for spaces, in 60 of 60" in printed
  assert "lost line breaks, tabs and runs of spaces: 0.0% of the characters" in printed
  pieces = load_sentencepiece(tmp_path / "a.model").encode(text, out_type=str)
  assert {"1", "Q", "&", "<0xC3>"} <= set(pieces)
  assert load_sentencepiece(tmp_path / "a.model").decode_pieces(pieces) == text


def test_options_of_sentencepiece_decide_what_is_lost(
  rows: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
  train = ["vocab", "train", "--input", rows, "--size", "50", "--out", str(tmp_path / "a.model")]
  assert cli.main([*train, "--character_coverage", "0.9995"]) == 0
  assert "59 of 60\n  lost characters: '" in capsys.readouterr().out
  train[-1] = str(tmp_path / "b.model")
  with pytest.raises(SystemExit):
    cli.main([*train, "--byte_fallback", "perhaps"])
  assert 'cannot parse "perhaps" as bool' in capsys.readouterr().err
  assert cli.main([*train, "--user_defined_symbols", "[NLU],[S2S]"]) == 0
  assert load_sentencepiece(tmp_path / "b.model").piece_to_id("[S2S]") == 4


def test_white_space_of_code_is_lost_unless_options_keep_it() -> None:
  text = inspect.getsource(json.decoder).strip().replace("raise", "\traise")
  options = dict(option.split() for option in KEEP_WHITE_SPACE.removeprefix("--").split(" --"))
  lossy, exact = (
    sentencepiece.SentencePieceProcessor(
      model_proto=train_sentencepiece(text.splitlines(), 600, {"byte_fallback": "true"} | more)
    )
    for more in ({}, options)
  )
  counts = count_lost(text, lossy)
  described = list(describe_lost(counts))
  assert described[0] == "decode(encode(text)) equals the text, except for spaces, in 1 of 1"
  runs = sum(len(run) - 1 for run in re.findall(" +", text))
  share = (text.count("\n") + text.count("\t") + runs) / len(text)
  assert described[1].endswith(f": {share:.1%} of the characters")
  assert "as in source code" in "".join(lost_text_problems(counts))
  assert exact.decode(exact.encode(text)) == text


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
