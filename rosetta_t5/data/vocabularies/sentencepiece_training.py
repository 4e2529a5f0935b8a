"""Trains a SentencePiece vocabulary with T5's special ids."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rosetta_t5.terminal import progress


def train_sentencepiece(lines: Iterable[str], vocab_size: int) -> bytes:
  """Returns a serialized unigram model of `vocab_size` pieces: 0 padding, 1 end, 2 unknown.

  The same lines give the same model. Extra ids (sentinels) are added when the model is loaded.

  Raises:
    ValueError: the text does not have enough different pieces.
  """
  import sentencepiece

  model = io.BytesIO()
  try:
    with progress.bar("training the vocabulary"):
      sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="unigram",
        vocab_size=vocab_size,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        num_threads=2,  # A fixed number, because each thread's sums of scores decide ties.
        minloglevel=2,
      )
  except RuntimeError as error:
    reason = str(error).rpartition("] ")[2]  # without the position in SentencePiece's source
    raise ValueError(
      f"No SentencePiece vocabulary of {vocab_size} pieces can be trained on this text: "
      f"{reason or 'there is none.'} Use more text or a smaller vocabulary (vocab train --size)."
    ) from None
  return model.getvalue()
