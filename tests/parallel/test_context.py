"""Rows whose positions are split over devices have the losses and gradients of one device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import (
  DECODER_ONLY,
  GPT,
  T5_1_1,
  VOCAB,
  assert_close,
  decoder_only_params,
  make_decoder_only_model,
  make_model,
  params_of,
)

from rosetta_t5.networks.decoder_config import TransformerConfig
from rosetta_t5.networks.t5 import Transformer
from rosetta_t5.parallel import PjitPartitioner

LENGTH = 16


def packed_batch(sides, length=LENGTH, batch=2):
  """Returns rows of two examples and padding, for the sides `encoder` and `decoder`."""
  rng = np.random.default_rng(3)
  features = {}
  for side in sides:
    ends = np.sort(rng.integers(1, length, (batch, 2)), axis=1)
    position = np.arange(length)[None]
    ids = 1 + (position >= ends[:, :1]) - 2 * (position >= ends[:, 1:])
    start = np.where(ids == 2, ends[:, :1], 0)
    tokens = np.where(ids > 0, rng.integers(2, VOCAB, ids.shape), 0)
    features[f"{side}_segment_ids"] = np.maximum(ids, 0)
    features[f"{side}_positions"] = np.where(ids > 0, position - start, 0)
    name = "encoder_input_tokens" if side == "encoder" else "decoder_target_tokens"
    features[name] = tokens
  shifted = np.pad(features["decoder_target_tokens"], ((0, 0), (1, 0)))[:, :-1]
  features["decoder_input_tokens"] = np.where(features["decoder_positions"] == 0, 0, shifted)
  features["decoder_loss_weights"] = features["decoder_target_tokens"] > 0
  return {name: jnp.asarray(array, jnp.int32) for name, array in features.items()}


def loss_and_gradients(model, params, batch, partitioner=None, dropout=False):
  """Returns the loss and the gradients, on one device or on a partitioner's mesh."""
  rng = jax.random.PRNGKey(4) if dropout else None

  def compute(params, batch):
    return jax.value_and_grad(lambda params: model.loss_fn(params, batch, rng)[0])(params)

  if partitioner is None:
    return jax.jit(compute)(params, batch)
  run = partitioner.partition(compute, (None, partitioner.data_partition_spec), None)
  return run(params, batch)


GPT_16 = GPT.replace(max_length=LENGTH)
RELATIVE = DECODER_ONLY
ROTARY = GPT_16.replace(positions="rotary")
CONTEXT = {"data": 2, "context": 4}
FLASH = {"attention_kernel": "flash"}

# Name → network's config, its changes, the model's arguments, the mesh, and whether dropout is on.
CASES = {
  "GPT": (GPT_16, {}, {}, CONTEXT, False),
  "GPT, flash": (GPT_16, FLASH, {}, CONTEXT, False),
  "GPT, flash, odd parts": (ROTARY, FLASH, {}, {"data": 1, "fsdp": 1, "context": 8}, False),
  "GPT, scan, full": (
    ROTARY,
    {"scan_layers": True, "remat_policy": "full", **FLASH},
    {},
    CONTEXT,
    False,
  ),
  "GPT, minimal": (GPT_16, {"remat_policy": "minimal", **FLASH}, {}, CONTEXT, False),
  "GPT, dropout": (GPT_16, {"dropout_rate": 0.3, **FLASH}, {}, CONTEXT, True),
  "GPT, dropout, xla": (GPT_16, {"dropout_rate": 0.3}, {}, CONTEXT, True),
  "GPT, chunks": (GPT_16, {}, {"loss_chunk_length": 6, "z_loss": 1e-2}, CONTEXT, False),
  "GPT, one chunk a position": (GPT_16, {}, {"loss_chunk_length": 1}, CONTEXT, False),
  "GPT, window": (GPT_16, {"local_attention_window": 5}, {}, CONTEXT, False),
  "GPT, fsdp, tensor": (GPT_16, FLASH, {}, {"fsdp": 2, "context": 2, "tensor": 2}, False),
  "GPT, fused": (GPT_16, {"fuse_qkv_params": True}, {"label_smoothing": 0.1}, CONTEXT, False),
  "decoder, relative bias": (RELATIVE, {}, {}, CONTEXT, False),
  "decoder, relative bias, flash": (RELATIVE, FLASH, {}, CONTEXT, False),
  "T5": (T5_1_1, {}, {}, CONTEXT, False),
  "T5, flash": (T5_1_1, FLASH, {}, CONTEXT, False),
  "T5, transposed": (T5_1_1, {"transpose_batch_sequence": True}, {}, CONTEXT, False),
  "T5, tensor, normalized": (
    T5_1_1,
    {"remat_policy": "full", **FLASH},
    {"loss_normalizing_factor": "AVERAGE_PER_SEQUENCE"},
    {"data": 2, "context": 2, "tensor": 2},
    False,
  ),
}
QUICK = ("GPT, flash", "T5, tensor, normalized")


def make_case(name):
  """Returns a case's model, its parameters, a batch, the mesh, and whether dropout is on."""
  config, changes, arguments, mesh, dropout = CASES[name]
  config = dataclasses.replace(config, **changes)
  if isinstance(config, TransformerConfig):
    params = decoder_only_params(dataclasses.replace(config, attention_kernel="xla"))
    batch, model = packed_batch(["decoder"]), make_decoder_only_model(config, **arguments)
  else:
    params = params_of(dataclasses.replace(config, attention_kernel="xla"))
    batch = packed_batch(["encoder", "decoder"])
    model = make_model(Transformer(config), **arguments)
  return model, params, batch, mesh, dropout


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in CASES]
)
def test_split_positions_have_one_device_s_loss_and_gradients(name):
  model, params, batch, mesh, dropout = make_case(name)
  want = loss_and_gradients(model, params, batch, None, dropout)
  got = loss_and_gradients(model, params, batch, PjitPartitioner(mesh=mesh), dropout)
  assert_close(got, want, 1e-5)
