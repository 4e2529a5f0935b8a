"""A network with a decoder of the user's own, made of T5X's layers, as Uncertainty Baselines has it."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import T5_1_1, make_batch, make_model

from t5x.examples.t5 import network

layers = network.layers


class OwnDecoder(nn.Module):
  """T5's decoder with T5X's arguments, written with T5X's modules."""

  config: network.T5Config
  shared_embedding: nn.Module

  @nn.compact
  def __call__(
    self,
    encoded,
    decoder_input_tokens,
    decoder_positions=None,
    decoder_mask=None,
    encoder_decoder_mask=None,
    deterministic=False,
    decode=False,
    max_decode_length=None,
  ):
    cfg = self.config
    relative_embedding = layers.RelativePositionBiases(
      num_buckets=32,
      max_distance=128,
      num_heads=cfg.num_heads,
      dtype=cfg.dtype,
      embedding_init=nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
      name="relpos_bias",
    )
    y = self.shared_embedding(decoder_input_tokens).astype(cfg.dtype)
    for n in range(cfg.num_decoder_layers):
      layer = network.DecoderLayer(
        config=cfg, relative_embedding=relative_embedding, name=f"layers_{n}"
      )
      y = layer(
        y,
        encoded,
        decoder_mask=decoder_mask,
        encoder_decoder_mask=encoder_decoder_mask,
        deterministic=deterministic,
        decode=decode,
        max_decode_length=max_decode_length,
      )
    y = layers.LayerNorm(dtype=cfg.dtype, name="decoder_norm")(y)
    return layers.DenseGeneral(
      cfg.vocab_size, dtype=jnp.float32, kernel_axes=("embed", "vocab"), name="logits_dense"
    )(y)


class OwnTransformer(network.Transformer):
  """T5 with the decoder above."""

  def setup(self):
    self.shared_embedding = layers.Embed(
      num_embeddings=self.config.vocab_size,
      features=self.config.emb_dim,
      embedding_init=nn.initializers.normal(stddev=1.0),
      one_hot=True,
      name="token_embedder",
    )
    self.encoder = network.Encoder(config=self.config, shared_embedding=self.shared_embedding)
    self.decoder = OwnDecoder(config=self.config, shared_embedding=self.shared_embedding)


@pytest.mark.slow
def test_a_decoder_of_t5xs_layers_has_the_parameters_and_scores_of_t5_and_decodes():
  batch = make_batch(2)
  shapes = {name: x.shape for name, x in batch.items()}
  results = []
  for module in (network.Transformer(T5_1_1), OwnTransformer(T5_1_1)):
    model = make_model(module)
    init = jax.jit(functools.partial(model.get_initial_variables, input_shapes=shapes))
    params = init(jax.random.PRNGKey(0))["params"]
    results.append((params, jax.jit(model.score_batch)(params, batch)))
  jax.tree.map(np.testing.assert_array_equal, *results)
  decodes = jax.eval_shape(model.predict_batch, params, batch)
  assert decodes.shape == batch["decoder_input_tokens"].shape
