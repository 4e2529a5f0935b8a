"""Folders of Transformers' T5 are read and written with the logits that PyTorch computes.

`fixtures` contains tiny random models made by Transformers 5.23, and the logits that PyTorch computed
for them.
"""

from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
import numpy_t5
import pytest
from safetensors.numpy import load_file
from tiny_models import T5_1_1

from rosetta_t5.checkpoints import (
  RestoreCheckpointConfig,
  UnreadableCheckpointError,
  get_first_valid_restore_config_and_paths,
)
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays
from rosetta_t5.checkpoints.formats.hugging_face import folder
from rosetta_t5.checkpoints.formats.hugging_face.families import t5

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
MODELS = ("t5_1_0", "t5_1_1", "mt5_sharded", "umt5")


@pytest.fixture(scope="module")
def by_torch():
  return np.load(FIXTURES / "transformers_logits.npz")


def logits_of(path, by_torch):
  arrays = read_arrays(path)
  return numpy_t5.compute_logits(arrays, by_torch["inputs"], by_torch["decoder_inputs"])


@pytest.mark.parametrize("model", MODELS)
def test_logits_equal_those_of_pytorch(model, by_torch):
  np.testing.assert_allclose(
    logits_of(FIXTURES / model, by_torch), by_torch[model], rtol=0, atol=1e-4
  )


def test_an_untied_output_layer_whose_logits_are_scaled_keeps_its_logits(by_torch, tmp_path):
  scaled = tmp_path / "scaled"
  shutil.copytree(FIXTURES / "t5_1_1", scaled)
  config = json.loads((scaled / "config.json").read_text())
  (scaled / "config.json").write_text(json.dumps(config | {"scale_decoder_outputs": True}))
  expected = by_torch["t5_1_1"] / np.sqrt(config["d_model"])
  np.testing.assert_allclose(logits_of(scaled, by_torch), expected, rtol=0, atol=1e-4)


def test_a_model_that_was_trained_here_states_the_token_with_which_others_start_to_decode():
  arrays = read_arrays(FIXTURES / "t5_1_1")
  config, _ = folder.make_config_and_weights(arrays, T5_1_1, {})
  assert (T5_1_1.decoder_start_token_id, config["decoder_start_token_id"]) == (None, 0)


def test_a_folder_is_recognised_in_every_restore_mode():
  for mode in ("latest", "all", "specific"):
    cfg = RestoreCheckpointConfig(str(FIXTURES / "umt5"), mode)
    assert get_first_valid_restore_config_and_paths([cfg])[1] == (str(FIXTURES / "umt5"),)


def test_a_file_of_pytorch_is_read_with_it_and_runs_no_code(tmp_path):
  torch = pytest.importorskip("torch", reason="only PyTorch reads its files")
  weights = load_file(FIXTURES / "t5_1_0/model.safetensors")
  state = {name: torch.from_numpy(x).bfloat16() for name, x in weights.items()}
  state["encoder.embed_tokens.weight"] = state["shared.weight"]
  torch.save(state, tmp_path / "pytorch_model.bin")
  shutil.copy(FIXTURES / "t5_1_0/config.json", tmp_path)
  expected, found = read_arrays(FIXTURES / "t5_1_0"), read_arrays(tmp_path)
  assert found.keys() == expected.keys()
  for name, array in found.items():
    rounded = expected[name].get().astype(array.dtype)
    np.testing.assert_array_equal(array.get(), rounded, err_msg=name)
  torch.save({"shared.weight": pathlib.Path("touched")}, tmp_path / "pytorch_model.bin")
  with pytest.raises(UnreadableCheckpointError, match="is not a file of weights, or is damaged"):
    read_arrays(tmp_path)


def test_without_pytorch_a_file_of_it_is_refused_with_what_to_use(tmp_path, monkeypatch):
  monkeypatch.setattr(folder.importlib.util, "find_spec", lambda name: None)
  shutil.copy(FIXTURES / "t5_1_0/config.json", tmp_path)
  (tmp_path / "pytorch_model.bin").write_bytes(b"")
  with pytest.raises(
    UnreadableCheckpointError, match=r"needs PyTorch: use a folder with model\.safetensors"
  ):
    read_arrays(tmp_path)


def test_a_truncated_file_is_reported_as_damaged(tmp_path):
  shutil.copytree(FIXTURES / "umt5", tmp_path / "cut")
  file = tmp_path / "cut/model.safetensors"
  file.write_bytes(file.read_bytes()[:-100])
  with pytest.raises(
    UnreadableCheckpointError, match=r"model.safetensors is damaged, or has an unknown dtype: "
  ):
    read_arrays(tmp_path / "cut")


def test_a_missing_shard_is_named(tmp_path):
  shutil.copytree(FIXTURES / "mt5_sharded", tmp_path / "part")
  shard = sorted((tmp_path / "part").glob("*.safetensors"))[1]
  shard.unlink()
  with pytest.raises(UnreadableCheckpointError, match=rf"{shard.name} is missing"):
    read_arrays(tmp_path / "part")


def test_other_families_are_refused(tmp_path):
  shutil.copytree(FIXTURES / "umt5", tmp_path / "other")
  (tmp_path / "other/config.json").write_text('{"model_type": "bart"}')
  with pytest.raises(
    UnreadableCheckpointError, match=r"model_type must be one of .*'t5', .* got 'bart'"
  ):
    read_arrays(tmp_path / "other")


@pytest.mark.parametrize(
  ("config", "error"),
  [
    ({"feed_forward_proj": "fast-gelu"}, "feed_forward_proj must be one of .* got 'fast-gelu'"),
    (
      {"model_type": "switch_transformers", "dense_act_fn": "fast-gelu"},
      "dense_act_fn must be .*got 'fast-gelu'",
    ),
  ],
)
def test_an_activation_that_cannot_be_computed_is_refused(config, error):
  arrays = read_arrays(FIXTURES / "t5_1_0")
  with pytest.raises(ValueError, match=error):
    t5.network_settings({"model_type": "t5", **config}, arrays)
