"""Short inputs are computed at a short length, and each length is compiled once."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from tiny_models import (
  DECODER_ONLY,
  T5_1_1,
  VOCAB,
  decoder_only_variables,
  make_batch,
  make_decoder_only_model,
  make_model,
  variables,
)

from rosetta_t5.inference import get_infer_fn
from rosetta_t5.inference.infer_fn import cut_rows, default_buckets, shard_batches
from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.training import InferenceState

LENGTH = 16


def examples():
  """Returns four batches of 8 examples; all are short except for one in the second batch."""
  batch = make_batch(32, LENGTH, 4)
  tokens = np.asarray(batch["encoder_input_tokens"]).copy()
  tokens[:, 5:] = 0
  tokens[13, :12] = 7
  batch["encoder_input_tokens"] = tokens
  return [{name: np.asarray(x[row]) for name, x in batch.items()} for row in range(32)]


@pytest.mark.slow
def test_each_length_is_compiled_once_and_gives_the_scores_of_the_full_length():
  model, partitioner, shapes = make_model(), PjitPartitioner(num_partitions=1), []
  state = InferenceState.create(variables(Transformer(T5_1_1)))

  def step(params, batch):
    shapes.append(batch["encoder_input_tokens"].shape[1])  # This runs only during compilation.
    return model.score_batch(params, batch)

  def scores(**options):
    axes = partitioner.get_mesh_axes(state)
    results = get_infer_fn(step, 8, axes, partitioner, **options)(enumerate(examples()), state)
    return [score for _, score in results]

  full = scores()
  assert shapes == [LENGTH]
  np.testing.assert_allclose(scores(input_length_buckets=(12, 6)), full, rtol=1e-5)
  assert shapes == [LENGTH, 6, 12]


def test_all_shards_get_the_length_of_the_longest_input_in_the_batch():
  rows = list(enumerate(examples()))[:10]
  cut = functools.partial(cut_rows, buckets=(6,))
  lengths = [
    [batch["encoder_input_tokens"].shape for _, batch in shard_batches(rows, 8, shard, 2, cut)]
    for shard in range(2)
  ]
  assert lengths == [[(4, 6), (4, 6)]] * 2
  long = [(0, rows[0][1]), (1, examples()[13])]
  found = [b for shard in (0, 1) for _, b in shard_batches(long, 2, shard, 2, cut)]
  assert [b["encoder_input_tokens"].shape for b in found] == [(1, LENGTH)] * 2
  assert found[0]["decoder_target_tokens"].shape == (1, 4)


def prefix_lm_examples():
  """Returns three batches of 8 rows: with short prompts, with one longer prompt, and full rows."""
  rng, rows = np.random.default_rng(0), []
  for row in range(24):
    prompt = 4 if row < 8 else {12: 7}.get(row, 3) if row < 16 else LENGTH - 2
    tokens = np.zeros(LENGTH, np.int32)
    tokens[: prompt + 2] = rng.integers(2, VOCAB, prompt + 2)
    positions = np.arange(LENGTH)
    rows.append(
      {
        "decoder_target_tokens": tokens,
        "decoder_input_tokens": np.pad(tokens, (1, 0))[:-1],
        "decoder_causal_attention": (positions <= prompt).astype(np.int32),
        "decoder_loss_weights": ((positions >= prompt) & (tokens > 0)).astype(np.int32),
      }
    )
  return rows


@pytest.mark.slow
@pytest.mark.parametrize(("is_scoring", "is_prefix"), [(True, True), (False, True)])
def test_a_decoder_only_model_continues_short_prompts_as_at_the_full_length(is_scoring, is_prefix):
  model = make_decoder_only_model(inputs_bidirectional_attention=is_prefix)
  partitioner, shapes = PjitPartitioner(num_partitions=1), []
  state = InferenceState.create(decoder_only_variables(DECODER_ONLY))

  def step(params, batch):
    shapes.append([batch[f"decoder_{n}"].shape[1] for n in ("causal_attention", "target_tokens")])
    if is_scoring:
      return model.score_batch(params, batch)
    return model.predict_batch_with_aux(params, batch)

  def results(**options):
    axes = partitioner.get_mesh_axes(state)
    infer_fn = get_infer_fn(step, 8, axes, partitioner, is_scoring=is_scoring, **options)
    found = infer_fn(enumerate(prefix_lm_examples()), state)
    return (found, {"scores": [x for _, x in found]}) if is_scoring else found

  full, full_aux = results()
  assert shapes == [[LENGTH, LENGTH]]
  cut, cut_aux = results(input_length_buckets=(6, 10))
  whole = [[6, 6], [10, 10]] if is_scoring else [[6, LENGTH], [10, LENGTH]]
  assert shapes == [[LENGTH, LENGTH], *whole, [LENGTH, LENGTH]]
  np.testing.assert_allclose(cut_aux["scores"], full_aux["scores"], rtol=1e-5)
  if not is_scoring:
    assert cut == full, "a short prompt must not shorten the prediction"


def test_default_buckets_are_fractions_of_the_length():
  assert default_buckets(512) == (64, 128, 256)
  assert default_buckets(38) == (8, 16, 32)
  assert default_buckets(8) == ()
