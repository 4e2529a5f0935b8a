"""Short inputs are computed at a short length, by as many programs as there are lengths."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import T5_1_1, make_batch, make_model, variables

from rosetta_t5.inference import get_infer_fn
from rosetta_t5.inference.infer_fn import _batches
from rosetta_t5.inference.length_buckets import default_buckets
from rosetta_t5.networks.t5 import Transformer
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.training import InferenceState

LENGTH = 16


def examples():
  """Returns 32 examples: three batches of 8 short ones, and one with a long one among them."""
  batch = make_batch(32, LENGTH, 4)
  tokens = np.asarray(batch["encoder_input_tokens"]).copy()
  tokens[:, 5:] = 0
  tokens[13, :12] = 7
  batch["encoder_input_tokens"] = tokens
  return [{name: np.asarray(x[row]) for name, x in batch.items()} for row in range(32)]


def test_a_program_a_length_and_the_scores_of_the_full_length():
  model, partitioner, shapes = make_model(), PjitPartitioner(num_partitions=1), []
  state = InferenceState.create(variables(Transformer(T5_1_1)))

  def step(params, batch):
    shapes.append(batch["encoder_input_tokens"].shape[1])  # only while a program is made
    return model.score_batch(params, batch)

  def scores(**options):
    axes = partitioner.get_mesh_axes(state)
    results = get_infer_fn(step, 8, axes, partitioner, **options)(enumerate(examples()), state)
    return [score for _, score in results]

  full = scores()
  assert shapes == [LENGTH]
  np.testing.assert_allclose(scores(input_length_buckets=(12, 6)), full, rtol=1e-5)
  assert shapes == [LENGTH, 6, 12]


def test_all_shards_come_to_the_length_of_the_longest_in_the_batch():
  rows = list(enumerate(examples()))[:10]
  lengths = [
    [batch["encoder_input_tokens"].shape for _, batch in _batches(rows, 8, shard, 2, (6,))]
    for shard in range(2)
  ]
  assert lengths == [[(4, 6), (4, 6)]] * 2
  long = [(0, rows[0][1]), (1, examples()[13])]
  found = [b for shard in (0, 1) for _, b in _batches(long, 2, shard, 2, (6,))]
  assert [b["encoder_input_tokens"].shape for b in found] == [(1, LENGTH)] * 2
  assert found[0]["decoder_target_tokens"].shape == (1, 4)


def test_buckets_by_default_are_parts_of_the_length_and_wrong_ones_are_refused():
  assert default_buckets(512) == (64, 128, 256)
  assert default_buckets(38) == (8, 16, 32)
  assert default_buckets(8) == ()
  with pytest.raises(ValueError, match=r"input_length_buckets = \(64, 0\) must be lengths from 1"):
    get_infer_fn(None, 8, None, None, input_length_buckets=(64, 0))
