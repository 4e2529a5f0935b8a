"""Transformers' Switch Transformer is read and written with the logits and the routing of PyTorch.

`fixtures/switch` is a tiny random model made by Transformers 5.23, with the logits, the experts of the
encoder's tokens, and the auxiliary losses that it computed. Each expert has three slots in a row of
twelve tokens, so tokens are left behind.
"""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file

from rosetta_t5.checkpoints import UnreadableCheckpointError
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays
from rosetta_t5.conversion.convert import convert
from rosetta_t5.conversion.model_settings import read_model_settings
from rosetta_t5.networks.transformer import T5Config, Transformer

SWITCH = pathlib.Path(__file__).parent / "fixtures/switch"
CONFIG = T5Config(
  vocab_size=48,
  emb_dim=16,
  num_heads=2,
  num_encoder_layers=2,
  num_decoder_layers=2,
  head_dim=4,
  mlp_dim=24,
  mlp_activations=("relu",),
  logits_via_embedding=True,
  dropout_rate=0.0,
  num_experts=4,
  decoder_expert_layer_period=1,
  expert_capacity=3,
  route_padding=True,
)


@pytest.fixture(scope="module")
def by_torch():
  return np.load(SWITCH / "logits.npz")


@pytest.fixture(scope="module")
def ours(by_torch):
  """Returns the network's logits for the folder's weights, and what the encoder's layer sows."""
  arrays = {
    name.removeprefix("target/"): jnp.asarray(x.get()) for name, x in read_arrays(SWITCH).items()
  }
  params = unflatten_dict(arrays, sep="/")
  targets = jnp.asarray(by_torch["decoder_inputs"])
  tokens = (jnp.asarray(by_torch["inputs"]), targets, jnp.ones_like(targets))
  logits, collections = jax.jit(
    lambda p: Transformer(CONFIG).apply(
      {"params": p}, *tokens, enable_dropout=False, mutable=["intermediates"]
    )
  )(params)
  sown = collections["intermediates"]["encoder"]["layers_1"]["mlp"]
  return logits, {name: float(values[0]) for name, values in sown.items() if not values[0].ndim}


@pytest.mark.slow
def test_the_network_computes_the_logits_of_transformers(ours, by_torch):
  np.testing.assert_allclose(ours[0], by_torch["logits"], atol=1e-5)


def test_routing_and_auxiliary_losses_are_those_of_transformers(ours, by_torch):
  computed = by_torch["expert_index"].sum(-1)
  assert computed.mean() < 1
  assert ours[1]["fraction_tokens_left_behind"] == pytest.approx(1 - computed.mean())
  for name in ("auxiliary_loss", "router_z_loss"):
    assert ours[1][name] == pytest.approx(float(by_torch[name]), rel=1e-5)


@pytest.mark.slow
def test_weights_and_config_are_the_same_after_a_conversion_to_t5x_and_back(tmp_path):
  checkpoint = convert(SWITCH, tmp_path / "t5x", "t5x")
  config = SWITCH / "config.json"
  converted = convert(checkpoint, tmp_path / "hf", "hf", config=config)
  before, after = (load_file(folder / "model.safetensors") for folder in (SWITCH, converted))
  assert before.keys() == after.keys()
  for name, array in before.items():
    np.testing.assert_array_equal(after[name], array, err_msg=name)
  theirs, ours = (
    json.loads((folder / "config.json").read_text()) for folder in (SWITCH, converted)
  )
  entries = [name for name in theirs if "expert" in name or "sparse" in name or "router" in name]
  assert {name: ours[name] for name in entries} == {name: theirs[name] for name in entries}


def change(folder, tmp_path, **entries):
  shutil.copytree(folder, tmp_path / "changed")
  config = json.loads((folder / "config.json").read_text())
  (tmp_path / "changed/config.json").write_text(json.dumps(config | entries))
  return tmp_path / "changed"


def test_a_router_with_a_bias_is_refused(tmp_path):
  with pytest.raises(UnreadableCheckpointError, match="router_bias must be False, got True"):
    read_arrays(change(SWITCH, tmp_path, router_bias=True))


@pytest.mark.slow
def test_an_encoder_alone_is_written_and_read(tmp_path):
  encoder = convert(SWITCH, tmp_path / "hf", "hf", encoder_only=True)
  network = read_model_settings(encoder, read_arrays(encoder)).network
  assert (network.num_experts, network.num_decoder_layers) == (4, 0)
