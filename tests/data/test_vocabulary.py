"""The vocabularies of task and model are compared by content and with the embedding table's size."""

from __future__ import annotations

import pathlib
import shutil
import types
from collections.abc import Callable
from typing import Any

import pytest
import sentencepiece

from rosetta_t5.data import (
  DatasetConfig,
  get_vocabulary,
  round_vocab_size_to_multiple,
  verify_matching_vocabs,
)
from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow
from rosetta_t5.data.vocabularies.sentencepiece_models import (
  load_sentencepiece,
  sentinel_ids,
  train_sentencepiece,
)
from rosetta_t5.data.vocabularies.task_vocabularies import same_vocabulary

Config = Callable[..., DatasetConfig]
TEXT = [f"the {a} {b} of the {c}" for a in ("red", "old") for b in ("cat", "hat") for c in ("sea",)]


@pytest.fixture
def sentencepiece_file(tmp_path: pathlib.Path) -> pathlib.Path:
  path = tmp_path / "pieces.model"
  path.write_bytes(train_sentencepiece(TEXT, vocab_size=16))
  return path


def model_with(vocabulary: Any, rows: int = 384, output: Any = None) -> Any:
  """A stand-in with the parts of a model that are used: its vocabularies and its network's config."""
  config = type("T5Config", (), {"vocab_size": rows})()
  return types.SimpleNamespace(
    input_vocabulary=vocabulary,
    output_vocabulary=output or vocabulary,
    network_config=config,
  )


def test_a_tasks_vocabularies_are_those_of_inputs_and_targets(
  add_task: Callable[..., str], config: Config
) -> None:
  bytes_ = import_seqio().ByteVocabulary()
  assert get_vocabulary(config(add_task(["a"]))) == (bytes_, bytes_)


def test_matching_vocabularies_pass(add_task: Callable[..., str], config: Config) -> None:
  verify_matching_vocabs(config(add_task(["a"])), model_with(import_seqio().ByteVocabulary()))


def test_different_vocabularies_are_refused_with_both_names(
  add_task: Callable[..., str], config: Config, sentencepiece_file: pathlib.Path
) -> None:
  seqio = import_seqio()
  name = add_task(["a"])
  model = model_with(
    seqio.ByteVocabulary(), output=seqio.SentencePieceVocabulary(str(sentencepiece_file))
  )
  text = rf"'{name}' .*different output vocabularies.*ByteVocabulary.*pieces.model: 16 tokens"
  with pytest.raises(ValueError, match=text):
    verify_matching_vocabs(config(name), model)


def test_one_vocabulary_under_two_paths_is_the_same(
  add_task: Callable[..., str], config: Config, sentencepiece_file: pathlib.Path
) -> None:
  seqio = import_seqio()
  copy = sentencepiece_file.with_name("copy.model")
  shutil.copy(sentencepiece_file, copy)
  of_task, of_model = (
    seqio.SentencePieceVocabulary(str(path), extra_ids=4) for path in (sentencepiece_file, copy)
  )
  assert of_task != of_model  # SeqIO compares paths
  verify_matching_vocabs(config(add_task(["a"], vocabulary=of_task)), model_with(of_model))


def test_vocabularies_with_different_numbers_of_extra_ids_differ(
  sentencepiece_file: pathlib.Path,
) -> None:
  seqio = import_seqio()
  a, b = (seqio.SentencePieceVocabulary(str(sentencepiece_file), extra_ids=n) for n in (4, 5))
  assert not same_vocabulary(a, b)


def test_a_vocabulary_larger_than_the_embedding_table_is_refused_with_the_line_to_change(
  add_task: Callable[..., str], config: Config
) -> None:
  name = add_task(["a"])
  model = model_with(import_seqio().ByteVocabulary(), rows=128)
  text = rf"'{name}' has 259 tokens .* only 128 rows\. Set network\.T5Config\.vocab_size = 384"
  with pytest.raises(ValueError, match=text):
    verify_matching_vocabs(config(name), model)


def test_a_model_whose_padding_is_not_token_0_is_refused_with_the_line_to_change(
  add_task: Callable[..., str], config: Config
) -> None:
  model = model_with(import_seqio().ByteVocabulary())
  model.network_config.pad_id = 5
  with pytest.raises(ValueError, match=r"network\.T5Config\.pad_id = 5, but .* padded with 0"):
    verify_matching_vocabs(config(add_task(["a"])), model)


def test_round_vocab_size_to_multiple() -> None:
  assert round_vocab_size_to_multiple(import_seqio().ByteVocabulary()) == 384
  assert round_vocab_size_to_multiple(import_seqio().ByteVocabulary(), divisor=7) == 259


def test_a_vocabulary_too_large_for_its_text_is_refused() -> None:
  with pytest.raises(ValueError, match=r"No SentencePiece vocabulary of 4000 pieces"):
    train_sentencepiece(TEXT, vocab_size=4000)


def test_the_same_text_gives_the_same_vocabulary() -> None:
  assert train_sentencepiece(TEXT, vocab_size=16) == train_sentencepiece(TEXT, vocab_size=16)


SPM_TRAIN_DEFAULTS: dict[str, int] = {"pad_id": -1, "unk_id": 0, "bos_id": 1, "eos_id": 2}


def pieces_with_ids(path: pathlib.Path, text: list[str], size: int, **ids: int) -> str:
  given = {name: str(value) for name, value in (SPM_TRAIN_DEFAULTS | ids).items()}
  path.write_bytes(train_sentencepiece(text, size, given))
  return str(path)


@pytest.mark.parametrize("ids", [{}, {"pad_id": 3}, {"pad_id": 1, "bos_id": -1}])
def test_an_unknown_piece_at_id_0_is_not_padding_and_padding_decodes_to_nothing(
  tmp_path: pathlib.Path, ids: dict[str, int]
) -> None:
  file = pieces_with_ids(tmp_path / "pieces.model", TEXT, 16, **ids)
  vocabulary = import_seqio().SentencePieceVocabulary(file, extra_ids=4)
  theirs = sentencepiece.SentencePieceProcessor(model_file=file)
  text = "the red Q cat"
  tokens = vocabulary.encode(text)
  assert tokens == [id_ or vocabulary.unk_id for id_ in theirs.encode(text)]
  assert vocabulary.unk_id in tokens
  assert vocabulary.encode_tf(text).numpy().tolist() == tokens
  assert load_sentencepiece(file).encode(text) == tokens
  decoded = vocabulary.decode_tf(
    import_tensorflow().constant([[*tokens, 0, 0], [0] * (len(tokens) + 2)])
  )
  assert [row.decode() for row in decoded.numpy()] == ["the red ⁇ cat".replace("⁇", " ⁇ "), ""]
  assert vocabulary.decode([*theirs.encode("old"), 0, 0]) == "old"
  assert vocabulary.eos_id == theirs.eos_id()
  assert vocabulary.vocab_size == 20


@pytest.mark.parametrize("ids", [{"unk_id": 3}, {"eos_id": 0, "unk_id": 2}, {"bos_id": -1}])
def test_a_vocabulary_without_an_id_for_padding_is_refused_with_the_flags_to_set(
  tmp_path: pathlib.Path, ids: dict[str, int]
) -> None:
  file = pieces_with_ids(tmp_path / "pieces.model", TEXT, 16, **ids)
  with pytest.raises(ValueError, match=r"at id 0, which means padding .*--pad_id=0 --eos_id=1"):
    _ = import_seqio().SentencePieceVocabulary(file).vocab_size


def test_sentinels_are_the_last_ids_whether_seqio_adds_them_or_not(
  sentencepiece_file: pathlib.Path,
) -> None:
  seqio = import_seqio()
  assert sentinel_ids(seqio.SentencePieceVocabulary(str(sentencepiece_file))) == []
  added = seqio.SentencePieceVocabulary(str(sentencepiece_file), extra_ids=3)
  expected = [added.vocab_size - 1 - number for number in range(3)]
  assert sentinel_ids(added) == expected
  complete = sentencepiece_file.with_name("complete.model")
  complete.write_bytes(added.sp_model)
  assert sentinel_ids(seqio.SentencePieceVocabulary(str(complete))) == expected
  assert sentinel_ids(seqio.ByteVocabulary(extra_ids=2)) == [260, 259]


def test_a_model_that_has_sentinels_gets_no_second_ones(
  sentencepiece_file: pathlib.Path, tmp_path: pathlib.Path
) -> None:
  seqio = import_seqio()
  added = seqio.SentencePieceVocabulary(str(sentencepiece_file), extra_ids=3)
  (tmp_path / "with.model").write_bytes(added.sp_model)
  again = seqio.SentencePieceVocabulary(str(tmp_path / "with.model"), extra_ids=3)
  assert again.vocab_size == added.vocab_size
  assert again.encode("a <extra_id_0>") == added.encode("a <extra_id_0>")
