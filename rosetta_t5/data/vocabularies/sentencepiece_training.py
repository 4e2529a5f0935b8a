"""Trains a SentencePiece vocabulary with T5's special ids."""

from __future__ import annotations

import io
import string
from collections.abc import Iterable, Mapping
from typing import Any

from rosetta_t5.data.vocabularies.sentencepiece_models import T5_IDS
from rosetta_t5.terminal import progress

_SMALL = 1000  # pieces; 256 bytes would be too many of a smaller vocabulary


def lossless_options(vocab_size: int) -> dict[str, str]:
  """Returns SentencePiece's options with which a vocabulary of this size loses no character of its text."""
  if vocab_size < _SMALL:
    return {"character_coverage": "1.0"}
  return {
    "byte_fallback": "true",
    "required_chars": string.digits + string.ascii_letters + string.punctuation,
  }


def train_sentencepiece(
  lines: Iterable[str], vocab_size: int, options: Mapping[str, str] | None = None
) -> bytes:
  """Returns a serialized unigram model of `vocab_size` pieces: 0 padding, 1 end, 2 unknown.

  The same lines give the same model. Extra ids (sentinels) are added when the model is loaded.

  Args:
    lines: texts without line breaks, of at most 4,000 characters.
    vocab_size: the number of pieces.
    options: further options of SentencePiece's trainer, by name.

  Raises:
    ValueError: the text does not have enough different pieces, or SentencePiece refuses an option.
  """
  import sentencepiece

  model = io.BytesIO()
  settings: dict[str, Any] = {
    "model_type": "unigram",
    "vocab_size": vocab_size,
    "num_threads": 2,  # A fixed number, because each thread's sums of scores decide ties.
    "max_sentence_length": 4 * 4000,  # bytes; longer lines are ignored
    "minloglevel": 2,
    **T5_IDS,
  }
  try:
    with progress.bar("training the vocabulary"):
      sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, **{**settings, **(options or {})}
      )
  except (RuntimeError, ValueError) as error:
    reason = str(error).rpartition("] ")[2]  # without the position in SentencePiece's source
    raise ValueError(
      f"No SentencePiece vocabulary of {vocab_size} pieces can be trained on this text: "
      f"{reason or 'there is none.'} Use more text, another size (vocab train --size) or other options"
    ) from None
  return model.getvalue()
