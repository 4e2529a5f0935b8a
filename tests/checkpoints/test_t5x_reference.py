"""T5X's own checkpoints of the reference run restore into this project's train state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpy_t5
import pytest
import tensorstore as ts

from rosetta_t5.checkpoints import RestoreCheckpointConfig, TrainStateInitializer
from rosetta_t5.checkpoints.arrays.state_dicts import flatten_state_dict
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays
from rosetta_t5.networks.transformer import T5Config, Transformer
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.training.optimizers.adafactor import Adafactor
from rosetta_t5.training.optimizers.factor_rules import standard_logical_factor_rules


@pytest.fixture(scope="module")
def initializer():
  config = T5Config(
    vocab_size=384,
    emb_dim=64,
    num_heads=4,
    num_encoder_layers=2,
    num_decoder_layers=2,
    head_dim=16,
    mlp_dim=128,
    mlp_activations=("gelu", "linear"),
  )
  optimizer = Adafactor(logical_factor_rules=standard_logical_factor_rules())
  tokens = jnp.ones((16, 64), jnp.int32)

  def init(rng, input_shapes, input_types):
    return Transformer(config).init(rng, tokens, tokens, tokens, enable_dropout=False)

  return TrainStateInitializer(optimizer, init, {}, PjitPartitioner(num_partitions=2))


def read_raw(folder, name):
  """Reads one array past Orbax."""
  kvstore = {"driver": "ocdbt", "base": f"file://{folder}", "path": name.replace("/", ".")}
  return ts.open({"driver": "zarr", "kvstore": kvstore}).result().read().result()


def test_the_orbax_checkpoint_is_restored_sharded_with_the_stored_values(initializer, shared):
  path = shared / "reference/t5x_orbax/checkpoint_20"
  cfg = RestoreCheckpointConfig(path=str(path), mode="specific")
  state = initializer.from_checkpoint([cfg])
  assert int(state.step) == 20
  flat = flatten_state_dict(state.state_dict())
  assert len(flat) == 261
  for name in (
    "target/token_embedder/embedding",
    "state/param_states/decoder/logits_dense/kernel/v",
  ):
    np.testing.assert_array_equal(flat[name], read_raw(path / "state", name))
  kernel = state.params["encoder"]["layers_0"]["mlp"]["wi_0"]["kernel"]
  assert kernel.addressable_shards[0].data.shape == (64, 64)


def test_parameters_can_be_restored_in_bfloat16(initializer, shared):
  path = str(shared / "reference/t5x_orbax/checkpoint_20")
  cfg = RestoreCheckpointConfig(path=path, mode="specific", dtype="bfloat16")
  state = initializer.from_checkpoint([cfg])
  assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
  assert {leaf.dtype for leaf in jax.tree.leaves(state.param_states)} == {jnp.dtype(jnp.float32)}


def test_the_legacy_checkpoint_is_restored_sharded_with_the_stored_values(initializer, shared):
  path = shared / "reference/t5x_legacy/checkpoint_10"
  state = initializer.from_checkpoint([RestoreCheckpointConfig(str(path), "specific")])
  assert int(state.step) == 10
  flat = flatten_state_dict(state.state_dict())
  for name in (
    "target/decoder/layers_1/mlp/wo/kernel",
    "state/param_states/encoder/relpos_bias/rel_embedding/v",
  ):
    kvstore = {"driver": "file", "path": f"{path}/{name.replace('/', '.')}/"}
    raw = ts.open({"driver": "zarr", "kvstore": kvstore}).result().read().result()
    np.testing.assert_array_equal(flat[name], raw)
  kernel = state.params["encoder"]["layers_0"]["mlp"]["wi_0"]["kernel"]
  assert kernel.addressable_shards[0].data.shape == (64, 64)


def test_the_reference_forward_pass_computes_the_logits_of_t5x(shared):
  reference = np.load(shared / "reference/forward_and_decode.npz")
  inputs, targets, wanted = (
    reference[f"batch/{name}"][:2]
    for name in ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
  )
  for step in (0, 20):
    arrays = read_arrays(shared / f"reference/t5x_orbax/checkpoint_{step}")
    logits = numpy_t5.compute_logits(arrays, inputs, targets)
    real = wanted > 0
    np.testing.assert_allclose(logits[real], reference[f"logits_step{step}"][real], atol=1e-4)
