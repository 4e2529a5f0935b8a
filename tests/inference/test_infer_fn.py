"""Inference over datasets handles each example once and returns the results in order."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import T5_1_1, make_batch, make_model, variables

from rosetta_t5.data import token_limit
from rosetta_t5.inference import get_infer_fn
from rosetta_t5.inference.infer_fn import PADDING, shard_batches
from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.training import InferenceState

MODEL = make_model()
STATE = InferenceState.create(variables(Transformer(T5_1_1)))
EXAMPLES = [
  {name: np.asarray(x[row]) for name, x in make_batch(11, 6, 4).items()} for row in range(11)
]


@functools.cache
def infer_fn(step="score_batch", num_partitions=1, **options):
  partitioner = PjitPartitioner(num_partitions=num_partitions)
  axes = partitioner.get_mesh_axes(STATE)
  return get_infer_fn(getattr(MODEL, step, None) or STEPS[step], 8, axes, partitioner, **options)


@functools.cache
def expected_scores():
  batch = {name: jnp.stack([e[name] for e in EXAMPLES]) for name in EXAMPLES[0]}
  return np.asarray(jax.jit(MODEL.score_batch)(STATE.params, batch))


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [1, 4])
def test_every_example_is_scored_once_and_padding_rows_are_dropped(num_partitions):
  results = infer_fn(num_partitions=num_partitions)(enumerate(EXAMPLES), STATE)
  assert [index for index, _ in results] == list(range(11))
  np.testing.assert_allclose([score for _, score in results], expected_scores(), rtol=1e-4)


def test_results_are_in_the_order_of_the_indices_not_of_reading():
  mixed = np.random.default_rng(0).permutation(11)
  results = infer_fn()([(i + 100, EXAMPLES[i]) for i in mixed], STATE)
  assert [index for index, _ in results] == list(range(100, 111))
  np.testing.assert_allclose([score for _, score in results], expected_scores(), rtol=1e-4)


def test_a_token_id_outside_the_vocabulary_is_refused_with_its_batch():
  wrong = {**EXAMPLES[9], "encoder_input_tokens": EXAMPLES[9]["encoder_input_tokens"] + 5000}
  with pytest.raises(
    ValueError, match=r"begins with example 8 has the value 50\d\d in encoder_input"
  ):
    infer_fn(num_token_ids=token_limit(MODEL))(enumerate([*EXAMPLES[:9], wrong]), STATE)


@pytest.mark.slow
def test_predictions_are_lists_of_numbers_and_aux_is_in_their_order():
  predictions, aux = infer_fn("predict_batch_with_aux")(enumerate(EXAMPLES), STATE)
  index, tokens = predictions[10]
  assert index == 10
  assert type(tokens) is list
  assert {type(token) for token in tokens} == {int}
  batch = {name: x[10:11] for name, x in make_batch(11, 6, 4).items()}
  decode_BT, wanted = jax.jit(MODEL.predict_batch_with_aux)(STATE.params, batch)
  assert tokens == decode_BT[0].tolist()
  assert len(aux["scores"]) == 11
  assert aux["scores"][10] == pytest.approx(float(wanted["scores"][0]), rel=1e-4)


def draw(params, batch, rng):
  bits = jax.random.bits(rng, (), jnp.uint32)
  return jnp.broadcast_to(bits, (8,))


def empty_aux(params, batch):
  return batch["encoder_input_tokens"][:, 0], {}


def nested(params, batch):
  tokens_BT = batch["encoder_input_tokens"]
  return tokens_BT[:, 0], {"mean": {"of": (tokens_BT.mean(-1).astype(jnp.bfloat16),)}}


STEPS = {"draw": draw, "nested": nested, "empty_aux": empty_aux}


def test_each_batch_has_its_own_random_key_and_results_are_reproducible():
  first = infer_fn("draw")(enumerate(EXAMPLES), STATE, rng=jax.random.PRNGKey(3))
  key, rest = jax.random.split(jax.random.PRNGKey(3))
  wanted = [int(jax.random.bits(key)), int(jax.random.bits(jax.random.split(rest)[0]))]
  assert [bits for _, bits in first] == [wanted[0]] * 8 + [wanted[1]] * 3
  assert first == infer_fn("draw")(enumerate(EXAMPLES), STATE, rng=jax.random.PRNGKey(3))


def test_aux_may_be_nested_and_bfloat16_becomes_numbers():
  _, aux = infer_fn("nested")(enumerate(EXAMPLES), STATE)
  (means,) = aux["mean"]["of"]
  assert {type(mean) for mean in means} == {float}
  assert means == [float(jnp.bfloat16(e["encoder_input_tokens"].mean())) for e in EXAMPLES]
  _, kept = infer_fn("nested", keep_aux_as_numpy=True)(enumerate(EXAMPLES), STATE)
  assert kept["mean"]["of"][0][0].dtype == jnp.bfloat16


def test_a_step_without_auxiliary_values_returns_an_empty_dictionary():
  pairs, aux = infer_fn("empty_aux")(enumerate(EXAMPLES), STATE)
  assert pairs == [(n, int(e["encoder_input_tokens"][0])) for n, e in enumerate(EXAMPLES)]
  assert aux == {}


def test_shards_divide_the_examples_and_have_equally_many_batches():
  rows = [(n, {"x": np.array(n)}) for n in range(11)]
  shards = [list(shard_batches(rows, 4, shard, 2)) for shard in range(2)]
  assert [[index.tolist() for index, _ in shard] for shard in shards] == [
    [[0, 2], [4, 6], [8, 10]],
    [[1, 3], [5, 7], [9, PADDING]],
  ]
  assert shards[1][2][1]["x"].tolist() == [9, 0]


def test_an_empty_dataset_is_refused():
  with pytest.raises(ValueError, match="no example for inference: the dataset is empty"):
    infer_fn()([], STATE)


def test_a_batch_size_that_the_devices_do_not_divide_is_refused_at_once():
  partitioner = PjitPartitioner(num_partitions=1)
  with pytest.raises(ValueError, match="batch size 6 cannot be split over the 8 devices"):
    get_infer_fn(MODEL.score_batch, 6, partitioner.get_mesh_axes(STATE), partitioner)
