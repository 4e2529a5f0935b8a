"""Models, modules and decode functions that were written for T5X, and rely on how T5X calls them."""

from __future__ import annotations

import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rosetta_t5.models import DecoderOnlyModel, EncoderDecoderModel

LOGITS = jnp.log(jnp.array([[[0.1, 0.2, 0.7]], [[0.1, 0.8, 0.1]]]))
ONES = jnp.ones((2, 3), jnp.int32)


class RecordingModule:
  """Not a linen module: it has T5X's three methods, and records how they are called."""

  def __init__(self):
    self.calls = []

  def init(self, rng, *tokens, **options):
    self.calls.append(("init", len(tokens), options))
    return {"params": {}}

  def apply(self, variables, *args, method=None, **options):
    name = getattr(method, "__name__", "__call__")
    self.calls.append((name, len(args), options))
    if name == "encode":
      return jnp.zeros((2, 3, 4))
    length = options["decoder_input_tokens"].shape[1] if not args else args[-1].shape[1]
    logits = jnp.broadcast_to(LOGITS, (2, length, 3))
    cache = {"decoder": {"position_embedder": {"position_embedder_index": 0}}}
    return (logits, {"cache": cache}) if options.get("mutable") else logits

  def encode(self):
    raise AssertionError("only passed to apply")

  def decode(self, prefill=False):
    raise AssertionError("only passed to apply")


def without_init(base, **attributes):
  """Returns a model of a subclass whose `__init__` does not call ours."""
  model = type("UsersModel", (base,), {"__init__": lambda self: None})()
  model.module = RecordingModule()
  model._output_vocabulary = types.SimpleNamespace(eos_id=None)
  for name, value in attributes.items():
    setattr(model, name, value)
  return model


def decode_once(**arguments):
  decode_once.given = arguments
  shape = (*arguments["inputs"].shape[:1], arguments["num_decodes"], 3)
  return jnp.ones(shape, jnp.int32), jnp.zeros(shape[:2])


def decode_from_index(initial_index, **arguments):
  return decode_once(initial_index=initial_index, **arguments)


PROMPT = {
  "encoder_input_tokens": ONES,
  "decoder_input_tokens": jnp.array([[0, 2, 2], [0, 2, 0]], jnp.int32),
}


def test_a_module_is_called_with_the_arguments_of_t5x():
  model = without_init(EncoderDecoderModel, _decode_fn=decode_once)
  shapes = dict.fromkeys(PROMPT, (2, 3))
  model.get_initial_variables(jax.random.PRNGKey(0), shapes)
  model.predict_batch({}, PROMPT)
  (_, _, init), (*encode, _), (*create, cache) = model.module.calls
  optional = {
    "encoder_positions",
    "decoder_positions",
    "encoder_segment_ids",
    "decoder_segment_ids",
  }
  assert {name for name, value in init.items() if value is None} == optional
  assert encode == ["encode", 1]
  tokens = {"encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens"}
  assert create == ["__call__", 0]
  assert set(cache) == tokens | {"decode", "enable_dropout", "mutable"}
  # T5X's end token where the vocabulary has none, and no index: the function does not name it.
  assert decode_once.given["eos_id"] == 1
  assert "initial_index" not in decode_once.given


def test_a_decode_function_that_names_initial_index_receives_a_prefilled_cache():
  model = without_init(EncoderDecoderModel, _decode_fn=decode_from_index)
  model.predict_batch_with_aux({}, PROMPT, prompt_with_targets=True)
  name, positional, options = model.module.calls[-1]
  assert (name, positional, options["prefill"]) == ("decode", 0, True)
  np.testing.assert_array_equal(options["decoder_input_tokens"], PROMPT["decoder_input_tokens"])
  given = decode_once.given
  np.testing.assert_array_equal(given["initial_index"], [2, 1])
  embedder = given["cache"]["decoder"]["position_embedder"]
  np.testing.assert_array_equal(embedder["position_embedder_index"], [2, 1])


def test_a_model_whose_module_is_a_mock_pads_with_0():
  """T5X's own tests have such models."""
  assert without_init(EncoderDecoderModel, module=mock.Mock()).pad_id == 0


def test_a_decoder_only_module_is_prefilled_by_keyword():
  model = without_init(DecoderOnlyModel, _decode_fn=decode_once)
  batch = {"decoder_input_tokens": PROMPT["decoder_input_tokens"], "decoder_causal_attention": ONES}
  model.predict_batch({}, batch)
  created, prefilled = model.module.calls
  assert created == ("__call__", 2, {"decode": True, "enable_dropout": False, "mutable": ["cache"]})
  assert prefilled[1] == 0
  np.testing.assert_array_equal(prefilled[2]["prefill_lengths"], [2, 1])


@pytest.mark.parametrize("base", [EncoderDecoderModel, DecoderOnlyModel])
def test_overridden_methods_need_only_the_arguments_of_t5x(base):
  class UsersModel(base):
    def __init__(self):
      pass

    def _compute_logits(self, params, batch, dropout_rng=None):
      return jnp.broadcast_to(LOGITS, (2, 3, 3))

    def _compute_metrics(self, *, logits, targets, mask, loss, z_loss, segment_ids):
      return {"loss": loss, "features": set(segment_ids)}

  batch = {"decoder_target_tokens": jnp.full((2, 3), 2.0)}  # T5X accepts float targets.
  batch["decoder_loss_weights"] = ONES
  loss, metrics = UsersModel().eval_fn({}, batch)
  expected = -3 * np.log([0.7, 0.1])
  np.testing.assert_allclose(loss, expected.sum(), rtol=1e-6)
  assert metrics["features"] == {"decoder_target_tokens"}
  np.testing.assert_allclose(UsersModel().score_batch({}, batch), -expected, rtol=1e-6)
