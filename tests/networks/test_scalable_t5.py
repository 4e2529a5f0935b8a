"""Scalable T5, scanned or not, equals plain T5 and has T5X's initial parameters."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core.scope import LazyRng
from flax.traverse_util import flatten_dict
from scalable_trees import PLAIN, scalable, to_scanned, to_unscanned
from tiny_models import initialize, logits_of, make_batch, make_model, pack, params_of

from rosetta_t5.networks.config import ScalableT5Config as T5Config
from rosetta_t5.networks.layers.dropout import Dropout
from rosetta_t5.networks.transformer import Transformer

UNSCANNED, SCANNED = scalable(scan_layers=False), scalable()
LAYERS = {"encoder": PLAIN.num_encoder_layers, "decoder": PLAIN.num_decoder_layers}
KEY = jax.random.PRNGKey(0)
# The batch is packed, so that every comparison includes segments, and long, to cover many buckets.
BATCH = pack(make_batch(2, inputs=40, targets=40))


def params_for(config):
  """Returns the test model's parameters in the tree of `config`."""
  plain = params_of(PLAIN)
  if not isinstance(config, T5Config):
    return plain
  unscanned = to_unscanned(plain)
  return to_scanned(unscanned, config.param_scan_axis) if config.scan_layers else unscanned


def model_of(config):
  return make_model(Transformer(config))


@functools.cache
def results(config):
  """Returns the batch's logits, a gradient through them, and the memory for both."""
  model, params = model_of(config), params_for(config)
  key = KEY if config.dropout_rate else None

  def weighted(params):
    logits = logits_of(model.module, params, BATCH, dropout_rng=key)
    return jnp.vdot(logits, jnp.cos(jnp.arange(logits.size))), logits

  compiled = jax.jit(jax.grad(weighted, has_aux=True)).lower(params).compile()
  grads, logits = compiled(params)
  return logits, grads, compiled.memory_analysis().temp_size_in_bytes


def assert_close(got, expected, tolerance):
  """Fails if an array differs by more than `tolerance` of its largest entry."""

  def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max())

  jax.tree.map(close, got, expected)


@pytest.mark.slow  # Checkpoints of one restore into the other (tests/checkpoints/test_layouts.py).
def test_unscanned_layers_equal_plain_t5_including_dropout():
  logits, grads, _ = results(dataclasses.replace(PLAIN, dropout_rate=0.3))
  got_logits, got_grads, _ = results(dataclasses.replace(UNSCANNED, dropout_rate=0.3))
  np.testing.assert_allclose(got_logits, logits, atol=1e-5)
  assert not np.allclose(logits, results(UNSCANNED)[0], atol=0.1)
  got, expected = flatten_dict(got_grads), flatten_dict(to_unscanned(grads))
  assert got.keys() == expected.keys()
  for path in got:
    if "relpos_bias" not in path:
      np.testing.assert_allclose(got[path], expected[path], 1e-5, 1e-4, err_msg=str(path))
  for stack, layers in LAYERS.items():
    # The gradient of a shared bias is the sum of the gradients of separate ones.
    name = ("relpos_bias", "rel_embedding")
    apart = sum(got[(stack, f"layers_{i}", *name)] for i in range(layers))
    np.testing.assert_allclose(apart, flatten_dict(grads)[(stack, *name)], 1e-5, 1e-4)


# Stacked along axis 0, with settings of plain T5.
SWITCHED = {"param_scan_axis": 0, "transpose_batch_sequence": True, "fuse_qkv_params": True}


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("changes", [{}, SWITCHED])
def test_scanned_layers_equal_unscanned_layers(changes):
  config = dataclasses.replace(SCANNED, **changes)
  logits, grads, _ = results(UNSCANNED)
  got_logits, got_grads, _ = results(config)
  assert_close(got_logits, logits, 1e-5)
  assert_close(got_grads, to_scanned(grads, config.param_scan_axis), 1e-5)


@pytest.mark.slow
def test_rematerialization_saves_memory_without_changing_the_numbers():
  # With dropout, whose masks the recomputed forward pass must draw again.
  changes = {"dropout_rate": 0.3}
  policies = ("none", "minimal", "full")
  runs = [results(dataclasses.replace(SCANNED, **changes, remat_policy=p)) for p in policies]
  for run in runs[1:]:
    assert_close(run[0], runs[0][0], 1e-5)
    assert_close(run[1], runs[0][1], 1e-5)
  memory = [run[2] for run in runs]
  assert memory[0] > 1.2 * memory[1] > 1.2 * 1.2 * memory[2], memory


def initial(config):
  return jax.jit(lambda: initialize(model_of(config).module, KEY)["params"])()


@pytest.mark.slow
def test_unscanned_parameters_are_those_of_plain_t5_with_a_bias_per_layer():
  plain = dataclasses.replace(PLAIN, num_encoder_layers=1)
  got = flatten_dict(initial(scalable(plain, scan_layers=False)))
  expected = flatten_dict(to_unscanned(initial(plain), plain))
  assert got.keys() == expected.keys()
  uniform = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
  for path, value in got.items():
    if "relpos_bias" in path:
      key = LazyRng.create(KEY, *path[:-1], 1).as_jax_rng()
      np.testing.assert_allclose(value, uniform(key, value.shape), atol=1e-6)
    else:
      np.testing.assert_allclose(value, expected[path], atol=1e-6, err_msg=str(path))


@pytest.mark.slow
def test_each_scanned_layer_is_initialized_with_its_part_of_the_split_key():
  drawn = flatten_dict(initial(SCANNED)["encoder"]["encoder"])
  scaling, dims = nn.initializers.variance_scaling, (PLAIN.emb_dim, PLAIN.num_heads, PLAIN.head_dim)
  matrices = {
    ("attention", "query"): lambda key: scaling(1 / dims[2], "fan_in", "normal")(key, (16, 16)),
    ("attention", "out"): lambda key: scaling(1.0, "fan_in", "normal")(key, (16, 16)),
    ("mlp", "wi_1"): lambda key: scaling(1.0, "fan_in", "truncated_normal")(key, (16, 24)),
    ("relpos_bias",): lambda key: scaling(1.0, "fan_avg", "uniform")(key, (4, 32)),
  }
  for layer, key in enumerate(jax.random.split(KEY, LAYERS["encoder"])):
    for path, draw in matrices.items():
      # Flax counts random draws during tracing, and the body of a scan is traced twice.
      own = LazyRng.create(key, "encoder", "encoder", *path, 2).as_jax_rng()
      name = "rel_embedding" if path == ("relpos_bias",) else "kernel"
      got = drawn[(*path, name)][:, layer]
      np.testing.assert_allclose(got, draw(own).reshape(got.shape), atol=1e-6, err_msg=str(path))


@pytest.mark.slow
def test_each_scanned_layer_drops_its_own_features_at_every_position():
  module = model_of(dataclasses.replace(SCANNED, dropout_rate=0.5)).module
  encode = functools.partial(
    module.apply,
    rngs={"dropout": KEY},
    method=module.encode,
    mutable=["intermediates"],
    capture_intermediates=lambda child, _: isinstance(child, Dropout),
  )
  _, captured = jax.jit(encode)({"params": params_for(SCANNED)}, BATCH["encoder_input_tokens"])
  for name in ("Dropout_0", "Dropout_1"):
    (x_LBSD,) = captured["intermediates"]["encoder"]["encoder"][name]["__call__"]
    dropped_LSD = np.asarray(x_LBSD[:, 0] == 0)
    assert (dropped_LSD == dropped_LSD[:, :1]).all()
    assert (dropped_LSD[0, 0] != dropped_LSD[1, 0]).any()
    assert 0 < dropped_LSD[:, 0].mean() < 1


def layer_axes(config):
  """Returns the logical axes of the encoder's attention and of a norm, by the parameter's name."""
  shapes = jax.eval_shape(lambda: initialize(Transformer(config), KEY))
  axes = {path: leaf.names for path, leaf in flatten_dict(shapes["params_axes"]).items()}
  for path, leaf in flatten_dict(shapes["params"]).items():
    assert len(axes[(*path[:-1], f"{path[-1]}_axes")]) == leaf.ndim, path
  return {path[2:]: names for path, names in axes.items() if path[0] == "encoder"}


def test_logical_axes_include_layers_where_parameters_are_stacked():
  axes = layer_axes(UNSCANNED)
  assert axes[("attention", "query", "kernel_axes")] == ("embed", "heads", "kv")
  assert axes[("attention", "out", "kernel_axes")] == ("heads", "kv", "embed")
  assert axes[("mlp", "wo", "kernel_axes")] == ("mlp", "embed")
  for axis in (0, 1):
    stacked = layer_axes(dataclasses.replace(SCANNED, param_scan_axis=axis))
    for path, names in axes.items():
      if path and path != ("scale_axes",):
        assert stacked[path] == (*names[:axis], "layers", *names[axis:])


def test_parameter_names_are_those_of_t5x():
  scanned, unscanned = (
    {"/".join(path[:-1]) for path in flatten_dict(jax.eval_shape(lambda: initial(config)))}  # noqa: B023
    for config in (SCANNED, UNSCANNED)
  )
  norms = {"pre_self_attention_layer_norm", "pre_cross_attention_layer_norm", "pre_mlp_layer_norm"}
  attentions = ("self_attention", "encoder_decoder_attention")
  projections = ("query", "key", "value", "out")
  layer = norms | {f"{block}/{name}" for block in attentions for name in projections}
  layer |= {"relpos_bias", "mlp/wi_0", "mlp/wi_1", "mlp/wo"}
  ends = {"decoder/decoder_norm", "decoder/logits_dense"}
  assert {n for n in scanned if n.startswith("decoder/")} - ends == {
    f"decoder/decoder/{name}" for name in layer
  }
  assert {n for n in unscanned if n.startswith("decoder/layers_1/")} == {
    f"decoder/layers_1/{name}" for name in layer
  }
  assert "token_embedder" in scanned


def test_defaults_are_those_of_t5x():
  config = T5Config(vocab_size=8)
  assert (config.remat_policy, config.scan_layers, config.param_scan_axis) == ("none", True, 1)
  assert Transformer(config).scan_layers
  assert not Transformer(UNSCANNED).scan_layers


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    (
      {"param_scan_axis": 2},
      r"T5Config.param_scan_axis must be 0 or 1, got 2: the scale of a norm",
    ),
    (
      {"remat_policy": "minimum"},
      r"remat_policy must be one of .* got 'minimum' \(did you mean 'minimal'",
    ),
    ({"dtype": "float16"}, r"T5Config.dtype = 'float16' overflows"),
  ],
)
def test_invalid_values_are_refused(changes, text):
  with pytest.raises(ValueError, match=text):
    T5Config(vocab_size=8, **changes)


def test_the_class_of_the_config_has_the_name_that_gin_files_use():
  from t5x.examples.scalable_t5 import network

  assert getattr(network, type(scalable()).__name__) is type(scalable())
