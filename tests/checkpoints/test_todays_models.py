"""Today's families compute here what Transformers computes, and their folders can be written back.

The oracle is Transformers 5.24 with PyTorch; without them these tests are skipped, and
test_hugging_face_decoders.py compares recorded logits.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re

import jax
import numpy as np
import pytest
import todays_models
from safetensors.numpy import load_file
from todays_models import INPUTS, LENGTH, SHAPES, TARGETS, batch_of, logits, their_logits

from rosetta_t5.checkpoints.arrays.lazy_arrays import as_stored_array
from rosetta_t5.checkpoints.formats.hugging_face import folder
from rosetta_t5.conversion.convert import convert

torch = pytest.importorskip("torch", reason="Transformers needs PyTorch")
transformers = pytest.importorskip("transformers", minversion="5.24", reason="is the oracle")

NEW_TOKENS = 32
IMAGES = re.compile("vision_tower|multi_modal_projector")  # weights that are not read
_QUICK = ("llama", "gemma3", "t5gemma with a larger encoder", "t5gemma2", "longt5 with blocks")
_saved = {}


@pytest.fixture(
  params=[pytest.param(x, marks=[] if x in _QUICK else pytest.mark.slow) for x in SHAPES]
)
def pair(request, tmp_path_factory):
  """Returns (the model here, the model in Transformers)."""
  name = request.param
  if name not in _saved:
    path = tmp_path_factory.mktemp("model")
    theirs = todays_models.save(name, path)
    _saved[name] = todays_models.read(path), theirs
  return _saved[name]


@pytest.mark.parametrize("on_left", [False, True])
def test_logits_are_equal_with_padding_on_either_side(pair, on_left):
  found, theirs = pair
  batch = batch_of(found, on_left)
  is_real = np.asarray(batch["decoder_target_tokens"] != 0)[..., None]
  expected = their_logits(found, theirs, on_left)
  ours = logits(found, batch, padding_never_follows=False)
  np.testing.assert_allclose(ours * is_real, expected * is_real, rtol=0, atol=1e-4)


def test_logits_of_a_packed_row_are_those_of_its_examples(pair):
  found, theirs = pair
  batch = todays_models.packed_batch(found)
  if found.model.network_config.of_side("encoder").global_block_size:
    with pytest.raises(
      ValueError, match=r"does not support packed examples.*pack = False for train"
    ):
      logits(found, batch)
    return
  ours = logits(found, batch, padding_never_follows=False)[0]
  expected = their_logits(found, theirs)
  parts = [expected[row, : len(targets)] for row, targets in enumerate(TARGETS)]
  count = sum(map(len, TARGETS))
  np.testing.assert_allclose(ours[:count], np.concatenate(parts), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
  ("beams", "controls"),
  [(1, {}), (4, {}), (1, {"repetition_penalty": 1.5, "no_repeat_ngram_size": 1})],
)
def test_greedy_tokens_and_those_of_four_beams_are_equal(pair, beams, controls):
  found, theirs = pair
  is_decoder = found.settings.is_decoder
  start = todays_models.start_of(found.path)
  words = [] if found.shift else [[0]]  # Token 0 is padding here.
  options = {"bad_words_ids": words or None, "num_beams": beams, "length_penalty": 0.0}
  expected = []
  for tokens in INPUTS:
    ids = torch.tensor([[start, *tokens] if is_decoder else tokens])
    decoded = theirs.generate(
      ids,
      attention_mask=torch.ones_like(ids),
      max_new_tokens=NEW_TOKENS,
      do_sample=False,
      **options,
      **controls,
    )
    expected.append(decoded[0, ids.shape[1] if is_decoder else 1 :].tolist())
  assert todays_models.decode(found, INPUTS, NEW_TOKENS, beams, **controls) == expected


def test_loss_and_gradients_of_a_batch_are_those_of_pytorch(pair):
  found, theirs = pair
  batch = batch_of(found)
  batch["decoder_loss_weights"] = (batch["decoder_target_tokens"] != 0).astype(int)
  loss_fn = lambda params: found.model.loss_fn(params, batch, None)[0]  # noqa: E731
  loss, gradients = jax.jit(jax.value_and_grad(loss_fn))(found.params)
  arguments = todays_models.their_arguments(found)
  theirs.zero_grad()
  output = theirs(**arguments).logits
  labels = torch.tensor(todays_models.pad(TARGETS))
  weights = torch.tensor(todays_models.pad([[1] * len(row) for row in TARGETS]))
  losses = torch.nn.functional.cross_entropy(
    output.flatten(0, 1), labels.flatten(), reduction="none"
  )
  expected = (losses * weights.flatten()).sum()
  expected.backward()
  np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
  flat = {
    f"target/{'/'.join(key.key for key in path)}": as_stored_array(np.asarray(x))
    for path, x in jax.tree_util.tree_leaves_with_path(gradients)
  }
  _, ours = folder.make_config_and_weights(
    flat, found.settings.network, found.settings.source_config
  )
  # Transformers saves T5Gemma 2 under shorter names.
  named = theirs.named_parameters()
  parameters = {name.replace("encoder.text_model.", "encoder."): x for name, x in named}
  for name, gradient in ours.items():
    want = parameters[name].grad.numpy()
    atol = 1e-4 * max(1.0, float(np.abs(want).max()))
    np.testing.assert_allclose(gradient.get(), want, rtol=0, atol=atol, err_msg=name)


def test_a_folder_that_is_converted_and_back_has_the_same_tensors_and_loads_without_a_warning(
  pair, tmp_path
):
  found, theirs = pair
  checkpoint = convert(found.path, tmp_path / "t5x", "t5x")
  back = convert(checkpoint, tmp_path / "back", "hf")
  before, after = (load_file(path / "model.safetensors") for path in (found.path, back))
  text = {name for name in before if not IMAGES.search(name)}
  assert text == after.keys()
  for name in text:
    np.testing.assert_array_equal(after[name], before[name], err_msg=name)
  with captured_log() as log:
    again = type(theirs).from_pretrained(back, attn_implementation="eager")
  if text == before.keys():
    assert log.getvalue() == ""
  else:
    rows = [line for line in log.getvalue().splitlines() if line.startswith("model.")]
    assert all(IMAGES.search(line) and "MISSING" in line for line in rows)
  arguments = todays_models.their_arguments(found)
  with torch.no_grad():
    torch.testing.assert_close(again(**arguments).logits, theirs(**arguments).logits)
  ours, config = (
    entries_of(json.loads(model.config.to_json_string())) for model in (again, theirs)
  )
  assert {k: x for k, x in ours.items() if k in config} == config


def entries_of(config, prefix=""):
  """Returns the entries of a config.json, with those of its stacks, but for those that may differ."""
  ignored = ("architectures", "transformers_version", "_name_or_path", "dtype")
  found = {}
  for name, value in config.items():
    if name in ("encoder", "decoder"):
      found |= entries_of(value, f"{name}.")
    elif name not in ignored:
      found[prefix + name] = value
  return found


@contextlib.contextmanager
def captured_log():
  stream = io.StringIO()
  handler = logging.StreamHandler(stream)
  logger = logging.getLogger("transformers")
  logger.addHandler(handler)
  try:
    yield stream
  finally:
    logger.removeHandler(handler)


def test_padding_and_rows_are_longer_than_the_windows():
  assert min(map(len, [*INPUTS, *TARGETS])) > 5
  assert max(map(len, INPUTS)) < LENGTH


def test_the_text_of_a_multimodal_gemma_3_is_converted(tmp_path, capsys):
  text = todays_models.SIZES | {"sliding_window": 4, "rope_parameters": todays_models.ROPES}
  vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
  vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
  config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
  model = transformers.Gemma3ForConditionalGeneration(config).eval()
  todays_models.fill(model)
  model.save_pretrained(tmp_path / "hf")
  checkpoint = convert(tmp_path / "hf", tmp_path / "t5x", "t5x")
  back = convert(checkpoint, tmp_path / "back", "hf")
  assert capsys.readouterr().out.count("by Transformers") == 2  # which compares the logits
  loaded = transformers.AutoModelForCausalLM.from_pretrained(back)
  assert type(loaded).__name__ == "Gemma3ForCausalLM"


def test_an_encoder_without_its_decoder_is_written(tmp_path, capsys):
  todays_models.save("t5gemma with a larger encoder", tmp_path / "hf")
  convert(tmp_path / "hf", tmp_path / "encoder", "hf", encoder_only=True)
  assert "by Transformers" in capsys.readouterr().out
  config = json.loads((tmp_path / "encoder/config.json").read_text())
  assert config["architectures"] == ["T5GemmaEncoderModel"]
