"""Local copies of gs:// paths, GPT-2's vocabulary, and the scripts that check copies of datasets."""

from __future__ import annotations

import json
import pathlib
import pickle
from typing import Any

import pyarrow
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from rosetta_t5.data.local_files.dataset_copies import check_pile, install_lambada
from rosetta_t5.data.local_files.local_assets import VARIABLE, local_path
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio, import_tensorflow
from rosetta_t5.data.vocabularies.gpt2_vocabulary import END, gpt2_vocabulary
from rosetta_t5.data.vocabularies.sentencepiece_training import train_sentencepiece
from rosetta_t5.data.vocabularies.task_vocabularies import same_vocabulary
from rosetta_t5.data.vocabularies.vocab_command import main as vocab

T5 = "gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"
TEXT = [f"the {a} {b} of the {c}" for a in ("red", "old") for b in ("cat", "hat") for c in ("sea",)]


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
  path = tmp_path / "copies/cc_all.32000.100extra/sentencepiece.model"
  path.parent.mkdir(parents=True)
  path.write_bytes(train_sentencepiece(TEXT, vocab_size=16))
  return path


@pytest.mark.parametrize("setting", ["{0}/copies", f"{T5}={{1}}", "gs://t5-data/vocabs={0}/copies"])
def test_a_public_path_is_read_from_its_copy(
  model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
  monkeypatch.setenv(VARIABLE, "gs://other=/nowhere," + setting.format(tmp_path, model))
  assert local_path(T5) == str(model)


def test_a_public_path_without_a_copy_is_refused_with_the_paths_searched_and_what_to_set(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setenv(VARIABLE, str(tmp_path))
  with pytest.raises(ValueError, match=rf"Looked for {tmp_path}/t5-data/vocabs.*{VARIABLE}='{T5}="):
    _ = import_seqio().SentencePieceVocabulary(T5).vocab_size
  with pytest.raises(ValueError, match=r"no vocabulary file /nowhere/x\.model.*vocab train"):
    _ = import_seqio().SentencePieceVocabulary("/nowhere/x.model").vocab_size


def test_sentinels_that_a_path_promises_are_added_to_its_copy(
  model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setenv(VARIABLE, f"{T5}={model}")
  seqio = import_seqio()
  promised = seqio.SentencePieceVocabulary(T5)
  assert promised.vocab_size == 116
  assert same_vocabulary(promised, seqio.SentencePieceVocabulary(str(model), extra_ids=100))
  assert "extra_id_0" in promised.tokenizer.id_to_piece(115)


def test_vocabularies_with_differently_ordered_sentinels_are_the_same(model: pathlib.Path) -> None:
  seqio = import_seqio()
  options: list[dict[str, Any]] = [{}, {"reverse_extra_ids": False}]
  a, b = (seqio.SentencePieceVocabulary(str(model), extra_ids=4, **o) for o in options)
  assert a.sp_model != b.sp_model
  assert same_vocabulary(a, b)


@pytest.fixture
def gpt2(tmp_path: pathlib.Path) -> tuple[str, str]:
  """A small BPE vocabulary in GPT-2's files: bytes, some merges, the end token."""
  characters = sorted(ByteLevel.alphabet())
  merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("l", "l"), ("'", "ll")]
  pieces = [*characters, *("".join(pair) for pair in merges), END]
  (tmp_path / "vocab.json").write_text(json.dumps({piece: n for n, piece in enumerate(pieces)}))
  lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
  (tmp_path / "merges.txt").write_text("\n".join(lines))
  return str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")


def test_gpt2s_merges_are_applied_by_rank_and_id_0_is_left_for_padding(
  gpt2: tuple[str, str],
) -> None:
  vocabulary = gpt2_vocabulary(*gpt2, extra_ids=5)
  ids = json.loads(pathlib.Path(gpt2[0]).read_text())
  pieces = {number + 1: piece for piece, number in ids.items()}
  tokens = vocabulary.encode("the thell'll the")
  assert [pieces[t] for t in tokens] == ["the", "Ġthe", "ll", "'ll", "Ġthe"]
  assert tokens == [258, 259, 260, 261, 259]
  assert vocabulary.eos_id == ids["<|endoftext|>"] + 1
  assert vocabulary.vocab_size == len(ids) + 1 + 5
  assert 0 not in vocabulary.encode("".join(map(chr, range(300))))


def test_gpt2s_vocabulary_decodes_every_text_it_encodes_in_python_and_tensorflow(
  gpt2: tuple[str, str],
) -> None:
  vocabulary = gpt2_vocabulary(*gpt2)
  tf = import_tensorflow()
  for text in ("the  cat\n\n ", "naïve 日本 1234 don't", "\t\x00"):
    assert vocabulary.decode(vocabulary.encode(text)) == text
    tokens = vocabulary.encode_tf(tf.constant(text))
    assert tokens.numpy().tolist() == vocabulary.encode(text)
    assert vocabulary.decode_tf(tokens).numpy().decode() == text
  assert vocabulary.decode([*vocabulary.encode("the cat"), vocabulary.eos_id]) == "the cat"
  assert pickle.loads(pickle.dumps(vocabulary)) == vocabulary


def test_files_of_another_format_are_refused_as_gpt2s_vocabulary(gpt2: tuple[str, str]) -> None:
  with pytest.raises(ValueError, match=r"are not GPT-2's vocab\.json and merges\.txt"):
    gpt2_vocabulary(gpt2[1], gpt2[0]).encode("a")


def test_vocab_train_writes_a_model_and_prints_how_to_use_it(
  tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
  (tmp_path / "a.txt").write_text("\n".join(TEXT))
  out = tmp_path / "new/pieces.model"
  assert (
    vocab(["train", "--input", str(tmp_path / "*.txt"), "--size", "16", "--out", str(out)]) == 0
  )
  assert f"sentencepiece_model_file = '{out}'" in capsys.readouterr().out
  assert vocab(["show", str(out), "the red cat"]) == 0
  assert "16 pieces" in capsys.readouterr().out


@pytest.fixture
def pile(tmp_path: pathlib.Path) -> pathlib.Path:
  folder = tmp_path / "the_pile"
  (folder / "train").mkdir(parents=True)
  line = json.dumps({"text": "a text", "meta": {"pile_set_name": "Books3"}}) + "\n"
  data = pyarrow.compress(line.encode() * 20, codec="zstd", asbytes=True)
  for name in (*(f"train/{n:02}" for n in range(30)), "val", "test"):
    (folder / f"{name}.jsonl.zst").write_bytes(data)
  return folder


def test_a_complete_copy_of_the_pile_is_indexed(
  pile: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
  assert check_pile(["--data_dir", str(pile.parent), "--full"]) == 0
  assert f"No problems found. Train with --tfds_data_dir={pile.parent}" in capsys.readouterr().out
  index = json.loads((pile / "index.json").read_text())
  facts = index["files"][str(pile / "train/07.jsonl.zst")]
  assert facts["examples_read"] == 20
  assert facts["subsets"] == {"Books3": 20}


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
