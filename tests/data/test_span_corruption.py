"""Span corruption equals T5's, has the right statistics and loses no token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rosetta_t5.data import objectives
from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow

VOCAB_SIZE = 259 + 100
LENGTHS = {"inputs": 64, "targets": 32}


@pytest.fixture(scope="module")
def features() -> dict[str, Any]:
  seqio = import_seqio()
  feature = seqio.Feature(seqio.ByteVocabulary(extra_ids=100))
  return {"inputs": feature, "targets": feature}


def documents(count: int = 300, longest: int = 200) -> list[np.ndarray]:
  random = np.random.default_rng(0)
  return [random.integers(3, 259, size, np.int32) for size in random.integers(0, longest, count)]


def as_dataset(tokens: Sequence[np.ndarray]) -> Any:
  tf = import_tensorflow()
  flat, sizes = np.concatenate(tokens), [len(row) for row in tokens]
  rows = tf.RaggedTensor.from_row_lengths(flat, sizes)
  return tf.data.Dataset.from_tensor_slices(rows).map(lambda row: {"targets": row})


def corrupt(function: Callable[..., Any], dataset: Any, **options: Any) -> list[dict[str, Any]]:
  with import_seqio().map_seed_manager(3):
    return list(function(dataset, **options).as_numpy_iterator())


def restored(example: dict[str, np.ndarray]) -> list[int]:
  """Replaces the input's sentinels by the target's spans."""
  first_sentinel = VOCAB_SIZE - 100
  spans: dict[int, list[int]] = {}
  for token in map(int, example["targets"]):
    if token >= first_sentinel:
      sentinel = token
      spans[sentinel] = []
    else:
      spans[sentinel].append(token)
  tokens: list[int] = []
  # The target begins with a sentinel for the kept tokens before the first dropped span; the i-th
  # sentinel of the input is replaced by the tokens after the i-th sentinel of the target.
  for token in map(int, example["inputs"]):
    tokens += spans[token] if token >= first_sentinel else [token]
  return tokens


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [LENGTHS, {"inputs": 512, "targets": 114}])
def test_the_same_seed_gives_the_examples_of_t5s_own(
  features: dict[str, Any], lengths: dict[str, int]
) -> None:
  theirs = pytest.importorskip("t5.data.preprocessors", reason="the package t5 is not installed")
  options = {"sequence_length": lengths, "output_features": features}
  tokens = [*documents(), *documents(1, 100_000), np.full(70_000, 9, np.int32)]
  ours = corrupt(objectives.span_corruption, as_dataset(tokens), **options)
  expected = corrupt(theirs.span_corruption, as_dataset(tokens), **options)
  assert len(ours) == len(expected) > 60
  for a, b in zip(ours, expected, strict=True):
    np.testing.assert_array_equal(a["inputs"], b["inputs"])
    np.testing.assert_array_equal(a["targets"], b["targets"])


def test_lengths_are_those_of_t5() -> None:
  assert objectives.random_spans_helper(512) == (568, 114)
  assert objectives.random_spans_helper(128) == (141, 29)
  assert objectives.random_spans_helper(512, 0.5, 3.0) == (766, 512)


@pytest.mark.slow
def test_joined_documents_fill_the_lengths_exactly(features: dict[str, Any]) -> None:
  examples = corrupt(
    objectives.span_corruption,
    as_dataset(documents()),
    sequence_length=LENGTHS,
    output_features=features,
  )
  _, targets_length = objectives.random_spans_helper(LENGTHS["inputs"])
  full = [e for e in examples if len(e["inputs"]) == 63 and len(e["targets"]) == targets_length - 1]
  assert len(full) >= len(examples) - 3  # the last of each 128 joined documents is shorter


@pytest.mark.slow
def test_more_spans_than_sentinels_are_reported(
  features: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
  objectives.warn_of_missing_sentinels.cache_clear()  # Each warning is given once.
  for lengths in ({"inputs": 2048, "targets": 500}, {"inputs": 512, "targets": 114}):
    options = {"sequence_length": lengths, "output_features": features}
    corrupt(objectives.span_corruption, as_dataset(documents(2)), **options)
  assert [record.getMessage() for record in caplog.records] == [
    "Rows of 2274 tokens have 114 dropped spans, but the vocabulary has only 100 sentinels "
    "(extra_ids): its last pieces replace the missing ones, as in T5"
  ]


@pytest.mark.slow
def test_the_text_can_be_restored_from_inputs_and_targets(features: dict[str, Any]) -> None:
  examples = corrupt(
    objectives.span_corruption,
    as_dataset(documents()),
    sequence_length=LENGTHS,
    output_features=features,
  )
  text = np.concatenate(documents())
  np.testing.assert_array_equal(np.concatenate([restored(e) for e in examples]), text)


def test_sentinels_count_down_from_the_vocabularys_end(features: dict[str, Any]) -> None:
  tf = import_tensorflow()
  corrupted = objectives.noise_span_to_unique_sentinel(
    tf.constant([10, 11, 12, 13, 14, 15]),
    tf.constant([False, True, True, False, True, False]),
    features["targets"].vocabulary,
  )
  np.testing.assert_array_equal(corrupted, [10, VOCAB_SIZE - 1, 13, VOCAB_SIZE - 2, 15])


def masks(length: int, count: int) -> np.ndarray:
  tf = import_tensorflow()

  def mask(seed: Any) -> Any:
    seeds = [tf.stack([seed, 0]), tf.stack([seed, 1])]
    return objectives.random_spans_noise_mask(tf.constant(length), 0.15, seeds)

  @tf.function
  def drawn() -> Any:
    return tf.map_fn(mask, tf.range(count), fn_output_signature=tf.bool)

  return drawn().numpy()


def test_density_and_number_of_spans_are_exact_and_positions_uniform() -> None:
  drawn = masks(100, 1000)
  assert (drawn.sum(axis=1) == 15).all()
  starts = drawn[:, 1:] & ~drawn[:, :-1]
  assert (starts.sum(axis=1) == 5).all()
  assert not drawn[:, 0].any()
  # A kept span comes first and a dropped one last; in between, all positions are equally likely.
  thirds = drawn[:, 20:80].reshape(-1, 3, 20).mean(axis=(0, 2))
  np.testing.assert_allclose(thirds, 0.135, atol=0.025)


@pytest.mark.one_quick_variant
@pytest.mark.parametrize(("length", "expected"), [(1, [False]), (2, [False, True])])
def test_the_shortest_texts_keep_their_first_token(length: int, expected: list[bool]) -> None:
  assert masks(length, 1)[0].tolist() == expected


def test_targets_that_do_not_fit_are_refused_with_the_length_needed(
  features: dict[str, Any],
) -> None:
  with pytest.raises(
    ValueError, match=r"targets of 114 tokens.*'targets': 100\. Set it to at least 114"
  ):
    objectives.span_corruption(as_dataset(documents(1)), {"inputs": 512, "targets": 100}, features)
