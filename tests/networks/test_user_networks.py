"""A user's networks: modules with their own logical axes, and subclasses of T5."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen.partitioning import param_with_axes
from jax.sharding import NamedSharding, PartitionSpec
from tiny_models import T5_1_1, VOCAB, initialize, make_batch, make_model

from rosetta_t5.parallel import PjitPartitioner, standard_logical_axis_rules
from rosetta_t5.training import TrainState
from rosetta_t5.training.optimizers.adafactor import Adafactor
from rosetta_t5.training.optimizers.factor_rules import FactorDim, standard_logical_factor_rules
from t5x.examples.scalable_t5 import layers as scalable_layers
from t5x.examples.t5 import layers, network


class Mixture(nn.Module):
  """A user's network: T5X's layers, and one parameter for each of 4 experts with an axis of its own."""

  @nn.compact
  def __call__(self, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, **options):
    embed = layers.Embed(VOCAB, 16, embedding_init=nn.initializers.normal(1.0), name="embed")
    x_BTD = embed(decoder_input_tokens)
    mask = layers.make_decoder_mask(decoder_target_tokens, dtype=jnp.float32)
    bias = layers.RelativePositionBiases(8, 16, 4, jnp.float32)(6, 6, bidirectional=False)
    attention = scalable_layers.MultiHeadDotProductAttention(num_heads=4, head_dim=4)
    x_BTD = x_BTD + attention(x_BTD, x_BTD, mask, bias, deterministic=True)
    w_EDF = param_with_axes(
      "experts", nn.initializers.normal(0.1), (4, 16, 24), axes=("experts", "embed", "mlp")
    )
    x_BTF = nn.relu(jnp.einsum("btd,edf->btf", layers.LayerNorm()(x_BTD), w_EDF))
    logits = layers.DenseGeneral(VOCAB, kernel_axes=("mlp", "vocab"), name="logits")
    return logits(x_BTF)


def factor_rules():
  return {**standard_logical_factor_rules(), "experts": FactorDim.BATCH}


def place(state, partitioner):
  specs = partitioner.get_mesh_axes(state)
  shardings = jax.tree.map(
    lambda spec: NamedSharding(partitioner.mesh, spec),
    specs,
    is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
  )
  return jax.device_put(state, shardings)


@pytest.mark.slow
def test_the_axes_of_a_user_network_determine_sharding_and_factoring():
  model = make_model(Mixture())
  variables = initial_variables(model)
  state = TrainState.create(Adafactor(logical_factor_rules=factor_rules()), variables)
  rules = standard_logical_axis_rules(additional_rules=[("experts", "data")])
  partitioner = PjitPartitioner(num_partitions=2, logical_axis_rules=rules)
  state = place(state, partitioner)
  # 4 experts over 4 rows of the mesh, 24 features over its 2 columns.
  assert state.params["experts"].addressable_shards[0].data.shape == (1, 16, 12)
  moments = state.param_states["experts"]
  assert {moments.v_row.shape, moments.v_col.shape} == {(4, 16), (4, 24)}

  @jax.jit
  def step(state, batch):
    loss, grads = jax.value_and_grad(lambda p: model.loss_fn(p, batch, None)[0])(state.params)
    return loss, state.apply_gradient(grads, learning_rate=0.1)

  losses = []
  for _ in range(8):
    loss, state = step(state, make_batch(8))
    losses.append(float(loss))
  assert losses[-1] < 0.9 * losses[0]


def initial_variables(model):
  shapes = {"encoder_input_tokens": (1, 10), "decoder_input_tokens": (1, 6)}
  return jax.jit(lambda key: model.get_initial_variables(key, shapes))(jax.random.PRNGKey(0))


def test_an_axis_without_a_factor_rule_is_named():
  with pytest.raises(ValueError, match="experts"):
    TrainState.create(
      Adafactor(logical_factor_rules=standard_logical_factor_rules()),
      initial_variables(make_model(Mixture())),
    )


class LoudEncoder(network.Encoder):
  """Doubles the output of T5's encoder."""

  @nn.compact
  def __call__(self, encoder_input_tokens, encoder_mask=None, deterministic=False):
    encoded = super().__call__(encoder_input_tokens, encoder_mask, deterministic)
    gain = param_with_axes("gain", nn.initializers.constant(2.0), (16,), axes=("embed",))
    return encoded * gain[None, None]


class LoudTransformer(network.Transformer):
  """T5 with another encoder."""

  def setup(self):
    cfg = self.config
    self.token_embedder = layers.Embed(cfg.vocab_size, cfg.emb_dim, attend_dtype=jnp.float32)
    self.encoder = LoudEncoder(config=cfg, shared_embedding=self.token_embedder)
    self.decoder = network.Decoder(config=cfg, shared_embedding=self.token_embedder)


def encoded_by(module, params, tokens):
  encode = functools.partial(module.apply, enable_dropout=False, method=module.encode)
  return jax.jit(encode)({"params": params}, tokens)


@pytest.mark.slow
def test_a_subclass_of_t5_can_add_parameters():
  config = dataclasses.replace(T5_1_1, num_encoder_layers=1)
  module, tokens = LoudTransformer(config), make_batch(2)["encoder_input_tokens"]
  variables = initialize(module, jax.random.PRNGKey(0))
  assert variables["params_axes"]["encoder"]["gain_axes"].names == ("embed",)
  params = variables["params"]
  loud = encoded_by(module, params, tokens)
  plain = network.Transformer(config)
  params["encoder"] = {k: v for k, v in params["encoder"].items() if k != "gain"}
  quiet = encoded_by(plain, params, tokens)
  np.testing.assert_allclose(loud, 2 * quiet, rtol=1e-6)
