"""Fills the blanks in sentences with a model that was trained by span corruption."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rosetta_t5.data.vocabularies.sentencepiece_models import sentinel_ids
from rosetta_t5.inference.expert_capacity import notes_on_tokens_left_behind

BLANK = "____"
_BLANKS = re.compile(r"_{3,}")
_BEAMS = 4
_TARGETS_LENGTH = 32  # The number of tokens for all blanks together, including their sentinels.


class BlankFiller:
  """Fills blanks with a model's best prediction, which is compiled at the first call.

  Attributes:
    notes: what to know about the last prediction.
  """

  def __init__(self, model: Any, params: Any, input_length: int):
    """Prepares the prediction.

    Args:
      model: an encoder-decoder model, trained by span corruption.
      params: its parameters.
      input_length: the length that inputs are padded to.
    """
    self._model, self._params, self._input_length = model, params, input_length
    self.notes: list[str] = []
    self._predict = jax.jit(
      functools.partial(model.predict_batch_with_aux, num_decodes=_BEAMS, return_all_decodes=False)
    )

  def __call__(self, sentences: Sequence[str]) -> list[str]:
    """Returns the sentences with "[prediction]" in place of each blank.

    A blank is a run of three or more underscores. All sentences form one input, because models that
    were trained by span corruption have only seen full inputs.

    Raises:
      ValueError: there is no blank; or there are more blanks than the vocabulary has sentinels; or
        the sentences do not fit into one input.
    """
    vocabulary = self._model.input_vocabulary
    sentinels = sentinel_ids(vocabulary)
    tokens: list[int] = []
    count = 0
    for sentence in sentences:
      first, *others = (part.strip() for part in _BLANKS.split(sentence))
      tokens += vocabulary.encode(first)
      for part in others:
        tokens += [*sentinels[count : count + 1], *vocabulary.encode(part)]
        count += 1
    if not count:
      raise ValueError(f"There is no blank to fill: write {BLANK} where words are missing")
    if count > len(sentinels):
      raise ValueError(
        f"The number of blanks must be at most {len(sentinels)}, the extra_ids of the model's "
        f"vocabulary, got {count}: write fewer blanks, or use a vocabulary with more extra_ids"
      )
    if len(tokens) >= self._input_length:
      raise ValueError(
        f"The text must have fewer than {self._input_length} tokens, the length of the model's "
        f"inputs, got {len(tokens)}: write less text"
      )
    spans = self._predict_spans([*tokens, vocabulary.eos_id])
    predictions = (spans.get(sentinel, "") for sentinel in sentinels)
    return [_BLANKS.sub(lambda _: f"[{next(predictions)}]", sentence) for sentence in sentences]

  def _predict_spans(self, tokens: Sequence[int]) -> dict[int, str]:
    inputs_BS = np.zeros((1, self._input_length), np.int32)
    inputs_BS[0, : len(tokens)] = tokens
    batch = {
      "encoder_input_tokens": inputs_BS,
      "decoder_input_tokens": np.zeros((1, _TARGETS_LENGTH), np.int32),
    }
    decodes_BT, aux = jax.device_get(self._predict(self._params, batch))
    self.notes = list(notes_on_tokens_left_behind(aux))
    return parse_spans(self._model.output_vocabulary, decodes_BT[0])


def parse_spans(vocabulary: Any, target: np.ndarray) -> dict[int, str]:
  """Returns the text that follows each sentinel in a target, by the sentinel's id."""
  sentinels = {*sentinel_ids(vocabulary)}
  spans: dict[int, list[int]] = {}
  span: list[int] = []  # Tokens before the first sentinel belong to no blank and are ignored.
  for token in map(int, target):
    if token in (0, vocabulary.eos_id):
      break
    if token in sentinels:
      span = spans.setdefault(token, [])
    else:
      span.append(token)
  return {sentinel: vocabulary.decode(tokens).strip() for sentinel, tokens in spans.items()}
