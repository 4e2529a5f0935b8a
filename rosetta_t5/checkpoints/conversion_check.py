"""Whether a conversion kept the model: both sides make the same logits of real text."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from rosetta_t5.checkpoints import plain_forward
from rosetta_t5.checkpoints.layouts import plain_tree
from rosetta_t5.checkpoints.lazy_arrays import StoredArray

TOLERANCE = 1e-4
_BYTE_OFFSET = 3  # ByT5's: ids 0 to 2 are padding, end and unknown
# Herman Melville, Moby-Dick (1851).
_INPUT = (
  "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my "
  "purse, and nothing particular to interest me on shore, I thought I would sail about a little"
)
_TARGET = "and see the watery part of the world. It is a way I have of driving off the spleen"
# Beyond this PyTorch would need more memory than a conversion should.
_TORCH_BYTES = 4_000_000_000


class ConversionError(RuntimeError):
  """What was written is not the model that was read."""


def text_tokens(
  vocabulary_size: int, tokenizer: str | os.PathLike[str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """Returns a sentence as token ids [1, S] and its continuation shifted right [1, T].

  Args:
    vocabulary_size: ids stay below it.
    tokenizer: a folder with spiece.model, or such a file; without one, the text's bytes are taken.
  """
  file = _sentencepiece_file(tokenizer)
  if file is not None:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=os.fspath(file))
    inputs, targets = processor.encode(_INPUT), processor.encode(_TARGET)
  else:
    inputs, targets = ([byte + _BYTE_OFFSET for byte in t.encode()] for t in (_INPUT, _TARGET))
  # Small vocabularies, as in tests, have fewer ids than bytes.
  first = min(_BYTE_OFFSET, vocabulary_size - 1)
  inputs, targets = (
    [first + (token - first) % (vocabulary_size - first) for token in tokens]
    for tokens in (inputs, targets)
  )
  return np.array([[*inputs, 1]]), np.array([[0, *targets]])


def _sentencepiece_file(tokenizer: str | os.PathLike[str] | None) -> epath.Path | None:
  if tokenizer is None:
    return None
  given = epath.Path(tokenizer)
  file = given / "spiece.model" if given.is_dir() else given
  return file if file.exists() and file.suffix == ".model" else None


def outputs(
  arrays: Mapping[str, StoredArray],
  tokens: tuple[np.ndarray, np.ndarray],
  activations: tuple[str, ...],
) -> np.ndarray:
  """Returns the logits of a checkpoint's model; for an encoder alone, its encoded inputs."""
  plain = plain_tree(arrays)
  inputs_1S, targets_1T = tokens
  if not any(name.startswith("target/decoder/") for name in plain):
    return plain_forward.encode(plain, inputs_1S, activations)
  has_encoder = any(name.startswith("target/encoder/") for name in plain)
  return plain_forward.logits(plain, inputs_1S if has_encoder else None, targets_1T, activations)


def compare(name: str, before: np.ndarray, after: np.ndarray, dtype: Any) -> float:
  """Returns the largest difference between two sides' outputs.

  Args:
    name: what the second side was computed with, for the message.
    before: the source's.
    after: the destination's.
    dtype: of the stored parameters; the tolerance is for float32 and scales with the outputs.

  Raises:
    ConversionError: they differ by more than the tolerance.
  """
  if before.shape != after.shape:
    raise ConversionError(
      f"{name}: outputs of shape {after.shape}, but the source's: {before.shape}"
    )
  difference = float(np.max(np.abs(before - after)))
  # float32 sums in another order differ in the last bits, which are larger in larger logits.
  limit = TOLERANCE * max(1.0, float(np.max(np.abs(before))) / 10)
  if not difference <= limit:
    raise ConversionError(
      f"the logits of real text differ by {difference:.2e} (at most {limit:.0e}) between the source "
      f"and what was written, computed with {name} in {np.dtype(dtype).name}: nothing was kept"
    )
  return difference


def transformers_outputs(
  folder: str | os.PathLike[str], tokens: tuple[np.ndarray, np.ndarray], nbytes: int
) -> np.ndarray | None:
  """Returns what Transformers and PyTorch make of a folder; None if they are missing or it is large."""
  if nbytes > _TORCH_BYTES or not all(map(importlib.util.find_spec, ("torch", "transformers"))):
    return None
  import torch
  import transformers

  config = transformers.AutoConfig.from_pretrained(os.fspath(folder))
  cls = getattr(transformers, config.architectures[0])
  model = cls.from_pretrained(os.fspath(folder), dtype=torch.float32).eval()
  inputs_1S, targets_1T = (torch.tensor(part) for part in tokens)
  with torch.no_grad():
    if not config.is_encoder_decoder:
      encoded: np.ndarray = model(input_ids=inputs_1S).last_hidden_state.numpy()
      return encoded
    logits: np.ndarray = model(input_ids=inputs_1S, decoder_input_ids=targets_1T).logits.numpy()
    return logits
