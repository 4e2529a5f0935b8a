"""The commands `rosetta-t5 prepare` and `rosetta-t5 inspect`."""

from __future__ import annotations

import json
import pathlib
import re

import numpy as np
import pytest

from rosetta_t5 import cli
from rosetta_t5.data.inspection import readable
from rosetta_t5.data.tensorflow_import import import_seqio
from rosetta_t5.data.vocabularies.sentencepiece_models import train_sentencepiece

WORDS = ("red", "old", "cat", "hat", "sea", "sun")
GIN = """
from __gin__ import dynamic_registration
import seqio
from rosetta_t5 import data

VOCABULARY = @seqio.SentencePieceVocabulary()
seqio.SentencePieceVocabulary.sentencepiece_model_file = '{model}'
MIXTURE_OR_TASK_NAME = @data.file_task()
TASK_FEATURE_LENGTHS = {{'inputs': 64, 'targets': 96}}
data.file_task:
  files = '{files}'
  vocabulary = %VOCABULARY
  objective = 'seq2seq'
  inputs = '{{question}} sun'
  targets = 'answer'
  validation_percent = 0.0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
  path = tmp_path_factory.mktemp("vocabulary") / "pieces.model"
  path.write_bytes(train_sentencepiece([" ".join(WORDS)] * 20, vocab_size=18))
  return str(path)


@pytest.fixture
def corpus(tmp_path: pathlib.Path) -> str:
  random = np.random.default_rng(0)
  for number in range(2):
    rows = [json.dumps({"text": " ".join(random.choice(WORDS, 12))}) + "\n" for _ in range(120)]
    (tmp_path / f"{number}.jsonl").write_text("".join(rows))
  return str(tmp_path / "*.jsonl")


@pytest.mark.slow
def test_prepared_data_can_be_inspected(
  model: str, corpus: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
  out = str(tmp_path / "out")
  options = ["--input", corpus, "--vocab", model, "--out", out, "--validation-percent", "20"]
  assert cli.main(["prepare", *options, "--workers", "1"]) == 0
  text = capsys.readouterr().out
  assert re.search(r"train +\d+ documents +\d+,\d+ tokens", text)
  assert f"data.prepared_task.folders = '{out}'" in text
  options = ["--batches", "2", "--examples", "1"]
  assert cli.main(["inspect", out, "--lengths", "inputs=32,targets=16", *options]) == 0
  text = capsys.readouterr().out
  assert re.search(r"inputs \(32\): .*⟨0⟩.*⟨1⟩ ?.*⟨end⟩\n", text)
  assert "rows 100.0% full" in text
  assert "no text is truncated" in text
  assert re.search(
    r"decode\(encode\(text\)\) equals the text, except for spaces, in (\d+) of \1\n", text
  )
  assert text.endswith("no problems found\n")


def test_prepare_prints_user_errors_and_exits(
  model: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
  options = ["--input", "/nowhere/*.txt", "--vocab", model, "--out", str(tmp_path / "out")]
  with pytest.raises(SystemExit) as ended:
    cli.main(["prepare", *options])
  assert ended.value.code == 1
  assert "error: There is no file '/nowhere/*.txt'" in capsys.readouterr().err


@pytest.mark.slow
def test_gin_files_and_files_of_rows_can_be_inspected(
  model: str,
  tmp_path: pathlib.Path,
  capsys: pytest.CaptureFixture[str],
  isolated_registries: None,
) -> None:
  rows = "".join(f'{n},"{"red cat " * 3}","old{" hat" * n}"\n' for n in range(20))
  (tmp_path / "rows.csv").write_text("id,question,answer\n" + rows)
  (tmp_path / "rows.gin").write_text(GIN.format(model=model, files=tmp_path / "rows.csv"))
  options = ["--batches", "1", "--examples", "1", "--batch-size", "5"]
  assert cli.main(["inspect", str(tmp_path / "rows.gin"), *options]) == 0
  text = capsys.readouterr().out
  assert ": red cat red cat red cat sun ⟨end⟩" in text
  assert "20 in all; truncated: 0.0% of the inputs, 0.0% of the targets, of the first 20" in text
  columns = ["--inputs", "question", "--targets", "answer", "--vocab", model]
  file = str(tmp_path / "rows.csv")
  lengths = ["--lengths", "inputs=64,targets=8"]
  assert cli.main(["inspect", file, *columns, *lengths, *options]) == 1
  text = capsys.readouterr().out
  assert " of the first 20 targets of 'files_" in text
  assert "would lose their end: half of them have more than" in text
  with pytest.raises(SystemExit):
    cli.main(["inspect", file, "--vocab", model])
  assert "no column 'text' among 'id', 'question', 'answer'" in capsys.readouterr().err


@pytest.mark.slow
def test_lost_characters_of_a_task_that_reads_lines_are_named(
  model: str,
  tmp_path: pathlib.Path,
  capsys: pytest.CaptureFixture[str],
  isolated_registries: None,
) -> None:
  seqio = import_seqio()
  (tmp_path / "train.txt").write_text("red {cat}\nold hat\n" * 8)
  feature = seqio.Feature(seqio.SentencePieceVocabulary(model, extra_ids=100))
  seqio.TaskRegistry.add(
    "lines_of_text",
    source=seqio.TextLineDataSource({"train": str(tmp_path / "train.txt")}),
    preprocessors=[
      lambda lines: lines.map(lambda line: {"inputs": line, "targets": line}),
      seqio.preprocessors.tokenize,
    ],
    output_features={"inputs": feature, "targets": feature},
  )
  arguments = ["--lengths", "inputs=64,targets=18", "--batches", "1", "--examples", "0"]
  assert cli.main(["inspect", "lines_of_text", *arguments]) == 1
  text = capsys.readouterr().out
  assert "lost characters: '{' 8 times, '}' 8 times" in text


def test_sentinels_and_the_end_token_are_shown(model: str) -> None:
  vocabulary = import_seqio().SentencePieceVocabulary(model, extra_ids=100)
  tokens = [*vocabulary.encode("red"), 117, *vocabulary.encode("sun cat"), 116, 1]
  assert readable(tokens, vocabulary) == "red ⟨0⟩ sun cat ⟨1⟩ ⟨end⟩"
