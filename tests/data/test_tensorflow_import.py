"""TensorFlow is imported only when it is needed, quietly, and sees no GPU; SeqIO still has its private names."""

from __future__ import annotations

import functools
import importlib
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest

from rosetta_t5.data import task_metrics, tensorflow_import
from rosetta_t5.data.dataset_config import DatasetConfig, read_task
from rosetta_t5.data.pipeline import inference_data
from rosetta_t5.data.pipeline.model_features import TaskFeatureConverter
from rosetta_t5.data.tensorflow_import import (
  import_seqio,
  import_tensorflow,
  quiet_tensorflow_import,
  seqio,
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


api = importlib.import_module("tensorflow.python.autograph.impl.api")


def _conversions(build: Callable[[], Any]) -> int:
  """Returns how many functions AutoGraph converts during a call."""
  with mock.patch.object(api, "_convert_actual", wraps=api._convert_actual) as convert:
    build()
  return convert.call_count


def _negated_if_long(example: Mapping[str, Any]) -> dict[str, Any]:
  """A user's function that needs AutoGraph."""
  tokens = example["inputs"]
  if tf.size(tokens) > 2:
    for _ in tf.range(3):
      tokens = -tokens
  return {**example, "inputs": tokens}


def _own(example: Mapping[str, Any], change: Callable[[Any], Any]) -> Any:
  return change(example)


class _Vocabulary(import_seqio().ByteVocabulary):
  """A user's vocabulary."""


def _user_source(split: str, shuffle_files: bool) -> Any:
  rows = tf.data.Dataset.from_tensors({"inputs": "a b", "targets": ""})
  return rows.map(lambda row: row)


def _make_task(
  *preprocessors: Any, source: Any = None, vocabulary: Any = seqio.ByteVocabulary
) -> Any:
  """Returns a task with the inputs "a b", from a source of this package if there is no other one."""
  feature = seqio.Feature(vocabulary(), add_eos=False)
  source = source or inference_data._source(["a b"])
  features = {"inputs": feature, "targets": feature}
  return seqio.Task("a_task", source, features, [seqio.preprocessors.tokenize, *preprocessors])


def _read(task: Any) -> Any:
  cfg = DatasetConfig(task, {"inputs": 4, "targets": 4}, "train", 1, shuffle=False, seed=0)
  return read_task(cfg, task)


USERS_TASKS = {
  "preprocessor": lambda: _make_task(lambda rows: rows.map(_negated_if_long)),
  "decorated preprocessor": lambda: _make_task(seqio.map_over_dataset(_negated_if_long)),
  "argument of SeqIO's": lambda: _make_task(
    functools.partial(seqio.preprocessors.apply_feature_converter, feature_converter=_own)
  ),
  "source": lambda: _make_task(source=seqio.FunctionDataSource(_user_source, splits=["train"])),
  "vocabulary": lambda: _make_task(vocabulary=_Vocabulary),
}


@pytest.mark.parametrize("kind", ["preprocessor", "decorated preprocessor"])
def test_functions_of_users_may_need_autograph(kind: str) -> None:
  (row,) = _read(USERS_TASKS[kind]()).as_numpy_iterator()
  assert row["inputs"].tolist() == [-100, -35, -101]


@pytest.mark.parametrize("kind", ["source", "vocabulary", "preprocessor"])
def test_tasks_with_functions_of_users_are_built_with_autograph(kind: str) -> None:
  task = USERS_TASKS[kind]()
  assert _conversions(lambda: _read(task)) > 0


def test_a_partial_of_seqios_function_with_a_users_function_has_autograph() -> None:
  def is_unchanged(task: Any) -> bool:
    return without_autograph(len, task) is len

  assert is_unchanged(USERS_TASKS["argument of SeqIO's"]())
  assert not is_unchanged(_make_task(functools.partial(seqio.preprocessors.append_eos)))


def test_tasks_of_seqios_functions_are_read_converted_and_evaluated_without_autograph() -> None:
  task, lengths = _make_task(seqio.preprocessors.append_eos), {"inputs": 4, "targets": 4}
  converter = TaskFeatureConverter(seqio.EncDecFeatureConverter(pack=False), task.output_features)
  assert _conversions(lambda: converter(_read(task), lengths)) == 0
  preprocessors = inference_data.default_preprocessors()
  examples = functools.partial(inference_data.get_dataset_from_natural_text_examples, ["a b"])
  assert _conversions(lambda: examples(preprocessors, lengths, task.output_features)) == 0
  packed = TaskFeatureConverter(seqio.EncDecFeatureConverter(pack=True), task.output_features)
  assert _conversions(lambda: packed(_read(task), lengths)) > 0


def test_an_evaluator_of_seqio_is_built_without_autograph(isolated_registries: None) -> None:
  task = _make_task()
  how = {"preprocessors": task.preprocessors, "output_features": task.output_features}
  seqio.TaskRegistry.add("evaluated", task.source, **how, metric_fns=[task_metrics.accuracy])
  lengths = {"inputs": 4, "targets": 4}
  cfg = DatasetConfig("evaluated", lengths, "validation", 1, shuffle=False, seed=0)
  make = functools.partial(inference_data.make_evaluator, cfg, seqio.EncDecFeatureConverter)
  assert _conversions(make) == 0
