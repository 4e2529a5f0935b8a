"""`DualEncoderModel`: the contrastive loss of pairs of texts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax
from tiny_models import T5_1_1, make_batch, params_of

from rosetta_t5.models import DualEncoderModel, EncoderModel
from rosetta_t5.networks.transformer import Transformer

TEMPERATURE = 0.05
MODULE = Transformer(T5_1_1)
PARAMS = params_of(T5_1_1)
MODEL = DualEncoderModel(MODULE, None, None, None, temperature=TEMPERATURE)
SIDES = ("encoder_input_tokens", "decoder_target_tokens")
BATCH = {name: make_batch(4)[name] for name in SIDES}
PADDED = {name: jnp.pad(tokens, ((0, 3), (0, 0))) for name, tokens in BATCH.items()}


@jax.jit
def _loss(batch):
  loss, metrics = MODEL.loss_fn(PARAMS, batch, None)
  return loss, metrics["accuracy"].compute()


def loss_of(batch):
  return tuple(map(float, _loss(batch)))


@jax.jit
def gradients_of(batch):
  return jax.grad(lambda params: MODEL.loss_fn(params, batch, None)[0])(PARAMS)


def test_the_loss_compares_each_text_with_all_others_in_both_directions() -> None:
  encoder = EncoderModel(MODULE, None, None, None)
  vectors = [
    np.float64(jax.jit(encoder.embed_batch)(PARAMS, {"encoder_input_tokens": BATCH[name]}))
    for name in SIDES
  ]
  a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in vectors)
  similarities = a @ b.T / TEMPERATURE
  expected = -sum(np.trace(log_softmax(s, axis=1)) for s in (similarities, similarities.T)) / 2
  closest = np.mean(similarities.argmax(axis=1) == np.arange(4))
  np.testing.assert_allclose(loss_of(BATCH), (expected, closest), rtol=1e-5)


def test_rows_of_padding_do_not_count() -> None:
  np.testing.assert_allclose(loss_of(PADDED), loss_of(BATCH), rtol=1e-6)
  gradients = jax.tree.leaves(gradients_of(PADDED))
  assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_padding_at_the_end_of_texts_does_not_count() -> None:
  longer = {name: jnp.pad(tokens, ((0, 0), (0, 5))) for name, tokens in BATCH.items()}
  np.testing.assert_allclose(loss_of(longer), loss_of(BATCH), rtol=1e-5)


def test_only_the_encoder_is_trained() -> None:
  gradients = gradients_of(PADDED)
  largest = {
    side: max(map(jnp.max, map(jnp.abs, jax.tree.leaves(tree)))) for side, tree in gradients.items()
  }
  assert largest["encoder"] > 0 == largest["decoder"]


def test_packed_rows_are_refused() -> None:
  packed = {**BATCH, "encoder_segment_ids": jnp.ones_like(BATCH["encoder_input_tokens"])}
  with pytest.raises(ValueError, match=r"one pair per row: set utils.DatasetConfig.pack = False"):
    loss_of(packed)


def test_predictions_and_scores_are_refused() -> None:
  for compute in (MODEL.predict_batch, MODEL.score_batch):
    with pytest.raises(ValueError, match="use `rosetta-t5 embed`"):
      compute(PARAMS, BATCH)
