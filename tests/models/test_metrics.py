"""The metrics of a batch, compared with plain counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import VOCAB, Bigram, make_batch, make_model

from rosetta_t5.models.batch_metrics import (
  compute_base_metrics,
  compute_metrics,
  compute_weighted_accuracy,
  correct_predictions,
  count_packed_examples,
)
from rosetta_t5.telemetry.metrics import set_time_metrics_duration

LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 7)), jnp.float32)
TARGETS = jnp.array([[1, 2, 3, 0, 0], [4, 5, 6, 1, 2]])
MASK = jnp.array([[1, 1, 1, 0, 0], [1, 1, 0, 1, 0]])
PACKED = {
  "encoder_input_tokens": jnp.array([[1, 1, 2, 0], [1, 2, 3, 3]]),
  "decoder_target_tokens": jnp.array([[1, 2, 2, 0, 0], [1, 1, 2, 3, 0]]),
}


def values(metrics):
  return {name: float(metric.compute()) for name, metric in metrics.items()}


@pytest.mark.parametrize(
  ("segment_ids", "examples"),
  [
    ([[1, 1, 2, 3, 0]], 3),
    ([[0, 0, 0]], 0),
    ([[1, 1], [1, 2]], 3),
    ([[1, 0, 1, 1]], 2),
    ([[5, 5, 2, 2]], 2),
  ],
)
def test_packed_examples_are_counted_row_by_row(segment_ids, examples):
  assert count_packed_examples(jnp.array(segment_ids)) == examples


def test_the_first_of_several_highest_logits_counts():
  logits = jnp.array([[[1.0, 5.0, 5.0], [0.0, 0.0, 0.0], [-1.0, -3.0, -1.0], [0.0, 1.0, 2.0]]])
  assert correct_predictions(logits, jnp.array([[1, 0, 0, 2]])).tolist() == [[True] * 4]
  assert correct_predictions(logits, jnp.array([[2, 1, 2, 1]])).tolist() == [[False] * 4]


def test_metrics_equal_those_of_t5x_over_weighted_and_all_tokens():
  metrics = compute_base_metrics(
    LOGITS, TARGETS, MASK, jnp.float32(12.0), jnp.float32(3.0), segment_ids=PACKED
  )
  metrics = set_time_metrics_duration(metrics, 2.0)
  right = (np.asarray(LOGITS).argmax(-1) == np.asarray(TARGETS)) * np.asarray(MASK)
  devices = jax.device_count()
  assert values(metrics) == pytest.approx(
    {
      "accuracy": right.sum() / 6,
      "loss": 12.0,
      "loss_per_nonpadding_target_token": 2.0,
      "loss_per_all_target_tokens": 1.2,
      "z_loss": 3.0,
      "z_loss_per_all_target_tokens": 0.3,
      "cross_ent_loss": 9.0,
      "cross_ent_loss_per_all_target_tokens": 0.9,
      "non_padding_fraction/loss_weights": 0.6,
      "non_padding_fraction/encoder_input_tokens": 7 / 8,
      "non_padding_fraction/decoder_target_tokens": 7 / 10,
      "non_padding_fraction/overall": 14 / 18,
      "effective_batch_size/encoder_input_tokens": 5.0,
      "effective_batch_size/decoder_target_tokens": 5.0,
      "timing/seconds": 2.0,
      "timing/seqs": 2.0,
      "timing/seqs_per_second": 1.0,
      "timing/seqs_per_second_per_core": 1.0 / devices,
      "timing/steps_per_second": 0.5,
      "timing/target_tokens_per_second": 5.0,
      "timing/target_tokens_per_second_per_core": 5.0 / devices,
    }
  )


def test_without_weights_every_target_counts_and_without_z_loss_it_is_not_reported():
  metrics = compute_base_metrics(LOGITS, TARGETS, None, jnp.float32(12.0))
  assert float(metrics["non_padding_fraction/loss_weights"].compute()) == 1.0
  assert float(metrics["loss_per_nonpadding_target_token"].compute()) == pytest.approx(1.2)
  assert not [name for name in metrics if "z_loss" in name or "cross_ent" in name]
  assert not [name for name in metrics if "effective" in name or "overall" in name]


def test_merged_batches_are_weighted_by_their_tokens():
  def metrics(mask, loss):
    return compute_base_metrics(LOGITS, TARGETS, jnp.array(mask), jnp.float32(loss))

  few = metrics([[1, 0, 0, 0, 0], [0] * 5], 4.0)
  many = metrics([[1, 1, 1, 0, 0], [0] * 5], 6.0)
  merged = {name: few[name].merge(many[name]) for name in few if not name.startswith("timing")}
  assert values(merged)["loss_per_nonpadding_target_token"] == pytest.approx(10 / 4)
  assert values(merged)["loss"] == 5.0, "a mean over two steps"


def test_older_metrics_are_plain_sums():
  logits = jnp.array([[[0.0, 2.0], [3.0, 1.0], [0.0, 1.0]]])
  targets, weights = jnp.array([[1, 1, 1]]), jnp.array([[1.0, 1.0, 0.5]])
  assert compute_weighted_accuracy(logits, targets) == 2
  assert compute_weighted_accuracy(logits, targets, weights) == 1.5
  more = {"mine": 7}
  metrics = compute_metrics(logits, targets, weights, jnp.float32(4), jnp.float32(2.5), more)
  computed = {n: float(m.compute()) for n, m in metrics.items() if n != "mine"}
  assert computed == {
    "loss": 4.0,
    "accuracy": 1.5,
    "weight_sum": 2.5,
    "num_examples": 1.0,
    "num_tokens": 3.0,
  }
  assert metrics["mine"] == 7


@pytest.mark.slow
def test_metrics_of_packed_batches_have_the_names_of_t5x():
  batch = make_batch(2) | {
    "encoder_segment_ids": jnp.ones((2, 10), jnp.int32),
    "decoder_segment_ids": jnp.array([[1, 1, 2, 2, 3, 0]] * 2),
  }
  _, metrics = make_model(Bigram()).loss_fn({"table": jnp.zeros((VOCAB, VOCAB))}, batch, None)
  assert float(metrics["effective_batch_size/decoder"].compute()) == 6.0
  assert float(metrics["non_padding_fraction/encoder"].compute()) == 1.0
  assert "non_padding_fraction/decoder_target_tokens" not in metrics
