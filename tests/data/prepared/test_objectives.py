"""Objectives on prepared segments lose no token, and have the lengths and counts of T5 and UL2."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rosetta_t5.data.denoisers import UL2_DENOISERS, Denoiser
from rosetta_t5.data.objectives import (
  denoise_with_mode,
  warn_of_missing_sentinels,
)
from rosetta_t5.data.prepared import prepared_task
from rosetta_t5.data.prepared.prepared_batches import random_keys
from rosetta_t5.data.prepared.task import PreparedTask

PIECES = 1000
EXTRA_IDS = 200
VOCAB_SIZE = PIECES + EXTRA_IDS
BOTH = {"inputs": 512, "targets": 512}


def encode(text: str) -> list[int]:
  return [3 + ord(character) % 50 for character in text]


VOCABULARY = types.SimpleNamespace(
  encode=encode, vocab_size=VOCAB_SIZE, extra_ids=EXTRA_IDS, eos_id=1
)


def features(name: str, rows: int = 40, **options: Any) -> list[tuple[np.ndarray, Any, dict]]:
  """Returns (segments, objective, features of these segments) for each objective of this name."""
  lengths = options.pop("lengths", BOTH)
  found = []
  task = PreparedTask((), name, **options)
  for objective in task.objectives(lengths, VOCABULARY):
    tokens = np.random.default_rng(0).integers(3, PIECES, (rows, objective.length), np.int32)
    found.append((tokens, objective, objective.features(tokens, random_keys(3, np.arange(rows)))))
  return found


def restored(inputs: Sequence[int], targets: Sequence[int]) -> list[int]:
  """Replaces the inputs' sentinels by the targets' spans; checks both end tokens."""
  assert inputs[-1] == targets[-1] == 1
  spans: dict[int, list[int]] = {}
  for token in targets[:-1]:
    if token >= PIECES:
      span = spans.setdefault(int(token), [])
    else:
      span.append(int(token))
  assert list(spans) == [VOCAB_SIZE - 1 - number for number in range(len(spans))]
  return [t for token in inputs[:-1] for t in spans.get(int(token), [int(token)])]


def unpadded(row: np.ndarray) -> np.ndarray:
  size = np.count_nonzero(row)
  assert not row[size:].any()
  return row[:size]


def test_prefix_lm_cuts_a_segment_in_two_at_equally_likely_positions() -> None:
  ((tokens, objective, made),) = features("prefix_lm", rows=4000)
  assert objective.length == 511
  ends = []
  for row, inputs, targets in zip(tokens, made["inputs"], made["targets"], strict=True):
    inputs, targets = unpadded(inputs), unpadded(targets)
    assert inputs[-1] == targets[-1] == 1
    np.testing.assert_array_equal(np.concatenate([inputs[:-1], targets[:-1]]), row)
    ends.append(len(targets) - 1)
  assert min(ends) >= 1
  assert max(ends) <= 510
  quarters = np.histogram(ends, bins=4, range=(0, 511))[0] / 4000
  np.testing.assert_allclose(quarters, 0.25, atol=0.03)


def test_ul2_has_seven_denoisers_with_their_modes_and_loses_no_token() -> None:
  made = features("ul2")
  assert len(made) == 7
  for (tokens, objective, pair), denoiser in zip(made, UL2_DENOISERS.values(), strict=True):
    mode = encode(denoiser.mode)
    for row, inputs, targets in zip(tokens, pair["inputs"], pair["targets"], strict=True):
      inputs, targets = unpadded(inputs), unpadded(targets)
      assert max(len(inputs), len(targets)) <= 512
      assert inputs[: len(mode)].tolist() == mode
      inputs = inputs[len(mode) :]
      if denoiser.mean_length is None:
        whole = [*inputs[:-1].tolist(), *targets[:-1].tolist()]
      else:
        whole = restored(inputs, targets)
        dropped = np.count_nonzero(targets[:-1] < PIECES)
        spans = np.count_nonzero(targets >= PIECES)
        assert dropped == round(objective.length * denoiser.density)
        assert spans == max(1, round(dropped / denoiser.mean_length))
      assert whole == row.tolist()


def test_the_sequential_denoisers_ends_are_a_quarter_on_average() -> None:
  *_, (_, objective, made) = features("ul2", rows=1500)
  ends = np.count_nonzero(made["targets"], axis=1) - 1
  assert ends.mean() / objective.length == pytest.approx(0.25, abs=0.015)
  assert ends.max() <= round(objective.length / 2)


@pytest.mark.parametrize("name", ["span_corruption", "prefix_lm"])
def test_rows_depend_on_their_own_key_alone(name: str) -> None:
  ((tokens, objective, together),) = features(name)
  alone = objective.features(tokens[7:8], random_keys(3, np.array([7])))
  for feature, values in alone.items():
    np.testing.assert_array_equal(values[0], together[feature][7])


def corrupted_by(function: Any, tokens: np.ndarray, lengths: dict[str, int], **options: Any) -> Any:
  """Runs a preprocessor of tf.data over one long text."""
  import seqio
  import tensorflow as tf

  class Pieces(seqio.PassThroughVocabulary):
    def encode(self, s: Any) -> Any:
      return encode(s)

  feature = seqio.Feature(Pieces(VOCAB_SIZE, eos_id=1))
  dataset = tf.data.Dataset.from_tensors({"targets": tf.constant(tokens.ravel()[:60_000])})
  given = {"sequence_length": lengths, "output_features": dict.fromkeys(lengths, feature)}
  with seqio.map_seed_manager(1):
    return list(function(dataset, **given, **options).as_numpy_iterator())[:-1]


def counts(inputs: np.ndarray, targets: np.ndarray) -> tuple[int, ...]:
  """Lengths, dropped tokens, spans: the same for every full row."""
  return len(inputs), len(targets), int((targets < PIECES).sum()), int((targets >= PIECES).sum())


@pytest.mark.slow
@pytest.mark.parametrize(
  ("lengths", "options"),
  [
    ({"inputs": 512, "targets": 114}, {}),
    pytest.param({"inputs": 512, "targets": 128}, {}, marks=pytest.mark.slow),
    pytest.param({"inputs": 100, "targets": 60}, {"noise_density": 0.3}, marks=pytest.mark.slow),
    pytest.param(
      {"inputs": 512, "targets": 512},
      {"noise_density": 0.5, "mean_span_length": 3.0},
      marks=pytest.mark.slow,
    ),
    pytest.param({"inputs": 256, "targets": 80}, {"mean_span_length": 8.0}, marks=pytest.mark.slow),
  ],
)
def test_rows_have_the_lengths_and_counts_of_t5s_own_preprocessor(
  lengths: dict[str, int], options: dict[str, float]
) -> None:
  theirs = pytest.importorskip("t5.data.preprocessors", reason="the package t5 is not installed")
  ((tokens, _, made),) = features("span_corruption", rows=200, lengths=lengths, **options)
  renamed = {"noise_density": "noise_density", "mean_span_length": "mean_noise_span_length"}
  expected = corrupted_by(
    theirs.span_corruption, tokens, lengths, **{renamed[k]: v for k, v in options.items()}
  )
  assert len(expected) > 50
  wanted = {counts(e["inputs"], e["targets"]) for e in expected}
  pairs = zip(made["inputs"], made["targets"], tokens, strict=True)
  found = set()
  for inputs, targets, row in pairs:
    inputs, targets = unpadded(inputs), unpadded(targets)
    found.add(counts(inputs[:-1], targets[:-1]))
    assert restored(inputs, targets) == row.tolist()
  assert found == wanted
  assert len(wanted) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", range(7))
def test_ul2_rows_have_the_lengths_and_counts_of_the_seqio_preprocessors(number: int) -> None:
  tokens, objective, made = features("ul2", rows=120)[number]
  denoiser = list(UL2_DENOISERS.values())[number]
  expected = corrupted_by(denoise_with_mode, tokens, BOTH, denoiser=denoiser)
  theirs = {counts(e["inputs"], e["targets"]) for e in expected}
  pairs = [(unpadded(i)[:-1], unpadded(t)[:-1]) for i, t in zip(*made.values(), strict=True)]
  ours = {counts(*pair) for pair in pairs}
  if denoiser.mean_length is not None:
    assert ours == theirs
    return
  mode = len(encode(denoiser.mode))
  for found in (ours, theirs):
    assert {inputs + targets - mode for inputs, targets, *_ in found} == {objective.length}


def test_more_spans_than_sentinels_are_reported(caplog: pytest.LogCaptureFixture) -> None:
  warn_of_missing_sentinels.cache_clear()  # Each warning is given once.
  with_100 = types.SimpleNamespace(**{**vars(VOCABULARY), "extra_ids": 100})
  PreparedTask((), "ul2").objectives(BOTH, with_100)
  assert (
    "758 tokens have 126 dropped spans, but the vocabulary has only 100 sentinels" in caplog.text
  )


def test_lengths_that_do_not_fit_an_objective_are_refused() -> None:
  with pytest.raises(
    ValueError, match=r"objective must be one of 'span_corruption', .*got 'spans'"
  ):
    prepared_task("folder", objective="spans")
  with pytest.raises(ValueError, match=r"features \['inputs', 'targets'\] for the objective ul2"):
    features("ul2", lengths={"targets": 512})
  with pytest.raises(ValueError, match=r"noise density 0\.5, .*Set it to at least \d+"):
    features("ul2", lengths={"inputs": 512, "targets": 114})


@pytest.mark.parametrize("length", [16, 23, 32, 64])
def test_features_fit_into_short_rows(length: int) -> None:
  for tokens, _, made in features("ul2", lengths={"inputs": length, "targets": length}):
    assert tokens.shape[1] > length // 3
    assert all(values.shape[1] <= length for values in made.values())


SHORT_AND_LONG = [("[R]", 0.15, 3, 1), ("", 0.15, 64, 1), ("[S]", 0.25, None, 6)]


@pytest.mark.parametrize("size", [64, 512])
def test_given_denoisers_have_their_modes_densities_spans_and_fill_the_inputs(size: int) -> None:
  made = features("ul2", lengths={"inputs": size, "targets": size}, denoisers=SHORT_AND_LONG)
  for (_, objective, pair), (mode, density, mean, _) in zip(made, SHORT_AND_LONG, strict=True):
    tokens = encode(mode)
    np.testing.assert_array_equal(pair["inputs"][:, : len(tokens)], [tokens] * 40)
    if mean is not None:
      dropped = np.count_nonzero((pair["targets"] > 1) & (pair["targets"] < PIECES), axis=1)
      assert set(dropped) == {round(objective.length * density)}
      spans = np.count_nonzero(pair["targets"] >= PIECES, axis=1)
      assert set(spans) == {max(1, round(dropped[0] / mean))}
      assert set(np.count_nonzero(pair["inputs"], axis=1)) <= {size, size - 1}


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 32, 64])
def test_seqio_rows_of_one_long_span_lose_no_token(size: int) -> None:
  lengths = {"inputs": size, "targets": size}
  tokens = np.random.default_rng(0).integers(3, PIECES, 6000, np.int32)
  denoiser = Denoiser("", 0.15, 64.0)
  rows = corrupted_by(denoise_with_mode, tokens, lengths, denoiser=denoiser)
  assert len(rows) > 50
  assert {(row["targets"] >= PIECES).sum() for row in rows} == {1}
  assert max(len(row["inputs"]) for row in rows) == size - 1  # an end token follows


@pytest.mark.parametrize("row", [("[R]", 3, 0.15, 1), ("[R]", 0.15, 3), ("[R]", 0.15, 3, 0)])
def test_wrong_denoisers_are_refused(row: tuple) -> None:
  with pytest.raises(ValueError, match=r"mode text, density between 0 and 1.*got \("):
    features("ul2", denoisers=[row])
