"""Folders of Transformers' Cohere models: read, computed, written, and refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers_families import FAMILIES, RECORDED, SIZES, VOCAB, draw, tokens

from rosetta_t5 import cli
from rosetta_t5.checkpoints.formats.hugging_face import folder
from rosetta_t5.conversion.model_settings import read_model_settings
from rosetta_t5.conversion.verification import network_outputs

CONFIG = {name: value for name, value in SIZES.items() if name != "head_dim"}
CONFIG |= FAMILIES["cohere"][1] | {"model_type": "cohere", "layer_norm_eps": 1e-5}
CONFIG |= {"bos_token_id": 7, "eos_token_id": 9}


def write_folder(path, **changes):
  width, heads = CONFIG["hidden_size"], {"q": 32, "k": 16, "v": 16, "o": 32}
  shapes = {"model.embed_tokens": (VOCAB, width), "model.norm": (width,)}
  for layer in range(CONFIG["num_hidden_layers"]):
    prefix = f"model.layers.{layer}"
    shapes[f"{prefix}.input_layernorm"] = (width,)
    shapes |= {f"{prefix}.self_attn.{name}_proj": (size, width) for name, size in heads.items()}
    shapes |= {f"{prefix}.mlp.{name}_proj": (48, width) for name in ("gate", "up")}
    shapes[f"{prefix}.mlp.down_proj"] = (width, 48)
  path.mkdir(exist_ok=True)
  weights = {f"{name}.weight": draw(f"{name}.weight", shape) for name, shape in shapes.items()}
  save_file(weights, path / "model.safetensors")
  (path / "config.json").write_text(json.dumps(CONFIG | changes))
  return weights


@pytest.mark.slow
def test_logits_of_a_folder_equal_those_of_transformers(tmp_path):
  write_folder(tmp_path / "hf")
  arrays = folder.read_arrays(tmp_path / "hf")
  settings = read_model_settings(tmp_path / "hf", arrays, tmp_path / "hf/config.json")
  assert not settings.ids_are_shifted
  recorded = json.loads(RECORDED.read_text())["every third position and fifth logit"]["cohere"]
  for row, expected in zip(tokens(), recorded, strict=True):
    found = network_outputs(arrays, settings, (row[None], row[None]))
    np.testing.assert_allclose(found[0, ::3, ::5], expected, atol=2e-4)


@pytest.mark.slow
def test_a_folder_that_is_converted_and_back_is_the_same(tmp_path):
  weights = write_folder(tmp_path / "hf")
  t5x, back = str(tmp_path / "t5x"), tmp_path / "back"
  cli.main(["convert", str(tmp_path / "hf"), t5x, "--to", "t5x"])
  cli.main(["convert", t5x, str(back), "--to", "hf"])
  written = load_file(back / "model.safetensors")
  assert written.keys() == weights.keys()
  for name, weight in weights.items():
    np.testing.assert_array_equal(written[name], weight)
  config = json.loads((back / "config.json").read_text())
  assert {name: config[name] for name in CONFIG} == CONFIG
  assert config["architectures"] == ["CohereForCausalLM"]


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    ({"use_qk_norm": True}, "use_qk_norm = True is not supported for cohere"),
    ({"hidden_act": "elu"}, "hidden_act must be one of 'relu'"),
  ],
)
def test_settings_that_the_network_lacks_are_refused(tmp_path, changes, text):
  write_folder(tmp_path, **changes)
  with pytest.raises(ValueError, match=text):
    folder.read_arrays(tmp_path)


def test_a_decoder_with_parallel_blocks_and_other_settings_is_not_written(tmp_path):
  write_folder(tmp_path / "hf")
  arrays = folder.read_arrays(tmp_path / "hf")
  settings = read_model_settings(tmp_path / "hf", arrays, tmp_path / "hf/config.json")
  network = settings.network.replace(rope_interleaved=False)
  with pytest.raises(ValueError, match="needs other values of rope_interleaved"):
    folder.make_config_and_weights(arrays, network, {})
