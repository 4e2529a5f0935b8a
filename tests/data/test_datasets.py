"""get_dataset and get_training_eval_datasets: the contents of the batches, and the errors."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rosetta_t5.data import DatasetConfig, file_task, get_dataset, get_training_eval_datasets
from rosetta_t5.data.dataset_config import data_errors_named
from rosetta_t5.data.pipeline.inference_data import InferenceData
from rosetta_t5.data.tasks.file_task import create_task_from_tfexample_file
from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow

LINES = [f"line {number:03}" for number in range(12)]
Config = Callable[..., DatasetConfig]


@pytest.fixture
def converter() -> Any:
  return import_seqio().EncDecFeatureConverter


@pytest.fixture
def add_mixture() -> Iterator[Callable[..., str]]:
  seqio, added = import_seqio(), []

  def add(name: str, tasks: list[str]) -> str:
    seqio.MixtureRegistry.add(name, tasks, default_rate=1)
    added.append(name)
    return name

  yield add
  for name in added:
    seqio.MixtureRegistry.remove(name)


def texts(dataset: Any, feature: str = "encoder_input_tokens") -> list[str]:
  vocabulary = import_seqio().ByteVocabulary()
  rows = [row for batch in dataset.as_numpy_iterator() for row in batch[feature]]
  return [vocabulary.decode([int(token) for token in row if token]) for row in rows]


@pytest.mark.slow
def test_every_example_is_in_exactly_one_shard(
  add_task: Callable[..., str], config: Config, converter: Any
) -> None:
  cfg = config(add_task(LINES), batch_size=6)
  shards = [texts(get_dataset(cfg, shard, 3, converter, num_epochs=1)) for shard in range(3)]
  assert [len(shard) for shard in shards] == [4, 4, 4]
  assert sorted(line for shard in shards for line in shard) == LINES


def test_each_shard_has_its_part_of_the_batch(
  add_task: Callable[..., str], config: Config, converter: Any
) -> None:
  dataset = get_dataset(config(add_task(LINES), batch_size=6), 1, 3, converter)
  assert dataset.element_spec["encoder_input_tokens"].shape == (2, 16)


def test_a_batch_size_that_is_not_a_multiple_of_the_shards_is_refused_with_near_ones(
  add_task: Callable[..., str], config: Config, converter: Any
) -> None:
  with pytest.raises(
    ValueError, match=r"^Batch size \(7\) .* shards \(3\)\. Set BATCH_SIZE .* 6 or 9"
  ):
    get_dataset(config(add_task(LINES), batch_size=7), 0, 3, converter)


@pytest.mark.slow
def test_training_data_repeats_forever(
  add_task: Callable[..., str], config: Config, converter: Any
) -> None:
  dataset = get_dataset(config(add_task(LINES), batch_size=5), 0, 1, converter)
  assert texts(dataset.take(4)) == [*LINES, *LINES][:20]


@pytest.mark.slow
def test_one_seed_gives_one_order_and_another_seed_another(
  add_task: Callable[..., str], config: Config, converter: Any
) -> None:
  name = add_task(LINES)

  def order(seed: int) -> list[str]:
    return texts(get_dataset(config(name, shuffle=True, seed=seed), 0, 1, converter, num_epochs=1))

  assert order(1) == order(1)
  assert order(1) != order(2)
  assert sorted(order(1)) == LINES


@pytest.mark.slow
def test_packing_puts_several_examples_into_one_sequence(
  add_task: Callable[..., str], config: Config, converter: Any
) -> None:
  cfg = config(
    add_task(LINES), pack=True, batch_size=2, task_feature_lengths={"inputs": 24, "targets": 24}
  )
  batch = next(get_dataset(cfg, 0, 1, converter, num_epochs=1).as_numpy_iterator())
  # A line is 8 bytes and the end token: two fit into 24.
  expected = [1] * 9 + [2] * 9 + [0] * 6
  np.testing.assert_array_equal(batch["encoder_segment_ids"][0], expected)
  np.testing.assert_array_equal(batch["decoder_positions"][0], [*range(9), *range(9), *[0] * 6])


def test_long_features_are_trimmed_unless_trimming_is_off(
  add_task: Callable[..., str], config: Config, converter: Any
) -> None:
  cfg = config(add_task(["x" * 40], add_eos=False), batch_size=1)
  batch = next(get_dataset(cfg, 0, 1, converter, num_epochs=1).as_numpy_iterator())
  assert (batch["encoder_input_tokens"] > 0).all()
  untrimmed = dataclasses.replace(cfg, trim_output_features=False)
  dataset = get_dataset(untrimmed, 0, 1, converter, num_epochs=1)
  with pytest.raises(import_tensorflow().errors.InvalidArgumentError):
    next(dataset.as_numpy_iterator())


def test_runtime_preprocessors_are_applied_between_task_and_converter(
  add_task: Callable[..., str], config: Config, converter: Any
) -> None:
  cfg = config(add_task(LINES), runtime_preprocessors=[lambda dataset: dataset.skip(8)])
  assert texts(get_dataset(cfg, 0, 1, converter, num_epochs=1)) == LINES[8:]


def test_a_task_object_is_accepted_instead_of_a_name(
  add_task: Callable[..., str], config: Config, converter: Any
) -> None:
  task = import_seqio().TaskRegistry.get(add_task(LINES))
  assert texts(get_dataset(config(task), 0, 1, converter, num_epochs=1)) == LINES


def test_an_unknown_task_is_refused_with_similar_names(
  add_task: Callable[..., str], config: Config, converter: Any
) -> None:
  add_task(LINES, name="squad_of_tests")
  text = r"no SeqIO task or mixture 'squad_off_tests'.*Did you mean squad_of_tests.*MIXTURE_OR_TASK_MODULE"
  with pytest.raises(ValueError, match=text):
    get_dataset(config("squad_off_tests"), 0, 1, converter)


def test_the_error_for_an_unknown_task_names_the_imported_module(
  config: Config, converter: Any
) -> None:
  with pytest.raises(ValueError, match=r"MIXTURE_OR_TASK_MODULE .* got 'json'"):
    get_dataset(config("squad_off_tests", module="json"), 0, 1, converter)


def test_a_missing_split_is_refused_with_the_existing_splits(
  add_task: Callable[..., str], config: Config, converter: Any
) -> None:
  name = add_task(LINES, validation=LINES[:4])
  with pytest.raises(ValueError, match=rf"'{name}' has no split 'test'; it has 'train', 'valid"):
    get_dataset(config(name, split="test"), 0, 1, converter)


def test_a_part_of_a_split_of_files_is_refused(
  config: Config, converter: Any, tmp_path: pathlib.Path
) -> None:
  file = tmp_path / "rows.jsonl"
  file.write_text('{"inputs": "a", "targets": "b"}\n' * 4)
  columns = {"inputs": "inputs", "targets": "targets"}
  vocabulary = import_seqio().ByteVocabulary()
  name = file_task(str(file), vocabulary=vocabulary, objective="seq2seq", **columns)
  with pytest.raises(ValueError, match=r"has no split 'train\[:2\]'; it has 'train'"):
    get_dataset(config(name, split="train[:2]"), 0, 1, converter)


@pytest.mark.parametrize(
  ("lengths", "text"),
  [
    ({"inputs": 8}, r"features \['inputs', 'targets'\].*'inputs': 8, 'targets': 512"),
    (None, r"'inputs': 512, 'targets': 512"),
    ({"inputs": 8, "targets": 8, "target": 8}, r"'inputs': 8, 'targets': 8}$"),
  ],
)
def test_lengths_that_do_not_fit_the_model_are_refused(
  add_task: Callable[..., str], config: Config, converter: Any, lengths: Any, text: str
) -> None:
  with pytest.raises(ValueError, match=rf"TASK_FEATURE_LENGTHS = .*{text}"):
    get_dataset(config(add_task(LINES), task_feature_lengths=lengths), 0, 1, converter)


def test_a_task_that_drops_every_example_is_refused_instead_of_read_forever(
  add_task: Callable[..., str], config: Config, converter: Any
) -> None:
  name = add_task(LINES, preprocessors=[lambda dataset: dataset.filter(lambda _: False)])
  with pytest.raises(ValueError, match=rf"There are no examples in the split 'train' .*'{name}'"):
    get_dataset(config(name), 0, 1, converter)


def test_an_empty_shard_is_refused(
  add_task: Callable[..., str], config: Config, converter: Any
) -> None:
  with pytest.raises(ValueError, match=r"shard 2 of 4 of the split 'train'"):
    get_dataset(config(add_task(LINES[:2])), 2, 4, converter)


def test_continuing_from_the_last_checkpoint_is_refused(
  add_task: Callable[..., str], config: Config, converter: Any
) -> None:
  with pytest.raises(ValueError, match=r"SaveCheckpointConfig.save_dataset = True"):
    get_dataset(config(add_task(LINES)), 0, 1, converter, continue_from_last_checkpoint=True)


def test_evaluation_repeats_short_data_up_to_its_steps(
  add_task: Callable[..., str], config: Config, converter: Any
) -> None:
  name = add_task(LINES, validation=LINES[:3])
  datasets = get_training_eval_datasets(config(name, split="validation"), 0, 1, 5, converter)
  assert list(datasets) == [name]
  assert texts(datasets[name]) == (LINES[:3] * 7)[:20]


def test_an_evaluation_of_all_examples_completes_the_last_batch_with_examples_without_loss(
  add_task: Callable[..., str], config: Config, converter: Any
) -> None:
  cfg = config(add_task(LINES, validation=LINES[:5]), split="validation")
  (whole,) = get_training_eval_datasets(cfg, 0, 1, None, converter).values()
  assert texts(whole) == [*LINES[:5], "", "", ""]
  for number in range(2):
    (share,) = get_training_eval_datasets(cfg, number, 2, None, converter).values()
    weights = [batch["decoder_loss_weights"].any(1).tolist() for batch in share.as_numpy_iterator()]
    assert weights == [[True, True], [number == 0, False]]


@pytest.mark.slow
@pytest.mark.parametrize("pack", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_shards_of_an_evaluation_together_have_the_batches_of_one(
  add_task: Callable[..., str], config: Config, converter: Any, pack: bool
) -> None:
  cfg = config(add_task(LINES, validation=LINES[:5]), split="validation", pack=pack)

  def shard(number: int, count: int) -> Any:
    (dataset,) = get_training_eval_datasets(cfg, number, count, 3, converter).values()
    return [batch["encoder_input_tokens"] for batch in dataset.as_numpy_iterator()]

  for left, right, whole in zip(shard(0, 2), shard(1, 2), shard(0, 1), strict=True):
    np.testing.assert_array_equal(np.stack([left, right], axis=1).reshape(whole.shape), whole)


@pytest.mark.slow
def test_evaluation_of_a_mixture_covers_its_tasks_and_itself(
  add_task: Callable[..., str], add_mixture: Callable[..., str], config: Config, converter: Any
) -> None:
  first, without_validation = add_task(LINES, validation=LINES), add_task(LINES)
  mixture = add_mixture("mixture_of_tests", [first, without_validation])
  cfg = config(mixture, split="validation", seed=None)
  datasets = get_training_eval_datasets(cfg, 0, 1, 2, converter)
  assert list(datasets) == [first, mixture]
  assert all(len(texts(dataset)) == 8 for dataset in datasets.values())


@pytest.fixture
def cache_split(tmp_path: pathlib.Path) -> Iterator[Callable[..., None]]:
  """Writes a split of a task's offline cache, as seqio_cache_tasks does."""
  tf, seqio = import_tensorflow(), import_seqio()
  before = seqio.utils.get_global_cache_dirs()
  seqio.set_global_cache_dirs([str(tmp_path)])

  def write(name: str, split: str, lines: list[str]) -> None:
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    (folder / "COMPLETED").touch()
    features = {key: {"shape": [None], "dtype": "int32"} for key in ("inputs", "targets")}
    info = {"num_shards": 1, "features": features, "seqio_version": "0.0.20"}
    (folder / f"info.{split}.json").write_text(json.dumps(info))
    (folder / f"stats.{split}.json").write_text(json.dumps({"examples": len(lines)}))
    with tf.io.TFRecordWriter(str(folder / f"{split}.tfrecord-00000-of-00001")) as writer:
      for line in lines:
        tokens = np.array(seqio.ByteVocabulary().encode(line))
        writer.write(seqio.dict_to_tfexample(dict.fromkeys(features, tokens)).SerializeToString())

  yield write
  seqio.set_global_cache_dirs(before)


@pytest.mark.slow
def test_evaluation_from_caches_covers_the_tasks_whose_caches_have_the_split(
  add_task: Callable[..., str],
  add_mixture: Callable[..., str],
  cache_split: Callable[..., None],
  config: Config,
  converter: Any,
) -> None:
  options: Any = {"preprocessors": [import_seqio().CacheDatasetPlaceholder()]}
  of_both, of_cache = add_task(LINES, validation=LINES, **options), add_task(LINES, **options)
  without = add_task(LINES, **options)
  for name in (of_both, of_cache):
    cache_split(name, "validation", LINES[:4])
  cache_split(without, "train", LINES)
  cfg = config(add_mixture("mixture_of_caches", [of_both, of_cache, without]), use_cached=True)
  cfg = dataclasses.replace(cfg, split="validation")
  datasets = get_training_eval_datasets(cfg, 0, 1, 2, converter)
  assert list(datasets) == [of_both, of_cache, "mixture_of_caches"]
  assert texts(datasets[of_cache]) == LINES[:4] * 2
  assert len(texts(get_dataset(cfg, 0, 1, converter).take(1))) == 4
  with pytest.raises(
    ValueError, match=rf"'{without}' has no offline cache of the split 'validation'"
  ):
    get_dataset(dataclasses.replace(cfg, mixture_or_task_name=without), 0, 1, converter)


@pytest.mark.slow
def test_a_mixture_has_examples_of_each_task(
  add_task: Callable[..., str], add_mixture: Callable[..., str], config: Config, converter: Any
) -> None:
  mixture = add_mixture("mixture_of_tests", [add_task(["a"]), add_task(["b"])])
  assert set(texts(get_dataset(config(mixture), 0, 1, converter).take(8))) == {"a", "b"}


def test_a_mixture_with_an_empty_task_is_refused_with_the_tasks_name(
  add_task: Callable[..., str], add_mixture: Callable[..., str], config: Config, converter: Any
) -> None:
  mixture = add_mixture("mixture_of_tests", [add_task(LINES), add_task([], name="nothing_in_it")])
  with pytest.raises(ValueError, match=r"There are no examples in .* task 'nothing_in_it'"):
    get_dataset(config(mixture), 0, 1, converter)


def test_evaluation_data_without_any_example_is_refused(
  add_task: Callable[..., str], config: Config, converter: Any
) -> None:
  cfg = config(add_task(LINES, validation=[]), split="validation")
  with pytest.raises(ValueError, match=r"no examples in the split 'validation' of the task"):
    get_training_eval_datasets(cfg, 0, 1, 2, converter)


def test_deterministic_tasks_are_refused(
  add_task: Callable[..., str], config: Config, converter: Any
) -> None:
  with pytest.raises(ValueError, match=r"deterministic=True.*leave it False"):
    get_training_eval_datasets(config(add_task(LINES)), 0, 1, 2, converter, deterministic=True)


def test_a_task_without_the_requested_cache_is_refused_with_what_to_set(
  add_task: Callable[..., str], config: Config, converter: Any
) -> None:
  name = add_task(LINES)
  with pytest.raises(ValueError, match=f"'{name}' has no offline cache.*USE_CACHED_TASKS = False"):
    get_dataset(config(name, use_cached=True), 0, 1, converter)


def test_damaged_and_missing_files_are_reported_with_their_task(tmp_path: pathlib.Path) -> None:
  tf = import_tensorflow()
  path = str(tmp_path / "my records")
  with tf.io.TFRecordWriter(path) as writer:
    writer.write(b"12345678")
  content = bytearray((tmp_path / "my records").read_bytes())
  content[14] ^= 255
  (tmp_path / "my records").write_bytes(content)
  cfg = DatasetConfig("records", None, "train", 1, shuffle=False, seed=0)
  with (
    pytest.raises(
      ValueError,
      match=r"^the data of the task 'records' cannot be read: corrupted record at 12\. R",
    ),
    data_errors_named(cfg),
  ):
    list(tf.data.TFRecordDataset(path))
  with (
    pytest.raises(
      ValueError, match=rf"^the data cannot be read: {path}2; No such file .*\. Restore"
    ),
    data_errors_named(None),
  ):
    list(tf.data.TFRecordDataset(f"{path}2"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["no example", "another feature"])
def test_a_record_that_is_no_example_is_reported_with_its_task(
  tmp_path: pathlib.Path, isolated_registries: None, kind: str
) -> None:
  seqio, tf = import_seqio(), import_tensorflow()
  text = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"a"]))
  example = tf.train.Example(features=tf.train.Features(feature={"input": text}))
  records = {"no example": b"\xff and not UTF-8", "another feature": example.SerializeToString()}
  path = str(tmp_path / "a.tfrecord")
  with tf.io.TFRecordWriter(path) as writer:
    writer.write(records[kind])
  features = {name: seqio.Feature(seqio.ByteVocabulary()) for name in ("inputs", "targets")}
  name = create_task_from_tfexample_file([path], "tfrecord", "inputs", None, features)
  cfg = DatasetConfig(name, {"inputs": 9, "targets": 9}, "infer", 1, shuffle=False, seed=0)
  data = InferenceData(cfg, seqio.EncDecFeatureConverter, 0, 1)
  with pytest.raises(ValueError, match=f"the task '{name}' cannot be read: "):
    list(data.chunks(data.tasks[0], 8))
