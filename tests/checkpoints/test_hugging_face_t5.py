"""Folders that Transformers wrote are read as T5X's parameters, and back; logits are PyTorch's own.

`fixtures` holds tiny random models that Transformers 5.23 made, and the logits PyTorch gave for them.
"""

from __future__ import annotations

import json
import pathlib
import pickle
import shutil
import zipfile

import numpy as np
import pytest

from rosetta_t5.checkpoints import (
  RestoreCheckpointConfig,
  UnreadableCheckpointError,
  get_first_valid_restore_config_and_paths,
)
from rosetta_t5.checkpoints.formats import torch_file
from rosetta_t5.checkpoints.formats.hugging_face import t5_reader
from rosetta_t5.checkpoints.reading import read_arrays
from rosetta_t5.conversion import numpy_t5
from rosetta_t5.conversion.convert import convert

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
MODELS = ("t5_1_0_bin", "t5_1_1", "mt5_sharded", "umt5")


@pytest.fixture(scope="module")
def by_torch():
  return np.load(FIXTURES / "transformers_logits.npz")


def logits_of(path, by_torch):
  arrays = read_arrays(path)
  return numpy_t5.logits(arrays, by_torch["inputs"], by_torch["decoder_inputs"])


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_pytorch_s(model, by_torch):
  np.testing.assert_allclose(
    logits_of(FIXTURES / model, by_torch), by_torch[model], rtol=0, atol=1e-4
  )


@pytest.mark.parametrize("model", MODELS)
def test_logits_survive_the_way_to_t5x_and_back(model, by_torch, tmp_path):
  checkpoint = convert(FIXTURES / model, tmp_path / "t5x", "t5x", say=lambda _: None)
  assert checkpoint.name == "checkpoint_0"
  folder = convert(checkpoint, tmp_path / "hf", "hf", say=lambda _: None)
  np.testing.assert_allclose(logits_of(folder, by_torch), by_torch[model], rtol=0, atol=1e-4)
  theirs = t5_reader.read_config(FIXTURES / model)
  ours = t5_reader.read_config(folder)
  same = ("d_model", "d_kv", "d_ff", "num_heads", "num_layers", "num_decoder_layers", "vocab_size")
  assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
  assert ours["feed_forward_proj"] == theirs["feed_forward_proj"]


def test_head_is_tied_or_scaled_as_each_version_of_transformers_has_it():
  def scales(**config):
    return t5_reader.scales_logits(config)

  assert scales(model_type="t5")
  assert scales(model_type="t5", tie_word_embeddings=True)
  assert not scales(model_type="t5", tie_word_embeddings=False)
  # Transformers 5 writes True whatever the head is.
  assert not scales(model_type="t5", tie_word_embeddings=True, scale_decoder_outputs=False)
  assert not scales(model_type="mt5", tie_word_embeddings=True, transformers_version="5.1.0")
  assert scales(model_type="mt5", tie_word_embeddings=True, transformers_version="4.40.0")
  assert scales(model_type="umt5", tie_word_embeddings=True)
  assert not scales(model_type="umt5", tie_word_embeddings=False)


def test_scaled_logits_with_a_table_of_their_own_keep_their_values(by_torch, tmp_path):
  """As T5Config() of Transformers has it where lm_head was trained apart."""
  scaled = tmp_path / "scaled"
  shutil.copytree(FIXTURES / "t5_1_1", scaled)
  config = json.loads((scaled / "config.json").read_text())
  (scaled / "config.json").write_text(json.dumps(config | {"scale_decoder_outputs": True}))
  expected = by_torch["t5_1_1"] / np.sqrt(config["d_model"])
  np.testing.assert_allclose(logits_of(scaled, by_torch), expected, rtol=0, atol=1e-4)


def test_folder_is_recognised_in_every_mode():
  for mode in ("latest", "all", "specific"):
    cfg = RestoreCheckpointConfig(str(FIXTURES / "umt5"), mode)
    assert get_first_valid_restore_config_and_paths([cfg])[1] == (str(FIXTURES / "umt5"),)


def test_pickle_that_asks_for_more_than_tensors_is_not_run(tmp_path):
  class Attack:
    def __reduce__(self):
      return pathlib.Path.touch, (tmp_path / "was run",)

  with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
    archive.writestr("archive/data.pkl", pickle.dumps({"shared.weight": Attack()}, protocol=2))
  with pytest.raises(ValueError, match=r"asks to run pathlib\.\w*Path\.touch|asks to run"):
    torch_file.read_arrays(tmp_path / "pytorch_model.bin")
  assert not (tmp_path / "was run").exists()


def test_cut_off_file_is_damage_with_its_length(tmp_path):
  shutil.copytree(FIXTURES / "umt5", tmp_path / "cut")
  file = tmp_path / "cut/model.safetensors"
  file.write_bytes(file.read_bytes()[:-100])
  with pytest.raises(
    UnreadableCheckpointError, match=r"model.safetensors ends at byte \d+, before"
  ):
    read_arrays(tmp_path / "cut")


def test_missing_shard_is_named(tmp_path):
  shutil.copytree(FIXTURES / "mt5_sharded", tmp_path / "part")
  shard = sorted((tmp_path / "part").glob("*.safetensors"))[1]
  shard.unlink()
  with pytest.raises(UnreadableCheckpointError, match=rf"{shard.name} is missing"):
    read_arrays(tmp_path / "part")


def test_other_families_are_refused_by_name(tmp_path):
  shutil.copytree(FIXTURES / "umt5", tmp_path / "other")
  (tmp_path / "other/config.json").write_text('{"model_type": "bart"}')
  with pytest.raises(UnreadableCheckpointError, match=r"model_type = 'bart': only the T5 family"):
    read_arrays(tmp_path / "other")
