"""Known tasks: their texts and metrics equal T5's, their data is found, and the package t5 can be imported."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rosetta_t5.data.dataset_config import DatasetConfig, find_checked_task, has_split
from rosetta_t5.data.local_copies import DATA_VARIABLE as VARIABLE
from rosetta_t5.data.local_copies import find_tfds
from rosetta_t5.data.tasks import catalogue, known_tasks, text_formats
from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow


@pytest.fixture(autouse=True)
def own_data_folder(
  isolated_registries: None, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
  """Hides all data but the test's own."""
  monkeypatch.setenv(VARIABLE, str(tmp_path))
  monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture(scope="module")
def theirs() -> Any:
  """The preprocessors of t5, which take TFDS's examples."""
  return pytest.importorskip("t5.data.preprocessors", reason="the package t5 is not installed")


def texts(convert: Any, examples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """Applies one of our text formats to the examples."""
  return preprocessed(import_seqio().map_over_dataset(convert), examples)


def preprocessed(function: Any, examples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  stacked = {key: [example[key] for example in examples] for key in examples[0]}
  if len(examples) == 1:
    dataset = import_tensorflow().data.Dataset.from_tensors(examples[0])
  else:
    dataset = import_tensorflow().data.Dataset.from_tensor_slices(stacked)
  return list(function(dataset).as_numpy_iterator())


def assert_same(ours: Any, expected: Any, examples: Sequence[dict[str, Any]]) -> None:
  pairs = zip(texts(ours, examples), preprocessed(expected, examples), strict=True)
  for a, b in pairs:
    assert {k: v.tolist() if hasattr(v, "tolist") else v for k, v in a.items()} == {
      k: v.tolist() if hasattr(v, "tolist") else v for k, v in b.items()
    }


@pytest.mark.slow
def test_glue_texts_and_labels_are_t5s(theirs: Any) -> None:
  configs = pytest.importorskip("tensorflow_datasets").text.glue.Glue.builder_configs
  glue_utils = pytest.importorskip("t5.data.glue_utils")
  assert set(configs) == set(known_tasks.GLUE_BENCHMARKS)
  for name, config in configs.items():
    _, labels, columns, _ = known_tasks.GLUE_BENCHMARKS[name]
    assert list(labels) == list(config.label_classes or [])
    example = {column: f" {column}, it's  (two) words" for column in columns}
    label: list[Any] = [4.37, 0.0] if name == "stsb" else [1, -1]
    examples = [{**example, "label": value, "idx": n} for n, value in enumerate(label)]
    ours = catalogue.TASKS[f"glue_{name}_v2"].text_format
    assert_same(ours, glue_utils.get_glue_text_preprocessor(config), examples)


@pytest.mark.slow
def test_squad_translation_and_summary_texts_are_t5s(theirs: Any) -> None:
  question = {
    "id": "1",
    "question": "What's 'it'?  (Really)",
    "context": "It is\n100%, U.S.-made; no?",
    "answers": {"text": ["a dog.", "the  dog"]},
  }
  assert_same(text_formats.squad, theirs.squad, [question])
  pair = {"de": "Das ist gut.", "en": "That is good.", "ro": "Bun."}
  for target in ("de", "ro"):
    ours = functools.partial(text_formats.translate, source="en", target=target)
    assert_same(ours, lambda ds, t=target: theirs.translate(ds, "en", t), [pair])
  article = {"article": "Long . Text .", "highlights": "Short ."}
  ours = functools.partial(text_formats.summarize, article="article", summary="highlights")
  expected = lambda ds: theirs.summarize(ds, "article", "highlights")  # noqa: E731
  assert_same(ours, expected, [article])


def test_lambada_replaces_the_last_word_with_a_sentinel() -> None:
  (example,) = texts(text_formats.last_word, [{"text": 'He said:\n"Go home, Bob'}])
  assert example == {"inputs": b'He said:\n"Go home, <extra_id_0>', "targets": b"Bob"}


def test_zero_shot_lambada_has_the_passage_and_the_last_word_with_its_space() -> None:
  task = catalogue.TASKS["lambada_eval"]
  (example,) = texts(task.text_format, [{"text": 'He said:\n"Go home, Bob'}])
  assert example == {"inputs": b'He said:\n"Go home,', "targets": b" Bob"}


def test_a_known_task_can_have_another_vocabulary(tmp_path: pathlib.Path) -> None:
  seqio = import_seqio()
  (tmp_path / "lambada").mkdir()
  (tmp_path / "lambada/lambada_test.jsonl").write_text(json.dumps({"text": "Go home"}) + "\n")
  name = catalogue.known_task("lambada_eval", seqio.ByteVocabulary())
  assert catalogue.known_task("lambada_eval", seqio.ByteVocabulary()) == name
  assert catalogue.known_task("lambada_eval", seqio.ByteVocabulary(extra_ids=7)) != name
  task = seqio.get_mixture_or_task(name)
  (example,) = task.get_dataset({"inputs": 9, "targets": 9}, "test", shuffle=False)
  # Byte ids start at 3. There is no end token, because the word continues the passage.
  assert example["inputs"].numpy().tolist() == [byte + 3 for byte in b"Go"]
  assert example["targets"].numpy().tolist() == [byte + 3 for byte in b" home"]
  with pytest.raises(
    ValueError,
    match=r"known_task\.name must be one of .*'lambada_evil' \(did you mean 'lambada_eval'",
  ):
    catalogue.known_task("lambada_evil", seqio.ByteVocabulary())


def test_postprocessors_return_classes_numbers_and_answers() -> None:
  labels = ["no", "yes"]
  classes = [text_formats.label_to_class(text, labels) for text in ("yes", "no", "maybe")]
  assert classes == [1, 0, -1]
  assert [text_formats.string_to_float(text) for text in ("3.4", "x")] == [3.4, -1.0]
  example = {"answers": [b"a", b"b"]}
  assert text_formats.squad_answers("a", example=example, is_target=True) == ["a", "b"]
  assert text_formats.squad_answers("a", example=example) == "a"


def test_missing_data_is_reported_with_the_folders_searched_and_what_to_set() -> None:
  lengths = {"inputs": 32, "targets": 32}
  cfg = DatasetConfig("the_pile_span_corruption", lengths, "train", 4, shuffle=False, seed=0)
  with pytest.raises(
    ValueError,
    match=r"not on this machine(.|\n)*the_pile/1\.0\.0, as TensorFlow Datasets(.|\n)*docs/data.md",
  ):
    find_checked_task(cfg)


def write_squad(folder: pathlib.Path) -> None:
  (folder / "squad").mkdir(parents=True)
  qas = [{"id": "7", "question": "Who?", "answers": [{"text": "Ann"}, {"text": "Ann B."}]}]
  data = {"data": [{"paragraphs": [{"context": "Ann is.", "qas": qas}]}]}
  (folder / "squad/dev-v1.1.json").write_text(json.dumps(data))


def test_squad_is_read_from_its_own_files(tmp_path: pathlib.Path) -> None:
  write_squad(tmp_path)
  source = catalogue.KnownSource("squad", catalogue.TASKS["squad_v010_allanswers"])
  assert list(source.splits) == ["validation"]
  (example,) = source.get_dataset("validation", shuffle=False).as_numpy_iterator()
  assert example["answers"]["text"].tolist() == [b"Ann", b"Ann B."]


def test_distributed_files_have_whole_splits_only(tmp_path: pathlib.Path) -> None:
  write_squad(tmp_path)
  name = catalogue.known_task("squad_v010_allanswers", import_seqio().ByteVocabulary())
  task = import_seqio().get_mixture_or_task(name)
  assert has_split(task, "validation")
  assert not has_split(task, "validation[:50%]")


@pytest.fixture
def folder_of_the_command_line(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
  """The folder that --tfds_data_dir names."""
  import_seqio().set_tfds_data_dir_override(str(tmp_path / "mine"))
  yield tmp_path / "mine"
  import_seqio().set_tfds_data_dir_override(None)


def test_the_folder_of_the_command_line_is_searched_before_all_others(
  tmp_path: pathlib.Path, folder_of_the_command_line: pathlib.Path
) -> None:
  spec = catalogue.TASKS["squad_v010_allanswers"]
  made = tmp_path / spec.tfds.replace(":", "/")
  made.mkdir(parents=True)
  (made / "dataset_info.json").write_text("{}")
  write_squad(folder_of_the_command_line)
  source = catalogue.KnownSource("squad", spec)
  assert list(source.splits) == ["validation"]  # from the file; the TFDS folder has none


def test_mnli_examples_without_a_gold_label_are_left_out(
  tmp_path: pathlib.Path,
) -> None:
  (tmp_path / "glue/mnli").mkdir(parents=True)
  rows = ["sentence1\tsentence2\tgold_label", 'A man.\tA "person.\tentailment', "x\ty\t-"]
  (tmp_path / "glue/mnli/dev_matched.tsv").write_text("\n".join(rows))
  spec = catalogue.TASKS["glue_mnli_v2"]
  source = catalogue.KnownSource("mnli", spec)
  dataset = source.get_dataset("validation_matched", shuffle=False).map(spec.text_format)
  (example,) = dataset.as_numpy_iterator()
  assert example["inputs"] == b'mnli hypothesis: A "person. premise: A man.'
  assert example["targets"] == b"entailment"


def test_the_requested_version_of_a_tfds_dataset_is_found_in_either_spelling(
  tmp_path: pathlib.Path,
) -> None:
  for made in ("the_pile/2.0.0", "ThePile/1.0.0"):
    (tmp_path / made).mkdir(parents=True)
    (tmp_path / made / "dataset_info.json").write_text("{}")
  assert find_tfds("the_pile:1.0.0", tmp_path) == tmp_path / "ThePile/1.0.0"
  assert find_tfds("the_pile:3.0.0", tmp_path) == tmp_path / "the_pile/2.0.0"


def test_a_tfds_folder_with_a_name_in_camel_case_is_read(tmp_path: pathlib.Path) -> None:
  tf = import_tensorflow()
  tfds = pytest.importorskip("tensorflow_datasets")
  features = tfds.features.FeaturesDict(
    {"text": tfds.features.Text(), "meta": {"pile_set_name": tfds.features.Text()}}
  )
  folder = tmp_path / "ThePile/1.0.0"
  folder.mkdir(parents=True)
  rows = [{"text": f"text {n}", "meta": {"pile_set_name": "Books3"}} for n in range(20)]
  with tf.io.TFRecordWriter(str(folder / "the_pile-train.tfrecord-00000-of-00001")) as file:
    for row in rows:
      file.write(features.serialize_example(features.encode_example(row)))
  features.save_config(folder)
  split = {
    "name": "train",
    "shardLengths": [str(len(rows))],
    "numBytes": "1000",
    "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
  }
  info = {"name": "the_pile", "version": "1.0.0", "fileFormat": "tfrecord", "splits": [split]}
  (folder / "dataset_info.json").write_text(json.dumps(info))
  source = catalogue.KnownSource("pile", catalogue.TASKS["the_pile_span_corruption"])
  found = [
    e["text"].decode() for e in source.get_dataset("train", shuffle=False).as_numpy_iterator()
  ]
  assert found == [row["text"] for row in rows]


def test_a_later_registration_under_a_known_name_replaces_the_known_task() -> None:
  seqio = import_seqio()
  seqio.TaskRegistry.remove("squad_v010_allanswers")
  catalogue.register("squad_v010_allanswers")
  ours = seqio.TaskRegistry.get("squad_v010_allanswers")
  feature = seqio.Feature(seqio.ByteVocabulary())

  def read(split: str, shuffle_files: bool, seed: int | None = None) -> Any:
    raise AssertionError("not read here")

  options = {"source": seqio.FunctionDataSource(read, ["train"]), "preprocessors": []}
  seqio.TaskRegistry.add("squad_v010_allanswers", **options, output_features={"targets": feature})
  assert seqio.TaskRegistry.get("squad_v010_allanswers") is not ours
  with pytest.raises(ValueError, match="duplicate"):  # the other task is not replaced
    seqio.TaskRegistry.add("squad_v010_allanswers", **options, output_features={"targets": feature})
  catalogue.register("squad_v010_allanswers")  # not even by the known task
  assert seqio.TaskRegistry.get("squad_v010_allanswers") is not ours


def test_the_package_t5_can_be_imported_after_a_known_task_is_registered(theirs: Any) -> None:
  import importlib
  import sys

  seqio = import_seqio()
  for registry in (seqio.TaskRegistry, seqio.MixtureRegistry):
    for name in list(registry.names()):
      registry.remove(name)
  catalogue.register("glue_mnli_v002")
  saved = {n: sys.modules.pop(n) for n in ("t5.data.tasks", "t5.data.mixtures") if n in sys.modules}
  try:
    importlib.import_module("t5.data.mixtures")
    catalogue.register("squad_v010_allanswers")
    task = seqio.TaskRegistry.get("squad_v010_allanswers")
    assert isinstance(task.source, seqio.TfdsDataSource)  # t5's task is used
  finally:
    for n in ("t5.data.tasks", "t5.data.mixtures"):
      sys.modules.pop(n, None)
    sys.modules.update(saved)
