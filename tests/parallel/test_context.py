"""Rows whose positions are split over devices have the losses and gradients of one device."""

from __future__ import annotations

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_collectives import collectives
from jax.flatten_util import ravel_pytree
from planned_work import planned_work
from scalable_trees import scalable
from tiny_models import (
  DECODER_ONLY,
  GPT,
  T5_1_1,
  VOCAB,
  assert_close,
  decoder_only_params,
  make_decoder_only_model,
  make_model,
  variables,
)

from rosetta_t5.kernels.context_attention import parts_of_devices
from rosetta_t5.networks.config import TransformerConfig
from rosetta_t5.networks.precision import TransformerEngineConfig, choose_fp8, with_fp8
from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.parallel.data_layout import check_row_lengths
from rosetta_t5.plan.collectives import step_collectives
from rosetta_t5.training.step import accumulate_gradients

LENGTH = 16


def packed_batch(sides, length=LENGTH, batch=2):
  """Returns rows of two examples and padding, for the sides `encoder` and `decoder`."""
  rng = np.random.default_rng(3)
  features, position = {}, np.arange(length)[None]
  for side in sides:
    ends = np.sort(rng.integers(1, length, (batch, 2)), axis=1)
    ids = 1 + (position >= ends[:, :1]) - 2 * (position >= ends[:, 1:])
    start = np.where(ids == 2, ends[:, :1], 0)
    tokens = np.where(ids > 0, rng.integers(2, VOCAB, ids.shape), 0)
    features[f"{side}_segment_ids"] = np.maximum(ids, 0)
    features[f"{side}_positions"] = np.where(ids > 0, position - start, 0)
    name = "encoder_input_tokens" if side == "encoder" else "decoder_target_tokens"
    features[name] = tokens
  shifted = np.pad(features["decoder_target_tokens"], ((0, 0), (1, 0)))[:, :-1]
  features["decoder_input_tokens"] = np.where(features["decoder_positions"] == 0, 0, shifted)
  features["decoder_causal_attention"] = np.broadcast_to(position < 4, shifted.shape)
  features["decoder_loss_weights"] = features["decoder_target_tokens"] > 0
  return {name: jnp.asarray(array, jnp.int32) for name, array in features.items()}


def loss_and_gradients(model, params, batch, partitioner=None, microbatches=1):
  """Returns the loss and the gradients, on one device or on a partitioner's mesh."""

  def compute(params, batch):
    state = types.SimpleNamespace(params=params, flax_mutables={})
    rng = jax.random.PRNGKey(4)
    gradients, loss, *_ = accumulate_gradients(model.loss_fn, state, batch, rng, microbatches)
    return loss, gradients

  if partitioner is None:
    return jax.jit(compute)(params, batch)
  run = partitioner.partition(compute, (None, partitioner.data_partition_spec), None)
  return run(params, batch)


GPT_16 = GPT.replace(max_length=LENGTH)
ROTARY = GPT_16.replace(positions="rotary")
SCALABLE = scalable(T5_1_1)
CONTEXT = {"data": 2, "context": 4}
FLASH = {"attention_kernel": "flash"}

PREFIX = {"inputs_bidirectional_attention": True}

# Name → network's config, its changes, the model's arguments, and the mesh.
CASES = {
  "GPT": (GPT_16, {}, {}, CONTEXT),
  "GPT, flash": (GPT_16, FLASH, {}, CONTEXT),
  "rotary, flash, parts of one position": (ROTARY, FLASH, {}, {"data": 1, "context": 8}),
  "rotary, flash": (ROTARY, FLASH, {}, CONTEXT),
  "rotary, flash, two heads of keys": (ROTARY, {"num_kv_heads": 2, **FLASH}, {}, CONTEXT),
  "rotary, scan, full": (
    ROTARY,
    {"scan_layers": True, "remat_policy": "full", **FLASH},
    {},
    CONTEXT,
  ),
  "GPT, minimal": (GPT_16, {"remat_policy": "minimal", **FLASH}, {}, CONTEXT),
  "GPT, dropout": (GPT_16, {"dropout_rate": 0.3, **FLASH}, {}, CONTEXT),
  "GPT, dropout, xla": (GPT_16, {"dropout_rate": 0.3}, {}, CONTEXT),
  "GPT, chunks": (GPT_16, {}, {"loss_chunk_length": 6, "z_loss": 1e-2}, CONTEXT),
  "GPT, chunks of one position": (GPT_16, {}, {"loss_chunk_length": 1}, CONTEXT),
  "GPT, window": (GPT_16, {"window": 5, "layer_pattern": ("global", "local")}, {}, CONTEXT),
  "GPT, fsdp, tensor": (GPT_16, FLASH, {}, {"fsdp": 2, "context": 2, "tensor": 2}),
  "GPT, fused": (GPT_16, {"fuse_qkv_params": True}, {"label_smoothing": 0.1}, CONTEXT),
  "GPT, experts": (GPT_16, {"num_experts": 4}, {"aux_loss_factor": 0.1}, CONTEXT),
  "decoder, relative bias": (DECODER_ONLY, {}, {}, CONTEXT),
  "decoder, relative bias, flash": (DECODER_ONLY, FLASH, {}, CONTEXT),
  "decoder, prefix": (DECODER_ONLY, {}, PREFIX, CONTEXT),
  "T5": (T5_1_1, {}, {}, CONTEXT),
  "T5, flash": (T5_1_1, FLASH, {}, CONTEXT),
  "T5, transposed": (T5_1_1, {"transpose_batch_sequence": True}, {}, CONTEXT),
  "scalable T5": (SCALABLE, FLASH, {}, CONTEXT),
  "T5, tensor, full": (
    T5_1_1,
    {"remat_policy": "full", "dropout_rate": 0.3, **FLASH},
    {"loss_normalizing_factor": "AVERAGE_PER_SEQUENCE"},
    {"data": 2, "context": 2, "tensor": 2},
  ),
}
QUICK = ("GPT, flash",)


def make_case(name):
  """Returns a case's model, its parameters, a batch, and the mesh."""
  config, changes, arguments, mesh = CASES[name]
  config = dataclasses.replace(config, **changes)
  plain = dataclasses.replace(config, attention_kernel="xla")
  if isinstance(config, TransformerConfig):
    model = make_decoder_only_model(config, **arguments)
    return model, decoder_only_params(plain), packed_batch(["decoder"]), mesh
  model = make_model(Transformer(config), **arguments)
  params = variables(Transformer(plain))["params"]
  return model, params, packed_batch(["encoder", "decoder"]), mesh


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in CASES]
)
def test_split_positions_have_one_device_s_loss_and_gradients(name):
  model, params, batch, mesh = make_case(name)
  want = loss_and_gradients(model, params, batch)
  assert_close(loss_and_gradients(model, params, batch, PjitPartitioner(mesh=mesh)), want, 1e-5)


@pytest.mark.parametrize(
  ("name", "mesh"),
  [
    ("GPT", {"fsdp": 4, "context": 2}),
    pytest.param("T5", {"context": 8}, marks=pytest.mark.slow),
    pytest.param("GPT", {"fsdp": 4, "context": 1, "tensor": 2}, marks=pytest.mark.slow),
    pytest.param("T5", {"data": 2, "fsdp": 2, "context": 2}, marks=pytest.mark.slow),
    pytest.param("T5", {"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
  ],
)
def test_devices_with_parts_of_a_table_have_one_device_s_loss_and_gradients(
  name, mesh, lookups_of_gpus
):
  model, params, _, _ = make_case(name)
  batch = packed_batch(["decoder"] if name == "GPT" else ["encoder", "decoder"], batch=4)
  want = loss_and_gradients(model, params, batch)
  partitioner = PjitPartitioner(mesh=mesh)
  assert_close(loss_and_gradients(model, params, batch, partitioner), want, 1e-5)
  loss = partitioner.partition(model.loss_fn, (None, partitioner.data_partition_spec, None), None)
  assert "all-to-all" in loss.lower(params, batch, None).compile().as_text()


@pytest.mark.slow
def test_microbatches_of_split_positions_have_one_device_s_loss_and_gradients():
  model, params, _, mesh = make_case("rotary, scan, full")
  batch = packed_batch(["decoder"], batch=4)
  partitioner = PjitPartitioner(mesh=mesh, sequence_parallel=True)
  want = loss_and_gradients(model, params, batch, microbatches=2)
  assert_close(loss_and_gradients(model, params, batch, partitioner, 2), want, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True])
def test_lower_precision_differs_from_one_device_by_rounding_only(fp8):
  config = GPT_16.replace(attention_kernel="flash", dtype=jnp.bfloat16)
  choice = choose_fp8(TransformerEngineConfig(enabled=fp8, emulate=True))
  model = with_fp8(make_decoder_only_model(config), choice)
  params, batch = decoder_only_params(GPT_16), packed_batch(["decoder"])
  # In fp8 each device scales its own positions.
  want = loss_and_gradients(model, params, batch)
  got = loss_and_gradients(model, params, batch, PjitPartitioner(mesh=CONTEXT))
  np.testing.assert_allclose(got[0], want[0], rtol=5e-3)
  want_grads, got_grads = (ravel_pytree(jax.device_get(grads))[0] for grads in (want[1], got[1]))
  tolerance = 0.15 if fp8 else 0.03
  assert jnp.linalg.norm(got_grads - want_grads) < tolerance * jnp.linalg.norm(want_grads)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "kind"),
  [
    ("rotary, flash", "all-to-all"),
    ("rotary, flash, two heads of keys", "collective-permute"),
    ("T5, flash", "all-to-all"),
  ],
)
def test_the_bytes_that_attention_exchanges_are_those_of_the_plan(name, kind, lookups_of_gpus):
  model, params, batch, mesh = make_case(name)
  partitioner = PjitPartitioner(mesh=mesh)
  gradient = jax.grad(lambda params, batch: model.loss_fn(params, batch, None)[0])
  program = partitioner.partition(gradient, (None, partitioner.data_partition_spec), None)
  text = program.lower(params, batch).compile().as_text()
  _, sent = collectives(text, partitioner.mesh)[kind, ("context",)]
  config, shape = model.module.config, partitioner.mesh.shape
  lengths = {side: LENGTH for side in ("encoder", "decoder") if f"{side}_positions" in batch}
  work = planned_work(config, lengths, 1, shape, partitioner)
  planned = [each.size for each in step_collectives(work) if each.kind == kind]
  assert sum(planned) == sent


@pytest.mark.slow
def test_predictions_and_scores_ignore_the_axis_where_it_does_not_divide_the_length():
  model, params, batch, mesh = make_case("T5, flash")
  batch = {name: array[:, :15] for name, array in batch.items()}

  def infer(params, batch):
    return model.predict_batch(params, batch), model.score_batch(params, batch)

  partitioner = PjitPartitioner(mesh=mesh)
  run = partitioner.partition(infer, (None, partitioner.data_partition_spec), None)
  decodes, scores = jax.jit(infer)(params, batch)
  got_decodes, got_scores = run(params, batch)
  np.testing.assert_array_equal(got_decodes, decodes)
  np.testing.assert_allclose(got_scores, scores, rtol=1e-5)


def test_lengths_that_the_axis_does_not_divide_are_refused():
  text = (
    "the 10 positions of targets cannot be split over the 4 devices of the mesh's context axis (mesh "
    "{'context': 4}): set TASK_FEATURE_LENGTHS to multiples of 4, such as 8 or 12, or another size"
  )
  with pytest.raises(ValueError, match=re.escape(text)):
    check_row_lengths({"inputs": 8, "targets": 10}, {"context": 4})


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_devices_have_equal_work_in_a_causal_row(devices):
  parts = parts_of_devices(devices)
  assert sorted(parts.ravel().tolist()) == list(range(2 * devices))
  assert set(parts.sum(axis=1).tolist()) == {2 * devices - 1}
