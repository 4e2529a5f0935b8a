"""Trained vectors that precede the inputs: numbers equal to those of PEFT's prompt tuning.

`peft_prompts.py` has the models and records the logits.
"""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import peft_prompts
import pytest
import todays_models
from flax.traverse_util import flatten_dict
from peft_prompts import LENGTH, MODELS, PROMPT_LENGTH, RECORDED
from safetensors.numpy import save_file
from scalable_trees import scalable
from test_context import loss_and_gradients, packed_batch
from tiny_models import DECODER_ONLY, GPT, T5_1_1, assert_close, make_decoder_only_model, make_model
from transformers_families import draw

from rosetta_t5.decoding import temperature_sample
from rosetta_t5.networks.config import TransformerConfig
from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.parallel import PjitPartitioner

TARGETS = jnp.asarray(peft_prompts.targets(), jnp.int32)


@functools.cache
def recorded(name):
  return json.loads(RECORDED.read_text())["models"][name]


@pytest.fixture(params=MODELS)
def found(request, tmp_path):
  """Returns the model with a prompt: `model`, `params`, `name`, and `inputs`, its batch."""
  name, facts = request.param, recorded(request.param)
  drawn = {weight: draw(weight, shape) for weight, shape in facts["shapes"].items()}
  save_file(drawn, tmp_path / "model.safetensors")
  (tmp_path / "config.json").write_text(json.dumps(facts["config"]))
  model = todays_models.read(tmp_path)
  model.name, is_decoder = name, model.settings.is_decoder
  model.model.module = with_config(model, prompt_length=PROMPT_LENGTH)
  side = "decoder" if is_decoder else "encoder"
  vectors = jnp.asarray(peft_prompts.prompt())
  stack = {**model.params[side], "prompt": {"prompt": {"prompt": vectors}}}
  model.params = {**model.params, side: stack}
  tokens = jnp.asarray(peft_prompts.tokens(), jnp.int32)
  shifted = jnp.where(tokens == 0, 0, tokens + model.shift)
  model.inputs = {"decoder_input_tokens": shifted, "decoder_target_tokens": shifted}
  if not is_decoder:
    model.inputs = {"encoder_input_tokens": tokens}
    model.inputs |= dict.fromkeys(("decoder_input_tokens", "decoder_target_tokens"), TARGETS)
  return model


def with_config(found, **changes):
  config = dataclasses.replace(found.model.network_config, **changes)
  return found.model.module.clone(config=config)


def logits(found, **changes):
  module = with_config(found, padding_never_follows=False, **changes)

  def run(params):
    return module.apply({"params": params}, **found.inputs, enable_dropout=False)

  computed = jax.jit(run)(found.params)
  assert computed.shape[1] == LENGTH
  return np.asarray(computed)[..., found.shift : found.shift + peft_prompts.VOCAB]


def check(found, computed, atol=1e-4):
  is_real = np.asarray(found.inputs["decoder_target_tokens"] != 0)[..., None]
  expected = np.array(recorded(found.name)["every fifth logit"])
  np.testing.assert_allclose(computed[..., ::5] * is_real, expected * is_real, rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [{}, {"transpose_batch_sequence": True, "remat_policy": "full"}, {"attention_kernel": "flash"}],
)
def test_logits_equal_those_of_peft(found, changes):
  check(found, logits(found, **changes))


@pytest.mark.slow
def test_the_vectors_have_the_name_axes_and_initial_values_of_t5x_s_prompt_tuning(found):
  initial = with_config(found).init(jax.random.PRNGKey(0), **found.inputs, enable_dropout=False)
  side = "decoder" if found.settings.is_decoder else "encoder"
  params = flatten_dict(initial["params"], sep="/")
  assert [name for name in params if "prompt" in name] == [f"{side}/prompt/prompt/prompt"]
  vectors = params[f"{side}/prompt/prompt/prompt"]
  assert vectors.shape == (PROMPT_LENGTH, 32)
  assert 0 <= vectors.min() < 0.1
  assert 0.4 < vectors.max() < 0.5
  axes = flatten_dict(initial["params_axes"], sep="/")[f"{side}/prompt/prompt/prompt_axes"]
  assert axes.names == ("prompt", "prompt_embed")


@pytest.mark.slow
@pytest.mark.parametrize(
  "found",
  [pytest.param(x, marks=[pytest.mark.slow] * (x not in ("t5", "gemma3"))) for x in MODELS],
  indirect=True,
)
def test_greedy_predictions_are_those_of_whole_sequences(found):
  model, starts = found.model, [0, 0]
  model._decode_fn = temperature_sample
  batch = dict(found.inputs, decoder_input_tokens=jnp.zeros_like(TARGETS))
  if found.settings.is_decoder:
    # The prompts, after the start token, have different lengths.
    starts = [6, 3]
    is_prompt = jnp.arange(LENGTH)[None] <= jnp.array(starts)[:, None]
    shifted = jnp.pad(found.inputs["decoder_input_tokens"], ((0, 0), (1, 0)))[:, :-1]
    batch = {"decoder_causal_attention": is_prompt.astype(jnp.int32)}
    batch["decoder_input_tokens"] = jnp.where(is_prompt, shifted, 0)
  check_greedy(model, found.params, batch, starts)


@pytest.mark.slow
def test_greedy_predictions_with_a_relative_bias_are_those_of_whole_sequences():
  config = dataclasses.replace(DECODER_ONLY, prompt_length=PROMPT_LENGTH)
  model = make_decoder_only_model(config, decode_fn=temperature_sample)
  starts = [6, 3]
  is_prompt = jnp.arange(LENGTH)[None] <= jnp.array(starts)[:, None]
  batch = {"decoder_causal_attention": is_prompt.astype(jnp.int32)}
  batch["decoder_input_tokens"] = jnp.where(is_prompt, TARGETS.at[:, 0].set(0), 0)
  shapes = {name: x.shape for name, x in batch.items()}
  params = model.get_initial_variables(jax.random.PRNGKey(0), shapes)["params"]
  check_greedy(model, params, batch, starts)


def check_greedy(model, params, batch, starts):
  """Compares five tokens after prompts of `starts` tokens with the likeliest of whole sequences."""
  greedy = {"topk": 1, "max_decode_steps": 5}
  predict = functools.partial(model.predict_batch_with_aux, decoder_params=greedy)
  decodes = np.asarray(jax.jit(lambda params: predict(params, batch)[0])(params))
  for row, start in enumerate(starts):
    prompt = np.asarray(batch["decoder_input_tokens"][row])[1 : start + 1]
    targets = np.concatenate([prompt, decodes[row][:5]])[None]
    whole = {"decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1]}
    whole |= {n: x[row : row + 1] for n, x in batch.items() if n.startswith("encoder")}
    whole["decoder_target_tokens"] = np.ones_like(targets)
    whole = {name: jnp.asarray(x, jnp.int32) for name, x in whole.items()}
    expected = model.module.apply({"params": params}, **whole, enable_dropout=False)
    assert np.argmax(expected[0, start:], -1).tolist() == decodes[row][:5].tolist()


def test_packed_rows_are_refused(found):
  side = "decoder" if found.settings.is_decoder else "encoder"
  packed = {f"{side}_segment_ids": jnp.ones_like(TARGETS)}
  with pytest.raises(
    ValueError, match=r"prompt_length = 5\) does not support packed.*pack = False"
  ):
    found.model.module.apply({"params": found.params}, **found.inputs, **packed)


CONFIGS = {"T5": T5_1_1, "GPT": GPT.replace(max_length=24), "scanned": scalable(T5_1_1)}


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "GPT")) for n in CONFIGS]
)
def test_rows_that_are_split_over_devices_have_one_device_s_loss_and_gradients(name):
  config = dataclasses.replace(CONFIGS[name], prompt_length=8, attention_kernel="flash")
  is_decoder = isinstance(config, TransformerConfig)
  sides = ["decoder"] if is_decoder else ["encoder", "decoder"]
  batch = {n: x for n, x in packed_batch(sides).items() if "segment" not in n}
  batch = {n: x for n, x in batch.items() if "positions" not in n}
  make = make_decoder_only_model if is_decoder else lambda cfg: make_model(Transformer(cfg))
  model = make(config)
  initial = make(dataclasses.replace(config, attention_kernel="xla"))
  shapes = {n: x.shape for n, x in batch.items()}
  params = initial.get_initial_variables(jax.random.PRNGKey(0), shapes)["params"]
  partitioner = PjitPartitioner(mesh={"data": 2, "context": 2, "tensor": 2})
  want = loss_and_gradients(model, params, batch)
  assert_close(loss_and_gradients(model, params, batch, partitioner), want, 1e-5)
  model = make(dataclasses.replace(config, prompt_length=3))
  with pytest.raises(ValueError, match="prompt_length must be a multiple of the 2 devices"):
    loss_and_gradients(model, params, batch, partitioner)
