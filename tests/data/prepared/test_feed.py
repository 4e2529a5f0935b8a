"""Prepared batches lose no token, have T5's statistics, and are the same on any number of hosts."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import time
from typing import Any

import numpy as np
import pytest
from inline_executor import InlineExecutor
from sentencepiece import sentencepiece_model_pb2

from rosetta_t5.checkpoints.saved_items import (
  DatasetArgs,
  DatasetCheckpointHandler,
  dataset_filename,
)
from rosetta_t5.data import (
  DatasetConfig,
  check_examples,
  get_dataset,
  get_training_eval_datasets,
  prepare_train_iter,
)
from rosetta_t5.data.pipeline.data_description import compare_descriptions, describe_data
from rosetta_t5.data.prepared import TokenStream, prepare, prepared_task
from rosetta_t5.data.prepared.prepared_batches import RateMixture, random_keys
from rosetta_t5.data.prepared.task import corrupt_spans
from rosetta_t5.data.reading import BadExamples
from rosetta_t5.data.vocabularies.sentencepiece_models import train_sentencepiece
from rosetta_t5.parallel.partitioner import PjitPartitioner

WORDS = ("red", "old", "cat", "hat", "sea", "sun")
VOCAB_SIZE = 18 + 100
LENGTHS = {"inputs": 32, "targets": 16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
  """Two prepared folders, the second three times as large."""
  top = tmp_path_factory.mktemp("prepared")
  model = top / "pieces.model"
  model.write_bytes(train_sentencepiece([" ".join(WORDS)] * 20, vocab_size=18))
  random = np.random.default_rng(0)
  for name, count in (("a", 60), ("b", 180)):
    texts = [" ".join(random.choice(WORDS, 40)) for _ in range(count)]
    (top / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    prepare(
      str(top / f"{name}.jsonl"),
      str(model),
      top / name,
      validation_percent=15,
      executor=InlineExecutor(),
    )
  return [str(top / "a"), str(top / "b")]


def config(task: Any, **overrides: Any) -> DatasetConfig:
  fields = {"split": "train", "batch_size": 8, "shuffle": True, "seed": 5}
  return DatasetConfig(task, LENGTHS, **{**fields, **overrides})  # type: ignore[arg-type]


def test_the_sentinels_of_a_sentencepiece_model_are_used(tmp_path: pathlib.Path) -> None:
  model = sentencepiece_model_pb2.ModelProto.FromString(
    train_sentencepiece([" ".join(WORDS)] * 20, vocab_size=18)
  )
  for number in reversed(range(10)):
    model.pieces.add(piece=f"<extra_id_{number}>", type=model.SentencePiece.USER_DEFINED)
  (tmp_path / "pieces.model").write_bytes(model.SerializeToString())
  (tmp_path / "a.txt").write_text("\n".join([" ".join(WORDS * 8)] * 60))
  files = str(tmp_path / "a.txt"), str(tmp_path / "pieces.model"), tmp_path / "out"
  prepare(*files, executor=InlineExecutor())
  task = prepared_task(str(tmp_path / "out"))
  assert task.output_features["targets"].vocabulary.vocab_size == 28
  cfg = DatasetConfig(task, LENGTHS, "train", batch_size=4, shuffle=True, seed=0)
  assert task.batch_sequence(cfg, 0, 1, 0)[0]["encoder_input_tokens"].max() == 27


def test_inputs_and_targets_together_contain_the_tokens() -> None:
  tokens = np.random.default_rng(0).integers(3, 18, (64, 40), np.int32)
  inputs, targets = corrupt_spans(tokens, random_keys(1, np.arange(64)), VOCAB_SIZE, 0.15, 3.0)
  assert inputs.shape == (64, 40 - 6 + 2)
  assert targets.shape == (64, 6 + 2)
  for row, given, wanted in zip(tokens, inputs, targets, strict=True):
    spans: dict[int, list[int]] = {}
    for token in map(int, wanted):
      if token >= 18:
        span = spans.setdefault(token, [])
      else:
        span.append(token)
    assert list(spans) == [VOCAB_SIZE - 1, VOCAB_SIZE - 2]
    assert all(spans.values())
    restored = [t for token in map(int, given) for t in spans.get(token, [token])]
    assert restored == row.tolist()


def test_dropped_tokens_are_evenly_spread_and_spans_have_t5s_lengths() -> None:
  tokens = np.tile(np.arange(3, 571, dtype=np.int32), (2000, 1))
  inputs, targets = corrupt_spans(tokens, random_keys(7, np.arange(2000)), 10_000, 0.15, 3.0)
  assert inputs.shape[1] + 1 == 512
  assert targets.shape[1] + 1 == 114
  dropped = np.bincount(targets[targets < 9000], minlength=571)[3:]
  middle = dropped[20:-20] / 2000
  assert middle.mean() == pytest.approx(0.15, abs=0.005)
  assert np.abs(middle - 0.15).max() < 5 * np.sqrt(0.15 * 0.85 / 2000)
  lengths = np.diff(np.flatnonzero(np.append(targets, 9999) > 9000)) - 1
  # There are 85 tokens in 28 spans, and all splits are equally likely. For that reason a span has one
  # token with the probability 27/84.
  assert np.mean(lengths == 1) == pytest.approx(27 / 84, abs=0.01)


def test_a_row_depends_on_its_own_key_alone() -> None:
  tokens = np.random.default_rng(0).integers(3, 18, (8, 40), np.int32)
  keys = random_keys(1, np.arange(8))
  together = corrupt_spans(tokens, keys, VOCAB_SIZE, 0.15, 3.0)
  alone = corrupt_spans(tokens[3:4], keys[3:4], VOCAB_SIZE, 0.15, 3.0)
  np.testing.assert_array_equal(together[0][3:4], alone[0])
  np.testing.assert_array_equal(together[1][3:4], alone[1])


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("hosts", [2, 4])
def test_several_hosts_together_read_the_batch_of_a_single_host(
  folders: list[str], hosts: int
) -> None:
  cfg = config(prepared_task(folders))
  alone = get_dataset(cfg, 0, 1, None)
  feeds = [get_dataset(cfg, host, hosts, None) for host in range(hosts)]
  for _ in range(30):
    whole, parts = next(alone), [next(feed) for feed in feeds]
    for name, value in whole.items():
      np.testing.assert_array_equal(value, np.concatenate([part[name] for part in parts]))


def test_ul2_batches_are_the_same_on_any_number_of_hosts_and_evenly_mixed(
  folders: list[str],
) -> None:
  cfg = config(prepared_task(folders, objective="ul2", extra_ids=30), batch_size=16)
  cfg = dataclasses.replace(cfg, task_feature_lengths={"inputs": 40, "targets": 40})
  alone = get_dataset(cfg, 0, 1, None)
  feeds = [get_dataset(cfg, host, 4, None) for host in range(4)]
  for _ in range(6):
    whole, parts = next(alone), [next(feed) for feed in feeds]
    for name, value in whole.items():
      np.testing.assert_array_equal(value, np.concatenate([part[name] for part in parts]))
  locations = [alone.batches.mixture[number][0] for number in range(1000)]
  of_folders = np.bincount(locations).reshape(2, 7)
  assert np.ptp(of_folders, axis=1).max() <= 1
  small, large = (stream.stream.size for stream, _ in alone.batches.sources[::7])
  assert of_folders.sum(axis=1) == pytest.approx(
    [1000 * s / (small + large) for s in (small, large)], abs=7
  )


def test_each_epoch_has_every_segment_once_in_another_order(folders: list[str]) -> None:
  batches = prepared_task(folders[0]).batch_sequence(config("", batch_size=1), 0, 1, 5)
  ((segments, _),) = batches.sources
  first, second = (
    [segments.start(epoch * segments.count + n) for n in range(segments.count)] for epoch in (0, 1)
  )
  for starts in (first, second):
    assert set(np.diff(sorted(starts))) == {segments.length}
  assert np.argsort(first).tolist() != np.argsort(second).tolist()
  assert list(batches.epochs(segments.count).values()) == [1.0]


def test_a_feed_continues_on_other_hosts_and_reaches_step_a_million_within_a_second(
  folders: list[str], tmp_path: pathlib.Path
) -> None:
  cfg = config(prepared_task(folders))
  feed = get_dataset(cfg, 0, 1, None)
  for _ in range(5):
    next(feed)
  feed.save(tmp_path / "position")
  expected = next(feed)
  other = get_dataset(cfg, 1, 2, None)
  other.restore(tmp_path / "position")
  for name, value in next(other).items():
    np.testing.assert_array_equal(value, expected[name][4:])
  (tmp_path / "position").write_text('{"step": 1000000}')
  started = time.monotonic()
  feed.restore(tmp_path / "position")
  batch = next(feed)
  assert time.monotonic() - started < 1
  np.testing.assert_array_equal(
    batch["encoder_input_tokens"], feed.batches[1_000_000]["encoder_input_tokens"]
  )


def test_four_hosts_restore_the_position_of_two(folders: list[str], tmp_path: pathlib.Path) -> None:
  cfg = config(prepared_task(folders))
  for host in range(2):
    feed = get_dataset(cfg, host, 2, None)
    for _ in range(5):
      next(feed)
    DatasetCheckpointHandler(dataset_filename(host, 2)).save(tmp_path, DatasetArgs(feed))
  expected = get_dataset(cfg, 0, 1, None).batches[5]
  for host in range(4):
    feed = get_dataset(cfg, host, 4, None)
    DatasetCheckpointHandler(dataset_filename(host, 4)).restore(tmp_path, DatasetArgs(feed))
    for name, value in next(feed).items():
      np.testing.assert_array_equal(value, expected[name][2 * host : 2 * host + 2])


def test_a_changed_folder_is_named_and_a_moved_one_is_not_a_change(
  folders: list[str], tmp_path: pathlib.Path
) -> None:
  def facts(*paths: str, **arguments: Any) -> dict[str, Any]:
    cfg = config(prepared_task(paths, **arguments))
    return describe_data(cfg, get_dataset(cfg, 0, 1, None))

  before = facts(folders[0])
  top = pathlib.Path(folders[0]).parent
  moved = shutil.copytree(folders[0], tmp_path / "moved" / "a")
  assert compare_descriptions(before, facts(str(moved))) == []
  assert compare_descriptions(before, facts(folders[1])) == [
    f"data.folders: in {top}, removed: a; added: b"
  ]
  (change,) = compare_descriptions(before, facts(folders[0], mean_span_length=4.0))
  start = "data.objectives: ['span_corruption(length=34, density=0.15, mean_length=3.0, "
  assert change.startswith(start)
  assert "mean_length=4.0" in change.partition("→")[2]


@pytest.mark.parametrize("pattern", ["vocabulary.model", "manifest.json"])
def test_a_damaged_manifest_or_vocabulary_is_refused_instead_of_replacing_examples(
  folders: list[str], tmp_path: pathlib.Path, pattern: str
) -> None:
  copy = shutil.copytree(folders[0], tmp_path / "a")
  (file,) = copy.glob(pattern)
  content = file.read_bytes()
  file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
  with pytest.raises(ValueError, match=rf"{file} is damaged"):
    next(get_dataset(config(prepared_task([folders[1], str(copy)])), 0, 1, None))


def test_another_seed_gives_other_batches(folders: list[str]) -> None:
  a, b = (next(get_dataset(config(prepared_task(folders), seed=s), 0, 1, None)) for s in (1, 2))
  assert (a["encoder_input_tokens"] != b["encoder_input_tokens"]).any()


@pytest.mark.slow
def test_model_features_are_those_of_seqios_converter(folders: list[str]) -> None:
  import seqio
  import tensorflow as tf

  batch = next(get_dataset(config(prepared_task(folders), pack=False), 0, 1, None))
  inputs, targets = batch["encoder_input_tokens"], batch["decoder_target_tokens"]
  assert (inputs > 0).all(), "there must be no padding"
  assert (inputs[:, -1] == 1).all()
  rows = [{"inputs": i[i > 0], "targets": t[t > 0]} for i, t in zip(inputs, targets, strict=True)]
  dataset = tf.data.Dataset.from_generator(
    lambda: rows,
    output_signature={n: tf.TensorSpec([None], tf.int32) for n in ("inputs", "targets")},
  )
  converted = seqio.EncDecFeatureConverter(pack=False)(dataset, LENGTHS).batch(8)
  expected = next(converted.as_numpy_iterator())
  assert set(batch) == set(expected)
  for name, value in expected.items():
    np.testing.assert_array_equal(batch[name], value)


def test_packing_adds_segments_and_positions(folders: list[str]) -> None:
  batch = next(get_dataset(config(prepared_task(folders), pack=True), 0, 1, None))
  real = batch["decoder_target_tokens"] > 0
  np.testing.assert_array_equal(batch["decoder_segment_ids"], real)
  np.testing.assert_array_equal(batch["decoder_positions"], np.arange(16) * real)
  assert batch["encoder_segment_ids"].all()


def test_targets_of_causal_lm_are_the_text(folders: list[str]) -> None:
  task = prepared_task(folders[0], objective="causal_lm")
  cfg = dataclasses.replace(config(task, shuffle=False), task_feature_lengths={"targets": 20})
  batch = next(get_dataset(cfg, 0, 1, None))
  text = TokenStream(folders[0], "train").read([0], 8 * 20)[0]
  np.testing.assert_array_equal(batch["decoder_target_tokens"].ravel(), text)
  np.testing.assert_array_equal(batch["decoder_input_tokens"][:, 1:], text.reshape(8, 20)[:, :-1])
  assert not batch["decoder_input_tokens"][:, 0].any()


def test_evaluation_has_equally_many_batches_on_all_hosts_and_each_example_once(
  folders: list[str],
) -> None:
  cfg = config(prepared_task(folders[0]), split="validation", batch_size=4)
  hosts = [get_training_eval_datasets(cfg, h, 2, 1000, None)["prepared"] for h in range(2)]
  batches = [list(host) for host in hosts]
  assert len(batches[0]) == len(batches[1]) > 1
  rows = [tuple(r) for host in batches for b in host for r in b["decoder_target_tokens"] if any(r)]
  assert len(rows) == sum(segments.count for segments, _ in hosts[0].sources)
  assert len(rows) % 4, "the last batch must have empty rows"
  # The next evaluation has the same number of batches.
  assert [len(list(host)) for host in hosts] == [len(batches[0])] * 2
  short = get_training_eval_datasets(cfg, 0, 2, 1, None)["prepared"]
  assert len(list(short)) == 1


@pytest.mark.parametrize("objective", ["span_corruption", "prefix_lm"])
def test_evaluation_of_several_folders_has_each_segment_once_and_mixes_the_folders_evenly(
  folders: list[str], objective: str
) -> None:
  # The rates are for training; an evaluation does not use them.
  task = prepared_task(folders, objective=objective, rates=[1, 1])
  cfg = config(task, split="validation", batch_size=4)
  evaluation = get_training_eval_datasets(cfg, 0, 1, 1000, None)["prepared"]
  counts = [segments.count for segments, _ in evaluation.sources]
  assert counts[1] > 2 * counts[0]
  locations = evaluation.mixture
  assert sorted(locations) == [(s, rank) for s in range(2) for rank in range(counts[s])]
  first = [source for source, _ in locations[: len(locations) // 2]]
  assert np.bincount(first) == pytest.approx(np.array(counts) / 2, abs=1)
  few = get_training_eval_datasets(cfg, 0, 1, 2, None)["prepared"]
  assert few.mixture[:8] == locations[:8]


def test_a_restart_does_not_skip_prefetched_batches_that_were_refused(
  folders: list[str], tmp_path: pathlib.Path
) -> None:
  partitioner = PjitPartitioner(num_partitions=1)
  cfg = config(prepared_task(folders, rates=[1, 1]))
  layout = partitioner.get_data_layout(cfg.batch_size)
  data = {"partitioner": partitioner, "checkpoint_cfg": None, "data_layout": layout}
  # The limit is less than the ids of every batch.
  feed = prepare_train_iter(get_dataset(cfg, 0, 1, None), num_token_ids=1, **data)
  first = get_dataset(cfg, 0, 1, None)
  feed.save(tmp_path / "position")
  feed.close()
  restarted = prepare_train_iter(get_dataset(cfg, 0, 1, None), **data)
  restarted.restore(tmp_path / "position")
  expected = next(first)["decoder_target_tokens"]
  np.testing.assert_array_equal(next(restarted)["decoder_target_tokens"], expected)
  restarted.close()


def test_the_epochs_that_steps_make_of_each_folder_are_stated(folders: list[str]) -> None:
  cfg = config(prepared_task(folders, rates=[1, 1]))
  measured = cfg.mixture_or_task_name.batch_sequence(cfg, 0, 1, 0).epochs(20)  # type: ignore[union-attr]
  first, second = check_examples(cfg, get_dataset)(20)
  assert first == f"a: 20 steps are {measured['a']:.3g} epochs"
  assert second == f"b: 20 steps are {measured['b']:.3g} epochs"


def test_metrics_report_the_epochs_of_each_folder_up_to_the_current_batch(
  folders: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  # Tests that ran earlier in this process may have skipped bad examples, which are a metric too.
  monkeypatch.setattr(BadExamples, "total_in_process", 0)
  partitioner = PjitPartitioner(num_partitions=1)
  cfg = config(prepared_task(folders, rates=[1, 1]))
  layout = partitioner.get_data_layout(cfg.batch_size)
  data = {"partitioner": partitioner, "checkpoint_cfg": None, "data_layout": layout}
  feed = prepare_train_iter(get_dataset(cfg, 0, 1, None), **data)
  small, large = (segments.count for segments, _ in feed.iterator.batches.sources)
  assert feed.measures() == {"data/epochs/a": 0.0, "data/epochs/b": 0.0}
  for _ in range(20):
    next(feed)
  expected = {"data/epochs/a": 80 / small, "data/epochs/b": 80 / large}
  assert feed.measures() == pytest.approx(expected)  # 160 examples, without prefetched ones
  feed.save(tmp_path / "position")
  feed.close()
  restarted = prepare_train_iter(get_dataset(cfg, 0, 1, None), **data)
  restarted.restore(tmp_path / "position")
  assert restarted.measures() == pytest.approx(expected)
  restarted.close()
  copy = shutil.copytree(folders[0], tmp_path / "other" / "a")
  same_name = prepared_task([folders[0], str(copy)]).batch_sequence(cfg, 0, 1, 0)
  assert list(same_name.epochs(0)) == ["0_a", "1_a"]


def test_rates_hold_in_every_thousand_examples() -> None:
  mixture = RateMixture([1, 3], seed=0)
  locations = [mixture[number] for number in range(2000)]
  for window in (locations[:1000], locations[1000:]):
    assert sum(source == 0 for source, _ in window) == 250
  for source in (0, 1):
    assert sorted(rank for s, rank in locations if s == source) == list(
      range(sum(s == source for s, _ in locations))
    )


def test_a_damaged_record_is_refused_with_its_shard(
  folders: list[str], tmp_path: pathlib.Path
) -> None:
  copy = shutil.copytree(folders[0], tmp_path / "copy")
  (shard,) = copy.glob("train-*.array_record")
  data = bytearray(shard.read_bytes())
  data[3000:3200] = bytes(200)  # These are records; the file's index is at its end.
  shard.write_bytes(bytes(data))
  batches = get_dataset(config(prepared_task(str(copy))), 0, 1, None).batches
  with pytest.raises(ValueError, match=rf"shard {shard} is damaged .*delete the file and repeat"):
    _ = [batches[step] for step in range(12)]


def test_lengths_splits_and_rates_that_do_not_fit_are_refused(folders: list[str]) -> None:
  task = prepared_task(folders[0])
  cfg = config(task)
  short = dataclasses.replace(cfg, task_feature_lengths={"inputs": 32, "targets": 3})
  with pytest.raises(ValueError, match=r"Set it to at least \d"):
    get_dataset(short, 0, 1, None)
  with pytest.raises(ValueError, match=r"has no split 'test'; it has 'train', 'validation'"):
    get_dataset(dataclasses.replace(cfg, split="test"), 0, 1, None)
  long = dataclasses.replace(cfg, task_feature_lengths={"inputs": 50_000, "targets": 20_000})
  with pytest.raises(ValueError, match=r"tokens, fewer than the \d+ of one example"):
    get_dataset(long, 0, 1, None)
  with pytest.raises(ValueError, match=r"rates must be 2 numbers above 0, got \[1\.0\]"):
    prepared_task(folders, rates=[1.0])
  with pytest.raises(
    ValueError, match=r"There is no .*manifest\.json: the folder is not prepared data"
  ):
    prepared_task("/nowhere")


def test_predictions_of_prepared_rows_are_refused(folders: list[str]) -> None:
  import seqio

  from rosetta_t5.data.pipeline.inference_data import InferenceData

  with pytest.raises(ValueError, match=r"no examples to predict.*infer --input FILE"):
    InferenceData(config(prepared_task(folders[0])), seqio.EncDecFeatureConverter, 0, 1)
