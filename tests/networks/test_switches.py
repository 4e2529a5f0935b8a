"""Every switch of the network, in company of the others, against the plain model's numbers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scalable_trees import PLAIN, scalable, to_scanned, to_unscanned
from tiny_models import T5_1_1, assert_close, make_batch, make_model, make_state, params_of

from rosetta_t5.networks import scalable_t5
from rosetta_t5.networks.attention import MultiHeadDotProductAttention
from rosetta_t5.networks.precision import TransformerEngineConfig, choose_fp8, with_fp8
from rosetta_t5.networks.t5 import T5Config, Transformer
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.training.step import accumulate_gradients

KEY = jax.random.PRNGKey(0)
SWITCHES = {
  "transpose_batch_sequence": (0, 1),
  "fuse_qkv_params": (0, 1),
  "remat_policy": ("none", "minimal", "full"),
  "attention_kernel": ("xla", "flash"),
  "loss_chunk_length": (None, 4),
}
COMPANY = {"packed": (False, True), "microbatches": (1, 2), "devices": (1, 8)}
COMPANIES = [dict(zip(COMPANY, v, strict=True)) for v in itertools.product(*COMPANY.values())]
# Every combination of switches, each in one of the eight companies.
TABLE = {}
for index, values in enumerate(itertools.product(*SWITCHES.values())):
  row = dict(zip(SWITCHES, values, strict=True)) | COMPANIES[(index % 4 + index // 4) % 8]
  TABLE[" ".join(map(str, row.values()))] = row
# Each setting is met in these; the whole table is a slow test.
FEW = (
  "1 1 minimal flash 4 True 1 8",
  "1 1 none xla 4 False 2 1",
  "0 1 full xla None True 1 8",
)
SEGMENTS = {
  "encoder_segment_ids": "encoder_input_tokens",
  "decoder_segment_ids": "decoder_target_tokens",
}


@functools.cache
def two_examples_a_row():
  """Returns a batch whose rows hold two examples each."""
  batch = dict(make_batch())
  for name, tokens in SEGMENTS.items():
    length = batch[tokens].shape[1]
    halves = 1 + (np.arange(length) >= length // 2)
    batch[name] = jnp.where(batch[tokens] > 0, halves, 0).astype(jnp.int32)
  return batch


def step_of(config, loss_chunk_length, packed, microbatches, devices, fp8=False):
  """Returns a jitted function (params, batch) → (loss, gradients), and its arguments."""
  scalable = isinstance(config, scalable_t5.T5Config)
  module = (scalable_t5.Transformer if scalable else Transformer)(config)
  model = make_model(module, z_loss=1e-3, loss_chunk_length=loss_chunk_length)
  te_config = TransformerEngineConfig(enabled=fp8, emulate=True)
  loss_fn = with_fp8(model, choose_fp8(te_config)).loss_fn
  state = make_state(module)

  def run(params, batch):
    grads, loss, _, _ = accumulate_gradients(
      lambda *args: loss_fn(*args[:2], None), state.replace(params=params), batch, KEY, microbatches
    )
    return loss, grads

  params = params_of(PLAIN if scalable else T5_1_1)
  if scalable:
    params = to_scanned(to_unscanned(params)) if config.scan_layers else to_unscanned(params)
  arguments = (params, two_examples_a_row() if packed else make_batch())
  if devices == 1:
    return jax.jit(run), arguments
  partitioner = PjitPartitioner(num_partitions=2)
  axes = partitioner.get_mesh_axes(state).params
  inputs = (axes, partitioner.data_partition_spec)
  return partitioner.partition(run, inputs, (None, axes)), arguments


@functools.cache
def numbers(config, loss_chunk_length=None, packed=False, microbatches=1, devices=1, fp8=False):
  """Returns loss and gradients from the parameters of `T5_1_1`, or of scalable T5's test model."""
  step, arguments = step_of(config, loss_chunk_length, packed, microbatches, devices, fp8)
  return jax.device_get(step(*arguments))


def with_switches(row, config, **more):
  settings = dict(row)
  company = {name: settings.pop(name) for name in (*COMPANY, "loss_chunk_length")}
  return numbers(dataclasses.replace(config, **settings), **company, **more)


def check(row, plain, tolerance):
  assert_close(with_switches(row, plain), numbers(plain, packed=row["packed"]), tolerance)


@pytest.mark.parametrize("row", FEW)
def test_switches_change_no_number(row):
  check(TABLE[row], T5_1_1, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE)
def test_all_switches_in_every_company_change_no_number(row):
  check(TABLE[row], T5_1_1, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("row", list(TABLE)[::3])
def test_all_switches_of_scanned_layers_give_the_numbers_of_unscanned_ones(row):
  loss, grads = numbers(scalable(scan_layers=False), packed=TABLE[row]["packed"])
  assert_close(with_switches(TABLE[row], scalable()), (loss, to_scanned(grads)), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("row", list(TABLE)[::5])
def test_in_fp8_switches_change_numbers_by_its_rounding(row):
  plain = numbers(T5_1_1, packed=TABLE[row]["packed"], fp8=True)
  assert_close(with_switches(TABLE[row], T5_1_1, fp8=True), plain, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("row", FEW)
def test_in_bfloat16_switches_change_numbers_by_its_rounding(row):
  # The type has 8 bits of mantissa; sums are in another order, and fused kernels round less.
  check(TABLE[row], dataclasses.replace(T5_1_1, dtype="bfloat16"), 0.12)


def test_dropout_drops_the_same_values_with_the_length_first():
  losses = []
  for switch in (0, 1):
    config = dataclasses.replace(T5_1_1, dropout_rate=0.3, transpose_batch_sequence=switch)
    model = make_model(Transformer(config))
    losses.append(jax.jit(lambda p, m=model: m.loss_fn(p, make_batch(), KEY)[0])(params_of(T5_1_1)))
  np.testing.assert_allclose(*losses, rtol=1e-6)


@pytest.mark.parametrize("scaled", [False, True])
def test_attention_with_fused_projections_has_the_same_initial_values_and_results(scaled):
  attention = MultiHeadDotProductAttention(num_heads=2, head_dim=4, scale_attn_logits=scaled)
  fused = attention.clone(fuse_qkv_params=True)
  x, y = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 3, 8)), jnp.float32)
  variables = attention.init(KEY, x, y)
  jax.tree.map(np.testing.assert_array_equal, variables, fused.init(KEY, x, x))
  for keys_from in (x, y):
    got, want = (m.apply(variables, x, keys_from) for m in (fused, attention))
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_fused_projections_are_one_product_each():
  def products(config):
    model = make_model(Transformer(config))
    return str(jax.make_jaxpr(model.eval_fn)(params_of(T5_1_1), make_batch())).count("dot_general")

  fused = dataclasses.replace(T5_1_1, fuse_qkv_params=True)
  # Two self-attentions save two products each, the cross-attention one.
  assert products(T5_1_1) - products(fused) == 5


def test_a_split_batch_stays_split_with_the_length_first():
  config = dataclasses.replace(T5_1_1, transpose_batch_sequence=True, fuse_qkv_params=True)
  step, arguments = step_of(config, None, False, 1, 8)
  text = step.lower(*arguments).compile().as_text()
  moved = re.findall(r"= [a-z0-9]+\[(\S*?)\]\S* (?:all-gather|all-to-all|collective-permute)", text)
  # Activations have three dimensions or more; what is moved are kernels, at most.
  assert not [shape for shape in moved if shape.count(",") >= 2 and "8," in shape], moved


def test_config_takes_the_ones_and_zeros_of_scripts():
  config = T5Config(vocab_size=8, transpose_batch_sequence=1, fuse_qkv_params=0)
  assert (config.transpose_batch_sequence, config.fuse_qkv_params) == (True, False)
