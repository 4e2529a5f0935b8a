"""Sentences with blanks, filled by a model that has learnt by span corruption."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

BLANK = "____"
_BLANKS = re.compile(r"_{3,}")
_BEAMS = 4
_LONGEST_ANSWER = 32  # tokens for all blanks, sentinels included


class BlankFiller:
  """Fills blanks with a model's best guess; compiled at the first call."""

  def __init__(self, model: Any, params: Any, input_length: int):
    """Builds it.

    Args:
      model: an encoder-decoder model, trained by span corruption.
      params: its parameters.
      input_length: tokens that the model's input is padded to.
    """
    self._model, self._params, self._input_length = model, params, input_length
    predict = functools.partial(
      model.predict_batch_with_aux, num_decodes=_BEAMS, return_all_decodes=False
    )
    self._predict = jax.jit(predict)

  def __call__(self, sentences: Sequence[str]) -> list[str]:
    """Returns the sentences with [guess] in place of each blank, three underscores or more.

    All go into one input, for such a model has seen none but full ones.

    Raises:
      ValueError: there is no blank, there are more than the vocabulary has sentinels, or the
        sentences are longer than an input.
    """
    vocabulary = self._model.input_vocabulary
    parts = [[part.strip() for part in _BLANKS.split(sentence)] for sentence in sentences]
    count = sum(len(of_one) - 1 for of_one in parts)
    if not count:
      raise ValueError(f"there is no blank to fill: write {BLANK} where words are missing")
    if count > vocabulary.extra_ids:
      blanks = f"are {count} blanks" if count > 1 else "is 1 blank"
      raise ValueError(
        f"there {blanks}, but the model's vocabulary has {vocabulary.extra_ids} extra ids "
        "to mark them with: fill fewer at a time, with a model whose vocabulary has extra_ids"
      )
    tokens: list[int] = []
    sentinels = iter(range(vocabulary.vocab_size - 1, 0, -1))
    for first, *others in parts:
      tokens += vocabulary.encode(first)
      for part in others:
        tokens += [next(sentinels), *vocabulary.encode(part)]
    if len(tokens) >= self._input_length:
      raise ValueError(
        f"the text has {len(tokens)} tokens and an end, but the model reads {self._input_length}: "
        "write less"
      )
    answers = iter(self._answers([*tokens, vocabulary.eos_id], count))
    return [_BLANKS.sub(lambda _: f"[{next(answers)}]", sentence) for sentence in sentences]

  def _answers(self, tokens: Sequence[int], count: int) -> list[str]:
    inputs_BS = np.zeros((1, self._input_length), np.int32)
    inputs_BS[0, : len(tokens)] = tokens
    batch = {
      "encoder_input_tokens": inputs_BS,
      "decoder_input_tokens": np.zeros((1, _LONGEST_ANSWER), np.int32),
    }
    decodes_BT, _ = self._predict(self._params, batch)
    vocabulary = self._model.output_vocabulary
    answers = answers_of(vocabulary, np.asarray(decodes_BT)[0])
    return [answers.get(vocabulary.vocab_size - 1 - blank, "") for blank in range(count)]


def fill_blanks(model: Any, params: Any, sentences: Sequence[str], input_length: int) -> list[str]:
  """Returns sentences with a model's guesses in place of their blanks; see `BlankFiller`."""
  return BlankFiller(model, params, input_length)(sentences)


def answers_of(vocabulary: Any, decode: np.ndarray) -> dict[int, str]:
  """Returns the text that follows each sentinel of a target, by the sentinel's id."""
  spans: dict[int, list[int]] = {}
  span: list[int] = []  # What comes before the first sentinel belongs to no blank.
  for token in map(int, decode):
    if token in (0, vocabulary.eos_id):
      break
    if token >= vocabulary.vocab_size - vocabulary.extra_ids:
      span = spans.setdefault(token, [])
    else:
      span.append(token)
  return {sentinel: vocabulary.decode(tokens).strip() for sentinel, tokens in spans.items()}
