"""Repetition penalty, repeated n-grams, minimum length and bad words, with Transformers' definitions.

The tokens are compared with those of Transformers' `generate`: live where it is installed, else with the
recorded ones of `transformers_decodes.json`.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers_decodes
from history_model import HistoryModel
from transformers_decodes import CASES, CONFIGS, INPUTS, NEW_TOKENS, RECORDED

from rosetta_t5.checkpoints.formats.hugging_face.families import gpt
from rosetta_t5.checkpoints.formats.hugging_face.folder import read_arrays
from rosetta_t5.decoding import Controls, apply_controls, beam_search, temperature_sample
from rosetta_t5.models import DecoderOnlyModel, EncoderDecoderModel
from rosetta_t5.networks.transformer import DecoderWrapper, T5Config, Transformer, TransformerConfig
from t5x.checkpoints import load_t5x_checkpoint

EOS = 1


@functools.cache
def folders(root):
  for kind in CONFIGS:
    (root / kind).mkdir()
    transformers_decodes.write_folder(root / kind, kind)
  return {kind: root / kind for kind in CONFIGS}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
  return folders(tmp_path_factory.mktemp("models")).__getitem__


def model_of(folder, kind):
  config = CONFIGS[kind]
  if kind == "gpt2":
    vocabulary = types.SimpleNamespace(eos_id=config["eos_token_id"] + 1)
    module = DecoderWrapper(
      TransformerConfig(dropout_rate=0.0, **gpt.network_settings(config, read_arrays(folder)))
    )
    return DecoderOnlyModel(module, vocabulary, None, feature_converter_cls=object)
  sizes = {"emb_dim": 16, "num_heads": 2, "head_dim": 8, "mlp_dim": 24, "dropout_rate": 0.0}
  layers = {"num_encoder_layers": 1, "num_decoder_layers": 1, "mlp_activations": ("relu",)}
  module = Transformer(T5Config(vocab_size=32, logits_via_embedding=True, **sizes, **layers))
  vocabulary = types.SimpleNamespace(eos_id=EOS)
  return EncoderDecoderModel(module, vocabulary, vocabulary, None, feature_converter_cls=object)


def batch_of(kind):
  if kind == "t5":
    rows = len(INPUTS[kind])
    return {
      "encoder_input_tokens": jnp.asarray(INPUTS[kind]),
      "decoder_input_tokens": jnp.zeros((rows, NEW_TOKENS), jnp.int32),
    }
  # Our ids are one higher, and the start token is 0.
  rows = [[0, *(token + 1 for token in prompt[1:])] for prompt in INPUTS[kind]]
  width = max(map(len, rows)) + NEW_TOKENS - 1
  tokens = np.array([row + [0] * (width - len(row)) for row in rows])
  inputs = np.array([[1] * len(row) + [0] * (width - len(row)) for row in rows])
  return {
    "decoder_input_tokens": jnp.asarray(tokens),
    "decoder_causal_attention": jnp.asarray(inputs[:, : max(map(len, rows))]),
  }


def decoded_here(folder, kind, settings, decode_fn=None):
  """Returns the new tokens of each example up to its end, as Transformers' ids."""
  values = dict(settings)
  beams, offset = values.pop("num_beams"), int(kind == "gpt2")
  words = values.pop("bad_words_ids", [])
  values["bad_words_ids"] = [[token + offset for token in word] for word in words]
  model = model_of(folder, kind)
  if beams > 1:
    decode_fn = beam_search
    values |= {"alpha": 0.0, "max_decode_step": NEW_TOKENS}
  model._decode_fn = decode_fn or temperature_sample
  params = jax.tree.map(jnp.asarray, load_t5x_checkpoint(folder)["target"])
  predict = functools.partial(
    model.predict_batch_with_aux, num_decodes=beams, decoder_params=values
  )
  decodes, _ = jax.jit(predict)(params, batch_of(kind))
  end = model.output_vocabulary.eos_id
  rows = [list(map(int, row[:NEW_TOKENS])) for row in decodes]
  rows = [row[: row.index(end) + 1] if end in row else row for row in rows]
  return [[token - offset for token in row] for row in rows]


def names():
  quick = [f"{kind} 1 beams {beams}" for kind in ("t5", "gpt2") for beams in (1, 3)]
  quick.append("t5 ends 2 beams 1")
  compared = [name for name in CASES if name.split(" beams")[0] not in ("t5 0", "gpt2 0")]
  return [pytest.param(n, marks=[] if n in quick else pytest.mark.slow) for n in compared]


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_the_tokens_are_those_of_transformers(name, folder_of):
  kind, settings = CASES[name]
  recorded = json.loads(RECORDED.read_text())
  if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
    assert transformers_decodes.generate(folder_of(kind), kind, settings) == recorded[name]
  assert decoded_here(folder_of(kind), kind, settings) == recorded[name]
  plain = recorded[f"{kind} 0 {name[-7:]}"]
  assert plain != recorded[name], "the settings must change something"


@pytest.mark.parametrize("decode_fn", [temperature_sample, beam_search])
def test_the_token_that_starts_texts_counts_as_one_that_has_occurred(decode_fn):
  start, tokens = 3, jnp.ones((2, 3), jnp.int32)
  sizes = {"emb_dim": 8, "num_heads": 1, "head_dim": 8, "mlp_dim": 8, "dropout_rate": 0.0}
  layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
  module = Transformer(T5Config(vocab_size=6, decoder_start_token_id=start, **sizes, **layers))
  vocabulary = types.SimpleNamespace(eos_id=EOS)
  model = EncoderDecoderModel(module, vocabulary, vocabulary, None, decode_fn)
  params = module.init(jax.random.PRNGKey(0), tokens, tokens, tokens, enable_dropout=False)
  batch = {"encoder_input_tokens": tokens, "decoder_input_tokens": jnp.zeros_like(tokens)}
  # Other tokens than the start token, the end token and these two are tokens 2 and 5.
  once = {"no_repeat_ngram_size": 1, "bad_words_ids": [[0], [4]]}
  options = {"num_decodes": 1, "decoder_params": once | {"min_new_tokens": 3}}
  decodes, _ = model.predict_batch_with_aux(params["params"], batch, **options)
  assert jnp.sort(decodes[:, :2]).tolist() == [[2, 5]] * 2


@pytest.mark.slow
def test_samples_obey_the_same_controls_as_greedy_decoding():
  model = HistoryModel(vocab=9, length=13)
  controls = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[2], [3, 4]]}
  prompts = jnp.zeros((3, 12), jnp.int32).at[1, 1:4].set(jnp.array([5, 6, 5]))

  def decode(**options):
    arguments = (prompts, model.cache(3), model.tokens_to_logits, EOS)
    return jax.jit(lambda: temperature_sample(*arguments, **options)[0])()

  greedy = decode(topk=1, min_new_tokens=9, **controls)
  cold = decode(topk=0, temperature=2e-4, min_new_tokens=9, **controls)
  np.testing.assert_array_equal(cold, greedy)
  assert (decode(topk=1) != greedy).any(axis=(1, 2)).all()


def test_controls_that_are_not_set_add_nothing_to_the_program():
  logits, tokens = jnp.zeros((2, 5)), jnp.zeros((2, 3), jnp.int32)
  unchanged = apply_controls(logits, tokens, jnp.zeros(2, jnp.int32), tokens, EOS, Controls())
  assert unchanged is logits


@pytest.mark.parametrize("word", [[], [9], [3, -1]])
def test_a_bad_word_that_is_not_in_the_vocabulary_is_refused(word):
  model = HistoryModel(vocab=9, length=4)
  arguments = (jnp.zeros((1, 3), jnp.int32), model.cache(1), model.tokens_to_logits, EOS)
  with pytest.raises(ValueError, match=r"list of token ids from 0 to 8, got \["):
    temperature_sample(*arguments, bad_words_ids=[[3], word])
