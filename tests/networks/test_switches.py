"""Every combination of the network's settings, compared with the network without them.

All 96 combinations of `SWITCHES` are rows of the table. Each row has one of the 64 combinations of the
other settings (packing, dropout, microbatches, devices, chunked loss, experts), such that any three settings
occur together in some row. A row with experts is compared with the network with experts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scalable_trees import PLAIN, scalable, to_scanned, to_unscanned
from tiny_models import T5_1_1, assert_close, make_batch, make_model, make_state, params_of

from rosetta_t5.networks.config import ScalableT5Config
from rosetta_t5.networks.layers import attention
from rosetta_t5.networks.layers.attention import MultiHeadDotProductAttention
from rosetta_t5.networks.layers.dropout import Dropout
from rosetta_t5.networks.precision import TransformerEngineConfig, choose_fp8, with_fp8
from rosetta_t5.networks.transformer import T5Config, Transformer
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.training.step import accumulate_gradients

KEY = jax.random.PRNGKey(0)
SWITCHES = {
  "remat_policy": ("none", "minimal", "full"),
  "transpose_batch_sequence": (0, 1),
  "fuse_qkv_params": (0, 1),
  "attention_kernel": ("xla", "flash"),
  "scan_layers": (False, True),
  "fp8": (False, True),
}
OTHER_SETTINGS = {
  "loss_chunk_length": (None, 4),
  "packed": (False, True),
  "microbatches": (1, 2),
  "devices": (1, 8),
  "dropout_rate": (0.0, 0.5),
  "num_experts": (0, 4),
}
SETTINGS = SWITCHES | OTHER_SETTINGS
OTHER_COMBINATIONS = list(itertools.product(*OTHER_SETTINGS.values()))
COMBINATIONS = list(itertools.product(*SWITCHES.values()))
# Every combination of switches with one of the other combinations, each of which occurs once or twice.
SHUFFLED = np.concatenate([np.random.default_rng([0, seed]).permutation(64) for seed in range(2)])
ROWS = [(*row, *OTHER_COMBINATIONS[n]) for row, n in zip(COMBINATIONS, SHUFFLED, strict=False)]
TABLE = {" ".join(map(str, row)): dict(zip(SETTINGS, row, strict=True)) for row in ROWS}
# These rows contain most settings; the whole table is a slow test.
FEW = (
  "none 1 1 xla False False None True 2 8 0.5 0",
  "minimal 0 0 flash False False 4 True 1 1 0.5 4",
)
SEGMENTS = {
  "encoder_segment_ids": "encoder_input_tokens",
  "decoder_segment_ids": "decoder_target_tokens",
}


@functools.cache
def two_examples_a_row():
  """Returns a batch with two examples per row."""
  batch = dict(make_batch())
  for name, tokens in SEGMENTS.items():
    length = batch[tokens].shape[1]
    halves = 1 + (np.arange(length) >= length // 2)
    batch[name] = jnp.where(batch[tokens] > 0, halves, 0).astype(jnp.int32)
  return batch


def injected_mask(next_method, arguments, keywords, context):
  """Makes each dropout's mask depend on its name only, whatever the settings."""
  dropout = context.module
  if not isinstance(dropout, Dropout) or dropout.rate == 0:
    return next_method(*arguments, **keywords)
  x = arguments[0]
  keep = np.random.default_rng([*dropout.name.encode()]).random(x.shape[-1]) >= dropout.rate
  return x * jnp.asarray(np.broadcast_to(keep / (1 - dropout.rate), x.shape), x.dtype)


def injected_scale(_, rate, shape_BHS, dtype, rows=None):
  """Makes attention drop the same keys in every layer and example."""
  batch, heads, length = shape_BHS
  keep_HS = np.random.default_rng(0).random((heads, length)) >= rate
  return jnp.broadcast_to(jnp.asarray(keep_HS / (1 - rate), dtype), (batch, heads, length))


@pytest.fixture
def _masks_injected(monkeypatch):
  monkeypatch.setattr(attention, "attention_dropout_scale", injected_scale)
  with nn.intercept_methods(injected_mask):
    yield


def step_of(config, loss_chunk_length, packed, microbatches, devices, fp8=False):
  """Returns a jitted function (params, batch) → (loss, gradients), and its arguments."""
  module = Transformer(config)
  # The auxiliary loss is added once per microbatch.
  factor = 0.1 / microbatches if config.num_experts else 0.0
  model = make_model(
    module, z_loss=1e-3, loss_chunk_length=loss_chunk_length, aux_loss_factor=factor
  )
  te_config = TransformerEngineConfig(enabled=fp8, emulate=True)
  loss_fn = with_fp8(model, choose_fp8(te_config)).loss_fn
  state = make_state(module)

  def run(params, batch):
    grads, loss, _, _ = accumulate_gradients(
      lambda p, b, rng, *_: loss_fn(p, b, rng if config.dropout_rate else None),
      state.replace(params=params),
      batch,
      KEY,
      microbatches,
    )
    return loss, grads

  is_scalable = isinstance(config, ScalableT5Config)
  plain = dataclasses.replace(PLAIN if is_scalable else T5_1_1, num_experts=config.num_experts)
  params = params_of(dataclasses.replace(plain, expert_layer_period=1))
  if is_scalable:
    params = to_scanned(to_unscanned(params)) if config.scan_layers else to_unscanned(params)
  arguments = (params, two_examples_a_row() if packed else make_batch())
  if devices == 1:
    return jax.jit(run), arguments
  mesh = {"expert": 2, "tensor": 2} if config.num_experts else {"tensor": 2}
  partitioner = PjitPartitioner(mesh=mesh)
  axes = partitioner.get_mesh_axes(state).params
  inputs = (axes, partitioner.data_partition_spec)
  return partitioner.partition(run, inputs, (None, axes)), arguments


@functools.cache
def numbers(config, loss_chunk_length=None, packed=False, microbatches=1, devices=1, fp8=False):
  """Returns loss and gradients from the parameters of `T5_1_1`, or of scalable T5's test model."""
  step, arguments = step_of(config, loss_chunk_length, packed, microbatches, devices, fp8)
  return jax.device_get(step(*arguments))


def tolerance_of(row):
  """Returns the tolerance of a row for `assert_close`."""
  if row["fp8"]:
    return 0.15  # Gradients have 2 bits of mantissa (12.5%), and parts of arrays or fused projections a scale
  # Two layers with dropout: float32 without switches differs from float64 by 8e-5. In float64 all rows
  # agree to 1e-13. In the other rows float32 differs from float64 by 6e-6, and with the flash kernel by 1.3e-5.
  return 1e-4 if row["scan_layers"] and row["dropout_rate"] else 2e-5


def check(row, tolerance, **changes):
  """Compares a row with the network without switches, with the same parameters and masks."""
  row = dict(row)
  scanned = row.pop("scan_layers")
  config = scalable(scan_layers=False) if scanned else T5_1_1
  experts = {"num_experts": row.pop("num_experts"), "expert_layer_period": 1, "router_jitter": 0.0}
  plain = dataclasses.replace(config, dropout_rate=row.pop("dropout_rate"), **experts, **changes)
  others = {name: row.pop(name) for name in (*OTHER_SETTINGS, "fp8") if name in row}
  loss, grads = numbers(plain, packed=others["packed"], fp8=others["fp8"])
  if scanned:
    row["scan_layers"], grads = True, to_scanned(grads)
  assert_close(numbers(dataclasses.replace(plain, **row), **others), (loss, grads), tolerance)


def test_any_three_settings_occur_together_in_the_table():
  for names in itertools.combinations(SETTINGS, 3):
    met = {tuple(row[name] for name in names) for row in TABLE.values()}
    assert met == set(itertools.product(*(SETTINGS[name] for name in names)))


@pytest.mark.one_quick_variant
@pytest.mark.usefixtures("_masks_injected")
@pytest.mark.parametrize("row", FEW)
def test_settings_do_not_change_the_numbers(row):
  check(TABLE[row], tolerance_of(TABLE[row]))


@pytest.mark.slow
@pytest.mark.usefixtures("_masks_injected")
@pytest.mark.parametrize("row", TABLE)
def test_every_combination_of_settings_gives_the_same_numbers(row):
  check(TABLE[row], tolerance_of(TABLE[row]))


@pytest.mark.slow
@pytest.mark.usefixtures("_masks_injected")
@pytest.mark.parametrize("row", FEW)
def test_in_bfloat16_settings_change_numbers_only_by_rounding(row):
  # bfloat16 has 8 bits of mantissa; the order of sums differs, and fused kernels round less. Rounding can
  # also give a token another expert, which changes gradients by much more.
  check(TABLE[row] | {"num_experts": 0}, 0.12, dtype="bfloat16")


@pytest.mark.slow
def test_dropout_drops_the_same_values_when_the_length_is_first():
  losses = []
  for switch in (0, 1):
    config = dataclasses.replace(T5_1_1, dropout_rate=0.3, transpose_batch_sequence=switch)
    model = make_model(Transformer(config))
    losses.append(jax.jit(lambda p, m=model: m.loss_fn(p, make_batch(), KEY)[0])(params_of(T5_1_1)))
  np.testing.assert_allclose(*losses, rtol=1e-6)


@pytest.mark.slow
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


def test_fused_projections_use_one_matmul():
  def count_matmuls(config):
    model = make_model(Transformer(config))
    return str(jax.make_jaxpr(model.eval_fn)(params_of(T5_1_1), make_batch())).count("dot_general")

  fused = dataclasses.replace(T5_1_1, fuse_qkv_params=True)
  # The two self-attentions save two matmuls each, the cross-attention one.
  assert count_matmuls(T5_1_1) - count_matmuls(fused) == 5


@pytest.mark.slow
def test_a_split_batch_stays_split_when_the_length_is_first():
  config = dataclasses.replace(T5_1_1, transpose_batch_sequence=True, fuse_qkv_params=True)
  step, arguments = step_of(config, None, False, 1, 8)
  text = step.lower(*arguments).compile().as_text()
  moved = re.findall(r"= [a-z0-9]+\[(\S*?)\]\S* (?:all-gather|all-to-all|collective-permute)", text)
  # Activations have three or more dimensions; only kernels may be moved.
  assert not [shape for shape in moved if shape.count(",") >= 2 and "8," in shape], moved


def test_boolean_settings_accept_the_1_and_0_of_scripts():
  config = T5Config(vocab_size=8, transpose_batch_sequence=1, fuse_qkv_params=0)
  assert (config.transpose_batch_sequence, config.fuse_qkv_params) == (True, False)
