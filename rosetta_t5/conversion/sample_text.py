"""The text with which conversions are verified, as token ids."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
from etils import epath

from rosetta_t5.data.vocabularies.sentencepiece_models import load_sentencepiece

_BYTE_OFFSET = 3  # In ByT5's vocabulary, ids 0 to 2 are padding, end and unknown.
# The text is from Herman Melville's Moby-Dick (1851).
_INPUT = (
  "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my "
  "purse, and nothing particular to interest me on shore, I thought I would sail about a little"
)
_TARGET = "and see the watery part of the world. It is a way I have of driving off the spleen"


def encode_sample_text(
  vocabulary_size: int, tokenizer: str | os.PathLike[str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """Returns a sentence as token ids [1, S], and its continuation shifted right [1, T].

  Args:
    vocabulary_size: all ids are below it.
    tokenizer: a .model file, or a folder with spiece.model or with vocab.json and merges.txt. Without
      one, the ids are those of the text's bytes.
  """
  encode = _load_encoder(None if tokenizer is None else epath.Path(tokenizer))
  # Small vocabularies, as in tests, have fewer ids than there are bytes.
  first = min(_BYTE_OFFSET, vocabulary_size - 1)
  inputs, targets = (
    [first + (token - first) % (vocabulary_size - first) for token in encode(text)]
    for text in (_INPUT, _TARGET)
  )
  return np.array([[*inputs, 1]]), np.array([[0, *targets]])


def _load_encoder(tokenizer: epath.Path | None) -> Callable[[str], list[int]]:
  if tokenizer is not None:
    file = tokenizer / "spiece.model" if tokenizer.is_dir() else tokenizer
    if file.exists() and file.suffix == ".model":
      processor = load_sentencepiece(file)
      return lambda text: list(processor.encode(text))
    pieces, merges = tokenizer / "vocab.json", tokenizer / "merges.txt"
    if pieces.exists() and merges.exists():
      from rosetta_t5.data.vocabularies.task_vocabularies import load_tokenizer

      gpt2 = load_tokenizer(os.fspath(pieces), os.fspath(merges))
      return lambda text: [token + 1 for token in gpt2.encode(text).ids]
  return lambda text: [byte + _BYTE_OFFSET for byte in text.encode()]
