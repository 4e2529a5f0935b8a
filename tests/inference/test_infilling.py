"""Blanks are filled where they are, and text that cannot be filled is refused."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rosetta_t5.inference.text_inference import blank_filler, parse_spans

TEXT = [
  f"Return the {n} of the object {n + 1} or raise an error if {n * n} is it." for n in range(900)
]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Any:
  from rosetta_t5.data.tensorflow_import import import_seqio
  from rosetta_t5.data.vocabularies.sentencepiece_models import train_sentencepiece

  path = tmp_path_factory.mktemp("vocabulary") / "pieces.model"
  path.write_bytes(train_sentencepiece(TEXT, vocab_size=100))
  return import_seqio().SentencePieceVocabulary(str(path), extra_ids=100)


def model_of(vocabulary: Any) -> Any:
  from rosetta_t5.models import EncoderDecoderModel
  from rosetta_t5.networks.transformer import T5Config, Transformer

  sizes = {"emb_dim": 16, "num_heads": 2, "head_dim": 8, "mlp_dim": 16}
  layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
  network = Transformer(T5Config(vocab_size=256, dropout_rate=0.0, **sizes, **layers))
  return EncoderDecoderModel(network, vocabulary, vocabulary, optimizer_def=None)


@pytest.fixture(scope="module")
def fill(vocabulary: Any) -> Callable[[str], str]:
  model = model_of(vocabulary)
  shapes = {"encoder_input_tokens": (1, 48), "decoder_input_tokens": (1, 16)}
  init = jax.jit(lambda key: model.get_initial_variables(key, shapes)["params"])
  return blank_filler(model, init(jax.random.PRNGKey(0)), 48)


def test_spans_follow_their_sentinels_up_to_the_end_token(vocabulary: Any) -> None:
  name, other = vocabulary.encode("object"), vocabulary.encode("raise an error")
  decode = np.array([199, *name, 198, *other, 1, *name, 0])
  assert parse_spans(vocabulary, decode) == {199: "object", 198: "raise an error"}


def test_text_before_the_first_sentinel_is_ignored(vocabulary: Any) -> None:
  decode = np.array([*vocabulary.encode("object"), 198, *vocabulary.encode("error")])
  assert parse_spans(vocabulary, decode) == {198: "error"}


@pytest.mark.slow
def test_blanks_are_filled_where_they_are(fill: Callable[[str], str]) -> None:
  filled = fill("Return the ____ of it. ____ an ___")
  assert filled.startswith("Return the [")
  assert filled.count("[") == 3
  assert "] of it. [" in filled
  assert "] an [" in filled


def test_each_blank_gets_the_span_of_its_sentinel(vocabulary: Any) -> None:
  seen = []

  def predict(params: Any, batch: Any, **options: Any) -> Any:
    jax.debug.callback(lambda x: seen.extend(x[0].tolist()), batch["encoder_input_tokens"])
    target = [198, *vocabulary.encode("object"), 199, *vocabulary.encode("error"), 1]
    return jnp.array([target]), {}

  model = types.SimpleNamespace(
    input_vocabulary=vocabulary, output_vocabulary=vocabulary, predict_batch_with_aux=predict
  )
  fill = blank_filler(model, None, 48)
  assert fill("the ____ of an ____ is") == "the [error] of an [object] is"
  jax.effects_barrier()
  encode = vocabulary.encode
  text = [*encode("the"), 199, *encode("of an"), 198, *encode("is"), 1]
  assert seen == text + [0] * (48 - len(text))


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("no blank at all", "There is no blank to fill: write ____ where words are missing"),
    ("____ " * 101, "must be at most 100, the extra_ids of the model's vocabulary, got 101"),
    (
      "____" + " object" * 60,
      r"must have fewer than 48 tokens, the length of the model's inputs, got \d+",
    ),
  ],
)
def test_text_that_cannot_be_filled_is_refused(
  fill: Callable[[str], str], text: str, message: str
) -> None:
  with pytest.raises(ValueError, match=message):
    fill(text)
