"""Combinations of the decoder-only network's settings, compared with the network without them."""

from __future__ import annotations

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import DECODER_ONLY as RELATIVE
from tiny_models import (
  GPT,
  assert_close,
  create_state,
  decoder_only_params,
  decoder_only_variables,
  make_decoder_only_model,
  stacked,
)

from rosetta_t5.networks.precision import TransformerEngineConfig, choose_fp8, with_fp8
from rosetta_t5.networks.transformer import DecoderWrapper, TransformerConfig
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.training import train_step
from rosetta_t5.training.step import accumulate_gradients

KEY = jax.random.PRNGKey(0)
LENGTH = 8
ROTARY = GPT.replace(positions="rotary", mlp_activations=("gelu", "linear"), norm="rms")
CONFIGS = {"learned": GPT, "rotary": ROTARY, "relative": RELATIVE}
SWITCHES = {
  "transpose_batch_sequence": (0, 1),
  "fuse_qkv_params": (0, 1),
  "attention_kernel": ("xla", "flash"),
  "loss_chunk_length": (None, 4),
  "scan_layers": (False, True),
}
REMAT = ("none", "minimal", "full")
MESHES = {"1": None, "tensor 2": {"data": 4, "tensor": 2}, "fsdp 2": {"data": 4, "fsdp": 2}}
OTHER_COMBINATIONS = list(itertools.product((False, True), (1, 2), MESHES))
# Every combination of switches, each with one of the twelve combinations of other settings.
TABLE = {}
for index, values in enumerate(itertools.product(*SWITCHES.values())):
  packed, microbatches, mesh = OTHER_COMBINATIONS[index * 5 % 12]
  row = dict(zip(SWITCHES, values, strict=True))
  row |= {"remat_policy": REMAT[index // 3 % 3], "packed": packed}
  row |= {"microbatches": microbatches, "mesh": mesh}
  TABLE[", ".join(map(str, row.values()))] = row
# These rows contain each setting; the whole table is a slow test.
FEW = (
  "1, 1, flash, 4, True, minimal, True, 2, fsdp 2",
  "1, 0, xla, None, True, full, False, 1, tensor 2",
)


@functools.cache
def make_batch(packed):
  """Returns 8 rows of one or two texts, followed by padding."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(2, GPT.vocab_size, (8, LENGTH)).astype(np.int32)
  real = np.arange(LENGTH) < rng.integers(LENGTH - 3, LENGTH, (8, 1))
  half = np.arange(LENGTH) >= LENGTH // 2 if packed else np.zeros(LENGTH, bool)
  starts = np.isin(np.arange(LENGTH), (0, LENGTH // 2) if packed else (0,))
  batch = {
    "decoder_target_tokens": np.where(real, tokens, 0),
    "decoder_input_tokens": np.where(real & ~starts, np.pad(tokens, ((0, 0), (1, 0)))[:, :-1], 0),
    "decoder_loss_weights": real,
  }
  if packed:
    batch["decoder_segment_ids"] = np.where(real, 1 + half, 0)
    batch["decoder_positions"] = np.where(real, np.arange(LENGTH) - half * LENGTH // 2, 0)
  return {name: jnp.asarray(array, jnp.int32) for name, array in batch.items()}


def te_config(recipe):
  return TransformerEngineConfig(enabled=recipe is not None, recipe=recipe or "current", emulate=1)


def step_of(config, loss_chunk_length, microbatches, mesh, fp8=None):
  """Returns a compiled function (params, batch) → (loss, gradients)."""
  model = make_decoder_only_model(config, z_loss=1e-3, loss_chunk_length=loss_chunk_length)
  loss_fn = with_fp8(model, choose_fp8(te_config(fp8))).loss_fn
  state = create_state(decoder_only_variables(config))

  def run(params, batch):
    grads, loss, _, _ = accumulate_gradients(
      lambda *args: loss_fn(*args[:2], None), state.replace(params=params), batch, KEY, microbatches
    )
    return loss, grads

  if mesh is None:
    return jax.jit(run)
  partitioner = PjitPartitioner(mesh=mesh)
  axes = partitioner.get_mesh_axes(state).params
  return partitioner.partition(run, (axes, partitioner.data_partition_spec), (None, axes))


@functools.cache
def numbers(
  config,
  loss_chunk_length=None,
  packed=False,
  microbatches=1,
  mesh="1",
  scan_layers=False,
  fp8=None,
):
  """Returns loss and gradients from the parameters of `config`, whose layers are not scanned."""
  params = decoder_only_params(config.replace(matmul=None))
  scanned = config.replace(scan_layers=scan_layers)
  step = step_of(scanned, loss_chunk_length, microbatches, MESHES[mesh], fp8)
  return jax.device_get(step(stacked(params) if scan_layers else params, make_batch(packed)))


def plain_numbers(row, plain, fp8=None):
  loss, grads = numbers(plain, packed=row["packed"], fp8=fp8)
  return loss, stacked(grads) if row["scan_layers"] else grads


def switched_numbers(row, plain, fp8=None):
  settings = dict(row)
  names = ("packed", "microbatches", "mesh", "loss_chunk_length", "scan_layers")
  others = {name: settings.pop(name) for name in names}
  return numbers(plain.replace(**settings), **others, fp8=fp8)


def check(row, plain, tolerance, fp8=None):
  assert_close(switched_numbers(row, plain, fp8), plain_numbers(row, plain, fp8), tolerance)


def distance(got, want):
  """Returns the norm of the gradients' difference relative to that of `want`."""
  squares = jax.tree.map(lambda x, y: (np.sum((x - y) ** 2), np.sum(y**2)), got, want)
  error, size = np.sum(jax.tree.leaves(squares, is_leaf=lambda x: isinstance(x, tuple)), axis=0)
  return np.sqrt(error / size)


@pytest.mark.slow
@pytest.mark.parametrize("row", FEW)
def test_settings_do_not_change_the_numbers(row):
  check(TABLE[row], GPT, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE)
def test_no_combination_of_settings_changes_the_numbers(row):
  check(TABLE[row], GPT, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["rotary", "relative"])
@pytest.mark.parametrize("row", list(TABLE)[::3])
def test_settings_do_not_change_the_numbers_with_other_positions(row, positions):
  # Scanned layers cannot share a bias.
  row = TABLE[row] | ({"scan_layers": False} if positions == "relative" else {})
  check(row, CONFIGS[positions], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("row", list(TABLE)[::4])
def test_in_fp8_settings_change_numbers_only_by_rounding(row):
  check(TABLE[row], GPT, 0.1, fp8="current")


@pytest.mark.slow
@pytest.mark.parametrize("row", FEW)
def test_in_bfloat16_settings_change_numbers_only_by_rounding(row):
  """All gradients together differ from float32 by less than three times the plain network's difference.

  The gradient of one array may differ by more. The gradients of queries are small differences of large
  numbers: in the plain network they already differ from float32 by 0.12 of the largest.
  """
  row, bfloat16 = TABLE[row], GPT.replace(dtype="bfloat16")
  exact, plain = plain_numbers(row, GPT), plain_numbers(row, bfloat16)
  found = switched_numbers(row, bfloat16)
  np.testing.assert_allclose(found[0], exact[0], rtol=2e-3)
  assert 0 < distance(found[1], exact[1]) < 3 * distance(plain[1], exact[1]) < 0.02
  assert_close(found, plain, 0.2)


@functools.cache
def losses(recipe, scan_layers=False, steps=6):
  """Returns the losses of a short bfloat16 training run, with projections in fp8 if there is a recipe."""
  config = GPT.replace(dtype="bfloat16", scan_layers=scan_layers)
  model = with_fp8(make_decoder_only_model(config, z_loss=1e-4), choose_fp8(te_config(recipe)))
  batch = make_batch(True)
  variables = model.get_initial_variables(KEY, {n: x.shape for n, x in batch.items()})
  params = decoder_only_params(GPT)
  state = create_state({**variables, "params": stacked(params) if scan_layers else params})
  step = jax.jit(
    functools.partial(
      train_step,
      loss_fn=model.loss_fn,
      learning_rate_fn=lambda _: jnp.float32(0.03),
      num_microbatches=None,
    )
  )
  found = []
  for _ in range(steps):
    state, metrics = step(state, batch, KEY)
    found.append(float(metrics["loss"].compute()))
  return found


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_training_in_fp8_follows_training_in_bfloat16(recipe, scan_layers):
  plain, found = losses(None), losses(recipe, scan_layers)
  assert plain[-1] < 0.8 * plain[0]
  np.testing.assert_allclose(found, plain, rtol=0.05)
  assert found != plain


@pytest.mark.slow
def test_dropout_drops_the_same_values_when_the_length_is_first():
  config = GPT.replace(dropout_rate=0.3)
  found = []
  for changes in ({}, {"transpose_batch_sequence": 1}):
    model = make_decoder_only_model(config.replace(**changes))
    loss = jax.jit(lambda p, m=model: m.loss_fn(p, make_batch(False), KEY)[0])
    found.append(loss(decoder_only_params(GPT)))
  np.testing.assert_allclose(*found, rtol=1e-6)


@pytest.mark.slow
def test_cudnn_without_a_gpu_is_refused_with_the_setting_to_change():
  text = (
    "TransformerConfig.attention_kernel = 'cudnn' needs an NVIDIA GPU, but jax runs on cpu: set"
  )
  model = make_decoder_only_model(GPT.replace(attention_kernel="cudnn"))
  with pytest.raises(ValueError, match=re.escape(text)):
    model.eval_fn(decoder_only_params(GPT), make_batch(False))


def test_settings_do_not_change_the_parameters():
  def shapes(**changes):
    module = DecoderWrapper(GPT.replace(**changes))
    tokens = jnp.ones((1, 4), jnp.int32)
    init = functools.partial(module.init, enable_dropout=False)
    return jax.tree.map(jnp.shape, jax.eval_shape(init, KEY, tokens, tokens)["params"])

  plain = shapes()
  assert shapes(transpose_batch_sequence=1, fuse_qkv_params=1) == plain
  assert shapes(attention_kernel="flash", remat_policy="full") == plain
  assert shapes(scan_layers=True) == jax.tree.map(jnp.shape, stacked(decoder_only_params(GPT)))


def test_boolean_settings_accept_only_booleans_and_the_1_and_0_of_scripts():
  config = TransformerConfig(vocab_size=8, transpose_batch_sequence=1, fuse_qkv_params=0)
  assert (config.transpose_batch_sequence, config.fuse_qkv_params) == (True, False)
  with pytest.raises(ValueError, match=r"TransformerConfig.fuse_qkv_params = 'no' must be True"):
    TransformerConfig(vocab_size=8, fuse_qkv_params="no")
