"""The adapters without a run: names of targets, what is refused, and what a prediction computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import unfreeze
from flax.linen import partitioning
from flax.traverse_util import flatten_dict, unflatten_dict

from rosetta_t5 import adapters, models
from rosetta_t5.adapters.kernel_adapters import matches
from rosetta_t5.networks.config import ScalableT5Config, T5Config
from rosetta_t5.networks.transformer import Transformer

SIZES = {
  "vocab_size": 64,
  "emb_dim": 16,
  "num_heads": 2,
  "head_dim": 8,
  "num_encoder_layers": 1,
  "num_decoder_layers": 1,
  "mlp_dim": 32,
  "mlp_activations": ("gelu", "linear"),
  "dropout_rate": 0.0,
}
TOKENS = jnp.asarray(np.random.RandomState(0).randint(2, 64, (4, 8)), jnp.int32)
NAMES = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
BATCH = dict.fromkeys(NAMES, TOKENS)


class Vocabulary:
  eos_id = 1


def make_model(adapter=None, config=T5Config, **settings):
  module = Transformer(config(**{**SIZES, **settings}))
  return models.EncoderDecoderModel(module, Vocabulary, Vocabulary, None, adapter=adapter)


def drawn(model):
  """Returns parameters of which none is zero."""
  shapes = {name: x.shape for name, x in BATCH.items()}
  params = model.get_initial_variables(jax.random.PRNGKey(0), shapes)["params"]
  random = np.random.RandomState(1)
  return jax.tree.map(
    lambda x: x if x.dtype == jnp.int8 else x + random.uniform(0, 0.3, x.shape).astype(x.dtype),
    params,
  )


@pytest.mark.parametrize(
  ("target", "module", "expected"),
  [
    (("q",), "encoder/layers_0/attention/query", True),
    (("query",), "encoder/layers_0/attention/query", True),
    (("uery",), "encoder/layers_0/attention/query", False),
    (("SelfAttention.q",), "decoder/layers_0/self_attention/query", True),
    (("SelfAttention.q",), "decoder/layers_0/encoder_decoder_attention/query", False),
    (("EncDecAttention.q",), "decoder/layers_0/encoder_decoder_attention/query", True),
    (("gate_proj",), "decoder/layers_1/mlp/wi_0", True),
    ("decoder/.*/wo", "decoder/layers_1/mlp/wo", True),
    ("wo", "decoder/layers_1/mlp/wo", False),
    ("all-linear", "decoder/layers_1/mlp/wo", True),
    ("all-linear", "decoder/logits_dense", False),
  ],
)
def test_targets_are_last_parts_of_names_or_regular_expressions(target, module, expected):
  assert matches(target, module) == expected


ADAPTERS = {
  "lora": adapters.LoRA(rank=3, targets="all-linear"),
  "rslora with patterns": adapters.LoRA(
    rank=4, rslora=True, rank_pattern={"value": 2}, alpha_pattern={"decoder/.*": 3}
  ),
  "dora": adapters.LoRA(rank=3, dora=True, targets="all-linear"),
  "ia3": adapters.IA3(targets=("k", "v", "wi_1", "wo")),
  "int8": adapters.LoRA(rank=3, dora=True, frozen_dtype="int8"),
  "bfloat16": adapters.IA3(frozen_dtype="bfloat16"),
  "norms": adapters.Norms(frozen_dtype="int8"),
}
SCANNED = {"scan_layers": True, "num_encoder_layers": 2, "num_decoder_layers": 2}
LAYERS = {
  "layers": {},
  "scanned": SCANNED,
  "fused": {"fuse_qkv_params": True, "transpose_batch_sequence": True},
  "own output layer": {"logits_via_embedding": False, **SCANNED},
}


def oracle(adapter, params):
  """Returns the network's parameters by the papers' formulas; the gradient of DoRA's norm is left out."""
  flat = flatten_dict(unfreeze(params), sep="/")
  kept = {n: x for n, x in flat.items() if n.rpartition("/")[2] not in ADDED}
  for name in [name for name in kept if name.endswith("/kernel")]:
    module = name.removesuffix("/kernel")
    added = {end: flat[f"{module}/{end}"] for end in ADDED if f"{module}/{end}" in flat}
    # Scanned layers are the second dimension of each.
    layers = kept[name].ndim == 3
    split = (lambda x: jnp.unstack(x, axis=1)) if layers else (lambda x: [x])
    parts = {end: split(x) for end, x in added.items()}
    kernels = [
      one_kernel(adapter, module, w.astype(jnp.float32), {end: x[n] for end, x in parts.items()})
      for n, w in enumerate(split(kept[name]))
    ]
    kept[name] = jnp.stack(kernels, axis=1) if layers else kernels[0]
  return unflatten_dict(kept, sep="/")


def one_kernel(adapter, module, w, added):
  if "kernel_scale" in added:
    w = w * added["kernel_scale"][None, :]
  if "lora_a" in added:
    rank = added["lora_a"].shape[1]
    alpha = 2 * adapter.rank
    if adapter.alpha_pattern and module.startswith("decoder/"):
      alpha = 3
    w = w + alpha / (rank**0.5 if adapter.rslora else rank) * added["lora_a"] @ added["lora_b"]
  if "dora_magnitude" in added:
    norm = jax.lax.stop_gradient(jnp.linalg.norm(w, axis=0))
    w = w * (added["dora_magnitude"] / norm)[None, :]
  if "ia3_scaling" in added:
    vector = added["ia3_scaling"]
    w = w * (vector[:, None] if module.endswith("/wo") else vector[None, :])
  return w


ADDED = ("kernel_scale", "lora_a", "lora_b", "dora_magnitude", "ia3_scaling")
PAIRS = [
  *((name, "layers") for name in ADAPTERS),
  ("dora", "scanned"),
  ("ia3", "scanned"),
  ("lora", "fused"),
  ("int8", "own output layer"),
]


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["layers", "own output layer"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_merged_parameters_are_those_of_the_papers_formulas(name, layers):
  adapter = ADAPTERS[name]
  params = drawn(make_model(adapter, **LAYERS[layers]))
  merged = adapter.merged(params)
  for expected, found in zip(*map(jax.tree.leaves, (oracle(adapter, params), merged)), strict=True):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.one_quick_variant
@pytest.mark.parametrize(("name", "layers"), PAIRS)
def test_loss_and_gradients_are_those_of_the_merged_parameters(name, layers):
  adapter, plain = ADAPTERS[name], make_model(**LAYERS[layers])
  model = make_model(adapter, **LAYERS[layers])
  params = drawn(model)
  merged = adapter.merged(params)

  def loss_of(params):
    return model.loss_fn(params, BATCH, None)[0]

  expected = jax.jit(plain.loss_fn)(merged, BATCH, None)[0]
  (loss, grads), (_, expected_grads) = (
    jax.jit(jax.value_and_grad(fn, allow_int=True))(params)
    for fn in (loss_of, lambda x: plain.loss_fn(oracle(adapter, x), BATCH, None)[0])
  )
  np.testing.assert_allclose(loss, expected, rtol=2e-5)
  grads, expected_grads = map(jax.tree_util.tree_leaves_with_path, (grads, expected_grads))
  compared = 0
  for (path, grad), (_, expected_grad) in zip(grads, expected_grads, strict=True):
    flat_name = jax.tree_util.keystr(path, simple=True, separator="/")
    if adapter.is_trained(flat_name):
      compared += 1
      scale = max(1e-3, float(jnp.max(jnp.abs(expected_grad))))
      np.testing.assert_allclose(grad / scale, expected_grad / scale, atol=3e-3, err_msg=flat_name)
  assert compared


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "layers"), [("lora", "layers"), pytest.param("dora", "scanned", marks=pytest.mark.slow)]
)
def test_decodes_are_those_of_the_merged_parameters(name, layers):
  adapter, plain = ADAPTERS[name], make_model(**LAYERS[layers])
  model = make_model(adapter, **LAYERS[layers])
  params = drawn(model)
  decoded = jax.jit(model.predict_batch)(params, BATCH)
  merged = adapter.merged(params)
  np.testing.assert_array_equal(decoded, jax.jit(plain.predict_batch)(merged, BATCH))


def test_the_matrices_are_split_over_devices_as_the_kernel_that_they_change():
  model = make_model(adapters.LoRA(targets="all-linear"))
  shapes = {name: x.shape for name, x in BATCH.items()}
  variables = jax.eval_shape(lambda: model.get_initial_variables(jax.random.PRNGKey(0), shapes))
  layer = partitioning.get_axis_names(variables["params_axes"])["encoder"]["layers_0"]
  axes = [layer["attention"]["query"], layer["mlp"]["wo"]]
  # Of a projection whose outputs are split, A is whole; of one whose inputs are split, B is.
  assert [tuple(each["lora_a"]) for each in axes] == [("embed", None), ("mlp", None)]
  assert [tuple(each["lora_b"]) for each in axes] == [(None, "joined_kv"), (None, "embed")]


@pytest.mark.slow
def test_dropout_applies_to_the_low_rank_path_alone():
  model = make_model(adapters.LoRA(rank=3, dropout=0.5))
  params = drawn(model)
  keys = jax.random.split(jax.random.PRNGKey(0), 2)
  first, second = (float(model.loss_fn(params, BATCH, key)[0]) for key in keys)
  assert first != second
  zero_b = {"lora_b": 0.0}
  without = jax.tree_util.tree_map_with_path(
    lambda path, x: x * zero_b.get(path[-1].key, 1.0), params
  )
  assert len({float(model.loss_fn(without, BATCH, key)[0]) for key in keys}) == 1


@pytest.mark.parametrize(
  ("adapter", "config", "message"),
  [
    (adapters.LoRA(targets=("querry",)), T5Config, "'querry'.*, which matches no projection"),
    (adapters.LoRA(targets="q"), T5Config, "'q', which matches no projection.*regular expression"),
    (adapters.LoRA(targets=()), T5Config, "LoRA trains no parameter"),
    (adapters.LoRA(rank_pattern={"querry": 2}), T5Config, "'querry', which matches no projection"),
    (adapters.BitFit(), T5Config, "BitFit trains no parameter of this network"),
    (adapters.LoRA(), ScalableT5Config, "needs kernels that are matrices"),
  ],
)
def test_what_an_adapter_cannot_train_is_refused_by_name(adapter, config, message):
  sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1}
  with pytest.raises(ValueError, match=message):
    drawn(make_model(adapter, config, **sizes))


def test_a_wrong_dtype_of_frozen_parameters_is_refused():
  with pytest.raises(ValueError, match="frozen_dtype must be one of 'bfloat16', 'int8'"):
    adapters.LoRA(frozen_dtype="int4")


def test_settings_describe_an_adapter():
  for adapter in ADAPTERS.values():
    assert adapters.from_settings(adapter.settings()) == adapter
