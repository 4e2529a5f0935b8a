"""TensorFlow is imported only when it is needed, quietly, and sees no GPU; SeqIO still has its private names."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from rosetta_t5.data import tensorflow_import
from rosetta_t5.data.tensorflow_import import (
  import_seqio,
  import_tensorflow,
  quiet_tensorflow_import,
  tf,
  without_autograph,
)


def test_tensorflow_sees_no_gpu() -> None:
  assert import_tensorflow().config.get_visible_devices("GPU") == []


MESSAGES = b"""WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795227485.927581    7104 cudart_stub.cc:31] Could not find cuda drivers
"""


def test_start_up_messages_are_hidden_and_other_lines_are_printed(capfd):
  with quiet_tensorflow_import():
    os.write(2, MESSAGES + b"a line of another thread\n")
  os.write(2, b"after\n")
  assert capfd.readouterr().err == "a line of another thread\nafter\n"


def test_lines_before_an_error_are_printed(capfd):
  def fail():
    os.write(2, b"missing library\n")
    raise ImportError

  with pytest.raises(ImportError), quiet_tensorflow_import():
    fail()
  assert capfd.readouterr().err == "missing library\n"


PROGRAM = """
import os, sys
from rosetta_t5.data.tensorflow_import import seqio, tf
print("tensorflow" in sys.modules, "seqio" in sys.modules)
seqio.Feature, tf.constant
from clu import metric_writers
imported = [name in sys.modules for name in ("keras", "sklearn", "pyglove.core")]
print(*imported, "TF_USE_LEGACY_KERAS" in os.environ)
import tensorflow_text
import tensorflow_text.python.keras.layers
print(tensorflow_text.keras.layers.ToDense.__name__, tf.keras.layers.Dense(3)(tf.ones([2, 4])).shape)
print(type(seqio.dataset_providers.pg.oneof([1, 2])).__module__)
"""


@pytest.mark.slow
def test_tensorflow_seqio_keras_and_pyglove_are_imported_when_they_are_first_used():
  out = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
  assert out.stdout.splitlines() == [
    "False False",
    "False False False False",
    "ToDense (2, 3)",
    "pyglove.core.hyper.categorical",
  ]


ADVICE = (
  "SeqIO has moved a private name. Look for the new name in seqio's source, use it in "
  "rosetta_t5/data/tensorflow_import.py, and raise the bound on seqio in setup.cfg."
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
  assert tensorflow_import.tfds_data_dir_override() is None
  try:
    seqio.set_tfds_data_dir_override("/data")
    assert tensorflow_import.tfds_data_dir_override() == "/data", ADVICE
  finally:
    seqio.set_tfds_data_dir_override(None)


def test_passthrough_features_of_a_converter_are_known() -> None:
  seqio = import_seqio()
  features = {"id": seqio.FeatureConverter.FeatureSpec("int32")}
  converter = seqio.EncDecFeatureConverter(pack=False, passthrough_features=features)
  assert tensorflow_import.passthrough_features(converter) == {"id"}, ADVICE


def test_vocabularies_load_their_models_with_the_replaced_loader() -> None:
  vocabulary = import_seqio().SentencePieceVocabulary("gs://bucket/missing.model")
  with pytest.raises(ValueError, match=r"missing\.model is not on this machine"):
    _ = vocabulary.vocab_size


def test_results_of_evaluations_are_written_in_utf8(tmp_path: pathlib.Path) -> None:
  logger = import_seqio().JSONLogger(str(tmp_path))
  evaluator = types.SimpleNamespace(_loggers=(logger,))
  tensorflow_import.replace_loggers(evaluator, lambda each: each)
  rows = import_tensorflow().data.Dataset.from_tensors({"inputs_pretokenized": "こんにちは"})
  logger("greetings", 1, {}, rows, {"prediction": ["é"]}, ["ñ"])
  text = (tmp_path / "greetings-000001.jsonl").read_text(encoding="utf-8")
  assert all(word in text for word in ("こんにちは", "é", "ñ")), ADVICE


def _with_if(numbers: Any) -> Any:
  def negated_if_odd(number: Any) -> Any:
    if number % 2 == 1:
      number = -number
    return number

  return numbers.map(negated_if_odd)


def _with_len(numbers: Any) -> Any:
  return numbers.batch(2).map(lambda pair: len(pair))


def _with_loop_over_a_dataset(numbers: Any) -> Any:
  def sum_of_rows(number: Any) -> Any:
    total = number * 0
    for row in tf.data.Dataset.range(3):
      total += row
    return total

  return numbers.map(sum_of_rows)


def _with_len_of_a_dataset(numbers: Any) -> Any:
  return numbers.map(lambda number: len(tf.data.Dataset.range(number)))


@pytest.mark.parametrize(
  ("build", "values"),
  [
    (lambda numbers: numbers.map(lambda number: number + 1), [1, 2, 3]),
    (_with_if, [0, -1, 2]),
    (_with_len, [2, 1]),
    (_with_loop_over_a_dataset, [3, 3, 3]),
    (_with_len_of_a_dataset, [0, 1, 2]),
  ],
)
def test_functions_that_need_autograph_have_it(
  build: Callable[[Any], Any], values: list[int]
) -> None:
  dataset = without_autograph(build)(tf.data.Dataset.range(3))
  assert list(dataset.as_numpy_iterator()) == values


def test_functions_that_do_not_need_autograph_are_called_as_they_are() -> None:
  files = set()

  def note_file(number: Any) -> Any:
    files.add(inspect.currentframe().f_code.co_filename)
    return number

  without_autograph(lambda: tf.data.Dataset.range(3).map(note_file))()
  assert files == {__file__}


def test_a_loop_over_a_ragged_tensor_ends() -> None:
  def number_of_words(number: Any) -> Any:
    return sum(tf.size(row) for row in tf.strings.split([tf.strings.as_string(number)]))

  assert [row.shape[0] for row in tf.ragged.constant([[1, 2], [3]])] == [2, 1]
  with pytest.raises(TypeError):
    without_autograph(lambda: tf.data.Dataset.range(3).map(number_of_words))()


def test_a_mixture_with_a_function_that_needs_autograph_is_not_reported_as_failed(
  caplog: pytest.LogCaptureFixture,
) -> None:
  def build() -> Any:
    try:
      return _with_if(tf.data.Dataset.range(3))
    except TypeError:
      logging.getLogger("absl").error("Failed to load task '%s'", "mine")
      raise

  without_autograph(build)()
  assert not caplog.records
