"""SeqIO still has the private names that `seqio_internals` uses."""

from __future__ import annotations

from typing import Any

import pytest

from rosetta_t5.data.tensorflow_setup import seqio_internals
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio

ADVICE = (
  "SeqIO has moved a private name. Look for the new name in seqio's source, use it in "
  "rosetta_t5/data/tensorflow_setup/seqio_internals.py, and raise the bound on seqio in setup.cfg. "
)


def test_the_folder_of_tfds_is_read_back() -> None:
  seqio = import_seqio()
  try:
    seqio.set_tfds_data_dir_override("/data")
    assert seqio_internals.tfds_data_dir_override() == "/data", ADVICE
  except AttributeError as error:
    pytest.fail(f"{ADVICE}{error}")
  finally:
    seqio.set_tfds_data_dir_override(None)
  assert seqio_internals.tfds_data_dir_override() is None


def test_passthrough_features_of_a_converter_are_known() -> None:
  seqio = import_seqio()
  features = {"id": seqio.FeatureConverter.FeatureSpec("int32")}
  converter = seqio.EncDecFeatureConverter(pack=False, passthrough_features=features)
  assert seqio_internals.passthrough_features(converter) == {"id"}, ADVICE


def test_vocabularies_load_their_models_with_the_replaced_loader() -> None:
  seqio = import_seqio()
  path = "gs://bucket/missing.model"
  with pytest.raises(ValueError, match=r"missing\.model is not on this machine"):
    _load(seqio.SentencePieceVocabulary(path))


def _load(vocabulary: Any) -> int:
  try:
    return int(vocabulary.vocab_size)
  except AttributeError as error:
    pytest.fail(f"{ADVICE}{error}")
