"""Folders that Transformers saved give the logits that Transformers computes for them.

The folders and logits are recorded in `fixtures` for Transformers 4.57, 5.23 and 5.24. Where it is
installed, the same cases are saved and computed by that version.
"""

from __future__ import annotations

import functools
import json
import re
import types
import zlib

import jax.numpy as jnp
import numpy as np
import pytest
import transformers_folders
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file, save_file

from rosetta_t5.checkpoints import (
  RestoreCheckpointConfig,
  UnreadableCheckpointError,
  check_model,
)
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays
from rosetta_t5.checkpoints.formats.hugging_face import folder
from rosetta_t5.conversion.convert import convert
from rosetta_t5.conversion.model_settings import read_model_settings
from rosetta_t5.conversion.verification import network_outputs
from rosetta_t5.decoding import temperature_sample
from rosetta_t5.models import EncoderDecoderModel
from rosetta_t5.networks.transformer import Transformer

RECORDED = transformers_folders.recordings()
CASES = [*transformers_folders.CASES, *transformers_folders.CASES_OF_5]
TARGETS = transformers_folders.TARGETS
_computed = {}


def last_logits(path):
  """Returns this project's logits of the last target, by Transformers' ids."""
  arrays = read_arrays(path)
  settings = read_model_settings(path, arrays)
  tokens = (transformers_folders.INPUTS, TARGETS + (TARGETS > 0) * settings.ids_are_shifted)
  values = b"".join(arrays[name].get().tobytes() for name in sorted(arrays))
  key = (repr(settings.network), settings.ids_are_shifted, zlib.crc32(values))
  if key not in _computed:  # Several versions save the same model.
    _computed[key] = network_outputs(arrays, settings, tokens)[0, -1]
  return _computed[key][settings.ids_are_shifted :]


def versions(case):
  return [name for name in RECORDED if name.endswith(f"/{case}")]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_version_that_saved_the_folder(case, tmp_path):
  assert versions(case)
  for name in versions(case):
    expected = transformers_folders.write_folder(name, tmp_path / name, RECORDED)
    found = last_logits(tmp_path / name)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["t5-start", "madlad"])
def test_decoding_starts_and_ends_with_the_tokens_of_the_folder(case, tmp_path):
  (*_, name) = versions(case)
  transformers_folders.write_folder(name, tmp_path, RECORDED)
  arrays, end = read_arrays(tmp_path), RECORDED[name]["config"]["eos_token_id"]
  network = read_model_settings(tmp_path, arrays).network
  greedy = functools.partial(temperature_sample, temperature=0.0)
  vocabulary = types.SimpleNamespace(eos_id=end)
  model = EncoderDecoderModel(Transformer(network), vocabulary, vocabulary, None, greedy)
  params = unflatten_dict(
    {n.removeprefix("target/"): jnp.asarray(x.get()) for n, x in arrays.items()}, sep="/"
  )
  expected = RECORDED[name]["generated"]
  batch = {"encoder_input_tokens": jnp.asarray(transformers_folders.INPUTS)}
  batch["decoder_input_tokens"] = jnp.zeros((1, len(expected) + 1), jnp.int32)
  decodes = model.predict_batch(params, batch)[0]
  assert decodes[: len(expected)].tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize(
  "case",
  [
    "t5-gated-silu",
    "gpt2",
    *(
      pytest.param(case, marks=pytest.mark.slow)
      for case in ("t5-buckets", "t5-epsilon", "madlad", "gpt_neo")
    ),
  ],
)
def test_a_conversion_to_t5x_and_back_keeps_weights_and_settings(case, tmp_path):
  (*_, name) = versions(case)
  transformers_folders.write_folder(name, tmp_path / "theirs", RECORDED)
  checkpoint = convert(tmp_path / "theirs", tmp_path / "t5x", "t5x")
  back = convert(checkpoint, tmp_path / "back", "hf")
  read, written = read_arrays(tmp_path / "theirs"), read_arrays(back)
  assert read.keys() == written.keys()
  for array in read:
    np.testing.assert_array_equal(read[array].get(), written[array].get(), err_msg=array)
  settings = [read_model_settings(x, read) for x in (tmp_path / "theirs", back)]
  assert settings[0].network == settings[1].network
  configs = [settings[n].source_config for n in (0, 1)]
  for entry in ("pad_token_id", "eos_token_id", "bos_token_id", "dropout_rate", "attn_pdrop"):
    assert configs[0].get(entry) == configs[1].get(entry)


@pytest.mark.parametrize("version", ["4.57.6", "5.23.0", "5.24.0"])
def test_a_umt5_is_written_in_the_form_of_the_version_that_saved_it(version, tmp_path):
  transformers_folders.write_folder(f"{version}/umt5-untied", tmp_path, RECORDED)
  arrays = read_arrays(tmp_path)
  settings = read_model_settings(tmp_path, arrays)
  config, weights = folder.make_config_and_weights(
    arrays, settings.network, settings.source_config, model_type="umt5"
  )
  assert config["tie_word_embeddings"] == settings.source_config["tie_word_embeddings"] or (
    config["scale_decoder_outputs"] == settings.source_config["scale_decoder_outputs"]
  )
  head = weights["lm_head.weight"].get()
  expected = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
  np.testing.assert_allclose(head, expected, rtol=1e-6)


def test_a_run_whose_network_computes_something_else_is_refused_with_what_to_set(tmp_path, caplog):
  transformers_folders.write_folder("5.24.0/t5-gated-silu", tmp_path / "theirs", RECORDED)
  config = json.loads((tmp_path / "theirs/config.json").read_text())
  (tmp_path / "theirs/config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
  converted = convert(tmp_path / "theirs", tmp_path / "t5x", "t5x")
  network = read_model_settings(converted, read_arrays(converted)).network
  changes = {"mlp_activations": ["gelu", "linear"], "max_distance": 64, "vocab_size": 40}
  changes |= {
    "scale_attn_logits": True,
    "decoder_start_token_id": None,
  }  # None is padding, as there
  module, vocabulary = Transformer(network.replace(**changes)), types.SimpleNamespace(eos_id=1)
  model = EncoderDecoderModel(module, vocabulary, vocabulary, None)
  for path in (tmp_path / "theirs", converted):
    cfg = RestoreCheckpointConfig(str(path), "specific")
    with pytest.raises(ValueError, match="does not describe this run's model") as error:
      check_model(model, {}, cfg)
    assert re.findall(r"network\.T5Config\.\w+ = .*", str(error.value)) == [
      "network.T5Config.max_distance = 128 (it is 64)",
      "network.T5Config.scale_attn_logits = False (it is True)",
      "network.T5Config.mlp_activations = ('silu', 'linear') (it is ('gelu', 'linear'))",
    ]
    assert "texts end with token 7" in str(error.value)
    cfg.strict = False
    check_model(model, {}, cfg)
    assert "does not describe this run's model" in caplog.text


def test_a_checkpoint_is_not_written_below_the_name_of_another_step(tmp_path):
  transformers_folders.write_folder("5.24.0/t5-gated-silu", tmp_path / "theirs", RECORDED)
  with pytest.raises(ValueError, match=r"of step 0: give \S+/checkpoint_0 as DST"):
    convert(tmp_path / "theirs", tmp_path / "checkpoint_7", "t5x")


def test_weights_that_transformers_ignores_are_left_out_and_unknown_ones_refused(tmp_path):
  transformers_folders.write_folder("4.57.6/t5-unused-bias", tmp_path, RECORDED)
  assert len([name for name in read_arrays(tmp_path) if name.endswith("rel_embedding")]) == 2
  weights = load_file(tmp_path / "model.safetensors")
  unknown = "decoder.block.1.layer.1.EncDecAttention.relative_attention_bias.weight"
  save_file(weights | {unknown: np.ones((32, 2), np.float32)}, tmp_path / "model.safetensors")
  with pytest.raises(UnreadableCheckpointError, match=f"does not have: {unknown}"):
    read_arrays(tmp_path)


def test_tables_that_differ_between_encoder_and_decoder_are_refused(tmp_path):
  transformers_folders.write_folder("5.24.0/switch-untied", tmp_path, RECORDED)
  weights = load_file(tmp_path / "model.safetensors")
  weights["encoder.embed_tokens.weight"] += 1
  save_file(weights, tmp_path / "model.safetensors")
  with pytest.raises(UnreadableCheckpointError, match="must share the embedding table"):
    read_arrays(tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_the_installed_transformers_computes_the_same_logits(case, tmp_path):
  transformers = pytest.importorskip("transformers")
  pytest.importorskip("torch")
  if case in transformers_folders.CASES_OF_5 and transformers.__version__ < "5.24":
    pytest.skip("this version computes something else")
  name = f"{transformers.__version__}/{case}"
  transformers_folders.save_with_transformers(name, tmp_path)
  config = json.loads((tmp_path / "config.json").read_text())
  targets = np.where(TARGETS == 0, transformers_folders.first_token(config), TARGETS)
  expected = transformers_folders.logits_of_transformers(tmp_path, targets=targets)[0, -1]
  np.testing.assert_allclose(last_logits(tmp_path), expected, rtol=0, atol=2e-5)
