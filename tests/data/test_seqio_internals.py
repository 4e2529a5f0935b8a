"""SeqIO still has the private names that `seqio_internals` uses."""

from __future__ import annotations

import importlib
import pathlib

import pytest

from rosetta_t5.data import seqio_internals
from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow

ADVICE = (
  "SeqIO has moved a private name. Look for the new name in seqio's source, use it in "
  "rosetta_t5/data/seqio_internals.py, and raise the bound on seqio in setup.cfg."
)


@pytest.mark.parametrize(
  ("module", "name"),
  [("seqio.vocabularies", "_load_model"), ("seqio.utils", "_TFDS_DATA_DIR_OVERRIDE")],
)
def test_seqio_has_the_private_name(module: str, name: str) -> None:
  import_tensorflow()
  assert hasattr(importlib.import_module(module), name), ADVICE


def test_the_folder_of_tfds_is_read_back() -> None:
  seqio = import_seqio()
  seqio.set_tfds_data_dir_override(None)  # An earlier test of this process may have set it.
  assert seqio_internals.tfds_data_dir_override() is None
  try:
    seqio.set_tfds_data_dir_override("/data")
    assert seqio_internals.tfds_data_dir_override() == "/data", ADVICE
  finally:
    seqio.set_tfds_data_dir_override(None)


def test_passthrough_features_of_a_converter_are_known() -> None:
  seqio = import_seqio()
  features = {"id": seqio.FeatureConverter.FeatureSpec("int32")}
  converter = seqio.EncDecFeatureConverter(pack=False, passthrough_features=features)
  assert seqio_internals.passthrough_features(converter) == {"id"}, ADVICE


def test_vocabularies_load_their_models_with_the_replaced_loader() -> None:
  vocabulary = import_seqio().SentencePieceVocabulary("gs://bucket/missing.model")
  with pytest.raises(ValueError, match=r"missing\.model is not on this machine"):
    _ = vocabulary.vocab_size


def test_results_of_evaluations_are_written_in_utf8(tmp_path: pathlib.Path) -> None:
  logger = import_seqio().JSONLogger(str(tmp_path))
  seqio_internals.write_utf8(logger)
  rows = import_tensorflow().data.Dataset.from_tensors({"inputs_pretokenized": "こんにちは"})
  logger("greetings", 1, {}, rows, {"prediction": ["é"]}, ["ñ"])
  text = (tmp_path / "greetings-000001.jsonl").read_text(encoding="utf-8")
  assert all(word in text for word in ("こんにちは", "é", "ñ")), ADVICE
