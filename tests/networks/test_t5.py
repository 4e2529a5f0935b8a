"""T5 as a whole: padding, packing, cached decoding, dropout, precision and invalid configs."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from tiny_models import (
  T5_1_0,
  T5_1_1,
  initialize,
  logits_of,
  make_batch,
  make_model,
  pack,
  params_of,
)

from rosetta_t5.networks.layers.attention import MultiHeadDotProductAttention
from rosetta_t5.networks.layers.positions import apply_rotary
from rosetta_t5.networks.transformer import Encoder, T5Config, Transformer


@functools.cache
def loss_and_logits(config):
  """Returns the compiled function (params, batch) → (loss, logits)."""
  model = make_model(Transformer(config))
  return jax.jit(lambda p, b: (model.eval_fn(p, b)[0], logits_of(model.module, p, b)))


def pad(batch, inputs, targets):
  """Returns the batch with more padding at the end."""
  more = {"encoder": inputs, "decoder": targets}
  return {
    name: jnp.pad(tokens, ((0, 0), (0, more[name.split("_")[0]]))) for name, tokens in batch.items()
  }


@pytest.fixture(scope="module")
def alone():
  """Three examples, and T5 1.1's loss and logits for them."""
  batch = make_batch(3)
  return batch, *loss_and_logits(T5_1_1)(params_of(T5_1_1), batch)


def real_logits(batch, logits):
  return np.asarray(logits)[np.asarray(batch["decoder_target_tokens"]) > 0]


@pytest.mark.slow
def test_padding_does_not_change_the_results(alone):
  batch, loss, logits = alone
  padded = pad(batch, inputs=3, targets=2)
  got_loss, got_logits = loss_and_logits(T5_1_1)(params_of(T5_1_1), padded)
  np.testing.assert_allclose(got_loss, loss, rtol=1e-6)
  np.testing.assert_allclose(real_logits(padded, got_logits), real_logits(batch, logits), atol=1e-5)


@pytest.mark.slow
def test_packed_examples_have_the_loss_and_logits_of_separate_ones(alone):
  batch, loss, logits = alone
  packed = pack(batch)
  got_loss, got_logits = loss_and_logits(T5_1_1)(params_of(T5_1_1), packed)
  np.testing.assert_allclose(got_loss, loss, rtol=1e-6)
  np.testing.assert_allclose(real_logits(packed, got_logits), real_logits(batch, logits), atol=1e-5)
  del packed["decoder_segment_ids"], packed["encoder_segment_ids"]
  _, mixed = loss_and_logits(T5_1_1)(params_of(T5_1_1), packed)
  assert not np.allclose(real_logits(packed, mixed), real_logits(batch, logits), atol=1e-2)


@pytest.mark.slow
def test_cached_decoding_gives_the_logits_of_teacher_forcing(alone):
  batch, _, logits = alone
  model, params = make_model(), params_of(T5_1_1)
  module, inputs = model.module, batch["encoder_input_tokens"]
  encode = functools.partial(module.apply, method=module.encode, enable_dropout=False)
  encoded = jax.jit(encode)({"params": params}, inputs)

  @jax.jit
  def step(cache, token_B1):
    options = {"decode": True, "enable_dropout": False, "max_decode_length": 6}
    variables = {"params": params, "cache": cache}
    return module.apply(
      variables,
      encoded,
      inputs,
      token_B1,
      token_B1,
      **options,
      mutable=["cache"],
      method=module.decode,
    )

  tokens = batch["decoder_input_tokens"]
  options = {"decode": True, "enable_dropout": False, "mutable": ["cache"]}
  create_cache = jax.jit(functools.partial(module.apply, **options))
  _, created = create_cache({"params": params}, inputs, tokens, tokens)
  cache = created["cache"]
  for position in range(6):
    token_B1 = batch["decoder_input_tokens"][:, position, None]
    got, changed = step(cache, token_B1)
    cache = changed["cache"]
    real = np.asarray(batch["decoder_target_tokens"][:, position]) > 0
    np.testing.assert_allclose(got[real, 0], logits[real, position], atol=1e-5)


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("tied", [True, False])
def test_logits_use_the_scaled_embedding_or_a_separate_projection(tied):
  config = dataclasses.replace(T5_1_1, num_encoder_layers=0, num_decoder_layers=0)
  config = dataclasses.replace(config, logits_via_embedding=tied)
  params, batch = params_of(config), make_batch(2)
  assert ("logits_dense" in params["decoder"]) is not tied
  _, logits = loss_and_logits(config)(params, batch)
  table = np.asarray(params["token_embedder"]["embedding"], np.float64)
  vectors = table[np.asarray(batch["decoder_input_tokens"])]
  normed = vectors / np.sqrt((vectors**2).mean(-1, keepdims=True) + 1e-6)
  decoder = jax.tree.map(np.asarray, params["decoder"])
  kernel = table.T / 4 if tied else decoder["logits_dense"]["kernel"]
  expected = normed * decoder["decoder_norm"]["scale"] @ kernel
  np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_parameters_have_the_names_of_t5x():
  def names(config):
    paths = jax.tree_util.tree_leaves_with_path(params_of(config))
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths}

  attention = {f"{name}/kernel" for name in ("query", "key", "value", "out")}
  norms = {
    "encoder": {"attention", "mlp"},
    "decoder": {"self_attention", "cross_attention", "mlp"},
  }
  expected = {"token_embedder/embedding", "decoder/logits_dense/kernel"}
  for stack, blocks in {
    "encoder": ["attention"],
    "decoder": ["self_attention", "encoder_decoder_attention"],
  }.items():
    expected |= {f"{stack}/layers_0/{block}/{name}" for block in blocks for name in attention}
    expected |= {f"{stack}/layers_0/pre_{norm}_layer_norm/scale" for norm in norms[stack]}
    expected |= {f"{stack}/layers_0/mlp/{name}/kernel" for name in ("wi_0", "wi_1", "wo")}
    expected |= {f"{stack}/{stack}_norm/scale", f"{stack}/relpos_bias/rel_embedding"}
  assert names(T5_1_1) == expected
  ungated = {name.replace("wi_0", "wi") for name in expected if "wi_1" not in name}
  assert names(T5_1_0) == ungated - {"decoder/logits_dense/kernel"}


def attentions_of(config):
  """Returns the attention modules that a model of this config calls, by their paths."""
  called = {}

  def record(call, args, kwargs, context):
    if isinstance(context.module, MultiHeadDotProductAttention):
      called[context.module.path] = context.module
    return call(*args, **kwargs)

  with nn.intercept_methods(record):
    jax.eval_shape(
      functools.partial(logits_of, Transformer(config)), params_of(config), make_batch()
    )
  return called


@pytest.mark.one_quick_variant
@pytest.mark.parametrize(
  ("switch", "field"),
  [("scale_attn_logits", "scale_attn_logits"), ("float32_attention_logits", "float32_logits")],
)
def test_settings_of_attention_logits_apply_to_every_attention(switch, field):
  for on in (True, False):
    modules = attentions_of(dataclasses.replace(T5_1_1, **{switch: on})).values()
    assert [getattr(module, field) for module in modules] == [on] * 3


@pytest.mark.slow
def test_parameters_and_logits_are_float32_under_bfloat16(alone):
  batch, _, logits = alone
  config = dataclasses.replace(T5_1_1, dtype="bfloat16")
  shapes = jax.eval_shape(lambda key: initialize(Transformer(config), key), jax.random.PRNGKey(0))
  assert {leaf.dtype for leaf in jax.tree.leaves(shapes["params"])} == {jnp.dtype(jnp.float32)}
  _, got = loss_and_logits(config)(params_of(T5_1_1), batch)
  assert got.dtype == jnp.float32
  difference = np.abs(real_logits(batch, got) - real_logits(batch, logits))
  assert 1e-5 < difference.max() < 0.1


def test_float16_is_refused_with_alternatives():
  for dtype in ("float16", jnp.float16):
    with pytest.raises(ValueError, match=r"T5Config.dtype = 'float16' overflows .* 'bfloat16'"):
      T5Config(vocab_size=8, dtype=dtype)


@pytest.mark.slow
def test_dropout_depends_on_its_key_and_is_off_in_evaluation(alone):
  batch, loss, _ = alone
  model = make_model(Transformer(dataclasses.replace(T5_1_1, dropout_rate=0.5)))
  compiled = jax.jit(lambda key: model.loss_fn(params_of(T5_1_1), batch, key)[0])
  with_dropout = [float(compiled(jax.random.PRNGKey(seed))) for seed in (0, 0, 1)]
  assert with_dropout[0] == with_dropout[1] != with_dropout[2]
  assert float(loss) not in with_dropout
  programs = [jax.make_jaxpr(m.eval_fn)(params_of(T5_1_1), batch) for m in (model, make_model())]
  assert str(programs[0]) == str(programs[1])


@pytest.mark.slow
def test_embedding_dropout_is_shared_by_positions_but_the_last_encoder_dropout_is_not():
  config = dataclasses.replace(T5_1_1, num_encoder_layers=0, dropout_rate=0.5, emb_dim=256)
  encoder = Encoder(config, nn.Embed(8, 256, embedding_init=nn.initializers.ones))
  tokens = jnp.ones((2, 16), jnp.int32)
  keys = {"params": jax.random.PRNGKey(0), "dropout": jax.random.PRNGKey(1)}
  output, _ = encoder.init_with_output(keys, tokens)
  everywhere = np.all(np.asarray(output) == 0, axis=1)
  np.testing.assert_allclose(everywhere.mean(axis=1), 0.5, atol=0.1)
  elsewhere = np.asarray(output).transpose(0, 2, 1)[~everywhere]
  np.testing.assert_allclose((elsewhere == 0).mean(), 0.5, atol=0.05)
  assert not np.array_equal(everywhere[0], everywhere[1])


def test_shapes_are_checked_while_tests_run():
  with pytest.raises(jaxtyping.TypeCheckError, match="'x_BTHK'"):
    apply_rotary(jnp.ones(3), jnp.ones((1, 3), jnp.int32))


def test_batch_whose_features_differ_in_length_is_refused(alone):
  batch, *_ = alone
  shorter = batch | {"decoder_target_tokens": batch["decoder_target_tokens"][:, :4]}
  with pytest.raises(jaxtyping.TypeCheckError, match="decoder_target_tokens"):
    logits_of(Transformer(T5_1_1), params_of(T5_1_1), shorter)
