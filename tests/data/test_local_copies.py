"""Local copies of vocabularies that recipes name by gs:// paths."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from rosetta_t5.data.local_copies import ASSETS_VARIABLE as VARIABLE
from rosetta_t5.data.local_copies import local_path
from rosetta_t5.data.tensorflow_import import import_seqio
from rosetta_t5.data.vocabularies.sentencepiece_models import train_sentencepiece
from rosetta_t5.data.vocabularies.task_vocabularies import same_vocabulary

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
