"""Folders of Llama, Qwen, Gemma and T5Gemma: both generations of entries, other names, and what is refused.

Logits are those that Transformers recorded (tests/networks/transformers_families.py); weights are drawn by
their names, so a wrong name gives other logits.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from drawn_folders import CONFIGS, ENCODER, write_encoder_decoder, write_folder
from safetensors.numpy import save_file
from transformers_families import ENCODER_DECODERS, FAMILIES, RECORDED, tokens
from transformers_families import T5GEMMA as T5GEMMA_STACK

from rosetta_t5.checkpoints.formats.hugging_face import folder
from rosetta_t5.conversion.model_settings import read_model_settings
from rosetta_t5.conversion.verification import network_outputs

# The same settings with the entries of Transformers 4.
OLDER = {
  "llama": {"rope_theta": 5e3, "rope_scaling": FAMILIES["llama"][1]["rope_parameters"]},
  "gemma2": {"hidden_act": "relu", "rope_theta": 1e4},
  "gemma3": {"sliding_window_pattern": 2, "rope_theta": 1e5, "rope_local_base_freq": 1e4}
  | {"rope_scaling": {"type": "linear", "factor": 8.0}},
}


def check(path, family):
  arrays = folder.read_arrays(path)
  settings = read_model_settings(path, arrays)
  recorded = json.loads(RECORDED.read_text())["every third position and fifth logit"][family]
  for row, expected in zip(tokens(), recorded, strict=True):
    targets = row[None] if family in FAMILIES else row[None, ::-1]
    found = network_outputs(arrays, settings, (row[None], targets))
    np.testing.assert_allclose(found[0, ::3, ::5], expected, atol=2e-4)


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_of_a_folder_are_those_of_transformers(family, tmp_path):
  write_folder(tmp_path, family)
  check(tmp_path, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_logits_of_merged_attention_and_of_blocks_are_those_of_transformers(family, tmp_path):
  drawn = write_encoder_decoder(tmp_path, family)
  check(tmp_path, family)
  arrays = folder.read_arrays(tmp_path)
  network = read_model_settings(tmp_path, arrays).network
  config, weights = folder.make_config_and_weights(arrays, network, {})
  assert config["model_type"] == family
  assert weights.keys() == drawn.keys()


@pytest.mark.slow
@pytest.mark.parametrize("family", OLDER)
def test_entries_of_transformers_4_mean_the_same(family, tmp_path):
  write_folder(tmp_path, family, rope_parameters=None, layer_types=None, **OLDER[family])
  check(tmp_path, family)


@pytest.mark.slow
@pytest.mark.parametrize(
  "rename",
  [
    lambda name: f"language_model.{name}",
    lambda name: name.replace("model.", "model.language_model.", 1),
  ],
)
def test_the_text_part_of_a_multimodal_folder_is_read(rename, tmp_path, capsys):
  drawn = write_folder(tmp_path, "gemma3", rename)
  images = dict.fromkeys(("vision_tower.a", "multi_modal_projector.b"), np.zeros(2, np.float32))
  save_file({**drawn, **images}, tmp_path / "model.safetensors")
  text = CONFIGS["gemma3"]
  config = {"model_type": "gemma3", "text_config": text, "vision_config": {"layers": 1}}
  (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, 6]}))
  check(tmp_path, "gemma3")
  assert capsys.readouterr().err.count("so 2 weights for images are skipped") == 1
  assert folder.read_config(tmp_path / "config.json")["eos_token_id"] == [1, 6]


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_without_a_config_json_is_written_as_its_family(family, tmp_path):
  drawn = write_folder(tmp_path, family)
  arrays = folder.read_arrays(tmp_path)
  network = read_model_settings(tmp_path, arrays).network
  config, weights = folder.make_config_and_weights(arrays, network, {})
  assert config["model_type"] == CONFIGS[family]["model_type"]
  assert weights.keys() == drawn.keys()
  (tmp_path / "config.json").write_text(json.dumps(config))
  assert read_model_settings(tmp_path, folder.read_arrays(tmp_path)).network == network


@pytest.mark.one_quick_variant
@pytest.mark.parametrize(
  ("family", "changes", "text"),
  [
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "got 'yarn'"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "must have the entries factor"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config must be None"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    ("llama", {"tie_word_embeddings": False, "hidden_act": "elu"}, "hidden_act must be one of"),
    ("gemma2", {"layer_types": ["chunked_attention"] * 4}, "got 'chunked_attention'"),
    ("gemma2", {"tie_word_embeddings": False}, "no weights of an output layer"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ("t5gemma", {"encoder": ENCODER | {"use_moe": True}}, "use_moe = True is not supported"),
    ("t5gemma", {"decoder": T5GEMMA_STACK | {"pad_token_id": 3}}, "pad_token_id must be 0, got 3"),
  ],
)
def test_settings_that_the_networks_lack_are_refused_by_name(family, changes, text, tmp_path):
  write_folder(tmp_path, family, **changes)
  with pytest.raises(ValueError, match=text):
    folder.read_arrays(tmp_path)


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("pad_token_id", [None, 3])
def test_ids_are_one_higher_without_a_padding_token_0(pad_token_id, tmp_path):
  drawn = write_folder(tmp_path, "llama", pad_token_id=pad_token_id, bos_token_id=7)
  arrays = folder.read_arrays(tmp_path)
  settings = read_model_settings(tmp_path, arrays)
  assert settings.ids_are_shifted
  assert settings.network.decoder_start_token_id == 8
  table = arrays["target/decoder/token_embedder/embedding"].get()
  np.testing.assert_array_equal(table[1:41], drawn["model.embed_tokens.weight"])
  assert (settings.network.vocab_size, settings.network.unused_rows) == (128, 87)
  config, weights = folder.make_config_and_weights(arrays, settings.network, settings.source_config)
  assert config["vocab_size"] == 40
  for name, weight in drawn.items():
    np.testing.assert_array_equal(weights[name].get(), weight)


def test_an_output_layer_that_differs_from_a_tied_table_is_kept(tmp_path):
  drawn = write_folder(tmp_path, "gemma2")
  head = drawn["model.embed_tokens.weight"]
  for change, is_tied in ((0, True), (1, False)):
    save_file(
      {**drawn, "lm_head.weight": head + np.float32(change)}, tmp_path / "model.safetensors"
    )
    arrays = folder.read_arrays(tmp_path)
    assert read_model_settings(tmp_path, arrays).network.logits_via_embedding == is_tied


@pytest.mark.one_quick_variant
@pytest.mark.parametrize(
  ("family", "changes", "text"),
  [
    ("llama", {"window": 5, "layer_pattern": ("local",)}, "llama needs other values of window"),
    ("gemma2", {"query_scale": 0.3}, "gemma2 needs other values of query_scale"),
    ("gemma3", {"embedding_scale": 1.0}, "gemma3_text needs other values of embedding_scale"),
    ("t5gemma", {"encoder": {"qk_norm": True}}, r"other values of qk_norm \(encoder\)"),
  ],
)
def test_networks_that_transformers_lacks_are_not_written(family, changes, text, tmp_path):
  write_folder(tmp_path, family)
  arrays = folder.read_arrays(tmp_path)
  network = read_model_settings(tmp_path, arrays).network.replace(**changes)
  with pytest.raises(ValueError, match=text):
    folder.make_config_and_weights(arrays, network, {})
