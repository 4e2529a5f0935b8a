"""Whether a conversion kept the model: both sides make the same logits of real text."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.arrays.tree_layouts import to_plain_tree
from rosetta_t5.checkpoints.formats.hugging_face import t5_reader
from rosetta_t5.checkpoints.formats.hugging_face.gpt_names import EMBEDDING as DECODER_EMBEDDING
from rosetta_t5.checkpoints.formats.hugging_face.gpt_names import POSITIONS
from rosetta_t5.checkpoints.formats.hugging_face.t5_names import EMBEDDING
from rosetta_t5.checkpoints.reading import read_arrays
from rosetta_t5.conversion import numpy_gpt, numpy_t5
from rosetta_t5.conversion.model_facts import ModelFacts, is_gpt, read_facts
from rosetta_t5.conversion.sample_text import text_tokens
from rosetta_t5.conversion.transformers_reference import can_run_transformers, transformers_outputs

Arrays = Mapping[str, StoredArray]
# The encoder's inputs [1, S], and the targets shifted right [1, T].
Tokens = tuple[np.ndarray, np.ndarray]
# Outputs, computed in float32 or float64.
Outputs = Callable[[Any], np.ndarray]

TOLERANCE = 1e-4


class ConversionError(RuntimeError):
  """What was written is not the model that was read."""


def check(
  source: Arrays,
  folder: str | os.PathLike[str],
  facts: ModelFacts,
  tokenizer: str | os.PathLike[str] | None,
  say: Callable[[str], None],
) -> None:
  """Raises ConversionError unless what was written makes the source's logits of real text.

  Args:
    source: the source's arrays.
    folder: what was written, of any layout.
    facts: of the source's model.
    tokenizer: where the tokenizer's files are, for the text.
    say: is told the differences.
  """
  written = read_arrays(folder)
  if not _has_plain_forward(source, facts):
    count = compare_arrays(source, written)
    say(f"both sides read again: all {count} parameters are equal (no forward pass compared)")
    return
  is_theirs = t5_reader.is_hugging_face(folder)
  told = read_facts(folder, written) if is_theirs else facts
  tokens = _tokens(to_plain_tree(source), facts, tokenizer)
  before = functools.cache(lambda dtype: outputs(source, tokens, facts, dtype))
  after = functools.partial(outputs, written, tokens, told)
  say(compare("both sides read again", before, after, facts.ids_are_shifted))
  if not is_theirs:
    return
  params = sum(array.size for array in written.values())
  if not can_run_transformers(params, np.float32):
    say("PyTorch's Transformers is not installed, or the model is large: not compared with it")
    return
  theirs = functools.partial(transformers_outputs, folder, tokens, told)
  exactly = can_run_transformers(params, np.float64)
  say(compare("by Transformers", before, theirs, facts.ids_are_shifted, exactly))


def _has_plain_forward(arrays: Arrays, facts: ModelFacts) -> bool:
  if any(name.endswith("relpos_bias/rel_embedding") for name in to_plain_tree(arrays)):
    return True
  return facts.gpt is not None and is_gpt(arrays)


def compare_arrays(before: Arrays, after: Arrays) -> int:
  """Returns how many parameters two checkpoints have; ConversionError if they are not the same.

  The trees may differ: layers apart or stacked.
  """
  ours, theirs = to_plain_tree(before), to_plain_tree(after)
  wrong = sorted(ours.keys() ^ theirs.keys()) or [
    name for name in ours if not np.array_equal(ours[name].get(), theirs[name].get())
  ]
  if wrong:
    raise ConversionError(
      f"{len(wrong)} parameters are not what was read, {wrong[0]} first: nothing was kept"
    )
  return len(ours)


def _tokens(arrays: Arrays, facts: ModelFacts, tokenizer: str | os.PathLike[str] | None) -> Tokens:
  table = arrays.get(EMBEDDING) or arrays[DECODER_EMBEDDING]
  inputs_1S, targets_1T = text_tokens(table.shape[0], tokenizer)
  if facts.gpt is None:
    return inputs_1S, targets_1T
  # One text, as long as there are places, so that windows of local layers are left behind.
  whole = [[0, *inputs_1S[0, :-1], *targets_1T[0, 1:]]]
  return inputs_1S, np.array(whole)[:, : arrays[POSITIONS].shape[0]]


def outputs(arrays: Arrays, tokens: Tokens, facts: ModelFacts, dtype: Any) -> np.ndarray:
  """Returns the logits of a checkpoint's model; for an encoder alone, its encoded inputs.

  Args:
    arrays: the checkpoint's.
    tokens: of the encoder and of the decoder.
    facts: of the model.
    dtype: to compute in, float32 or float64.
  """
  # Not `astype`, which would read what is on disk, and not round to the array's own dtype first.
  plain = {
    name: StoredArray(array.shape, dtype, array.read, array.sliceable)
    for name, array in to_plain_tree(arrays).items()
  }
  inputs_1S, targets_1T = tokens
  if facts.gpt is not None:
    return numpy_gpt.logits(plain, facts.gpt, targets_1T)
  if not any(name.startswith("target/decoder/") for name in plain):
    return numpy_t5.encode(plain, inputs_1S, facts.activations)
  has_encoder = any(name.startswith("target/encoder/") for name in plain)
  encoded = inputs_1S if has_encoder else None
  return numpy_t5.logits(plain, encoded, targets_1T, facts.activations)


def compare(
  name: str,
  before: Outputs,
  after: Outputs,
  may_add_row: bool = False,
  may_use_float64: bool = True,
) -> str:
  """Returns by how much two sides' outputs differ, as a sentence.

  Two implementations add float32 numbers in another order, which sharp attention makes much of; so
  where they differ by too much in float32, float64 decides.

  Args:
    name: how the second was computed.
    before: computes the source's.
    after: computes the destination's.
    may_add_row: whether the destination's vocabulary may end with tokens that the source's lacks.
    may_use_float64: whether there is memory for it.

  Raises:
    ConversionError: they differ by more than the tolerance.
  """
  differences: list[str] = []
  for dtype in (np.float32, np.float64) if may_use_float64 else (np.float32,):
    one, other = before(dtype), after(dtype)
    other = other[..., : one.shape[-1]] if may_add_row else other
    if one.shape != other.shape:
      raise ConversionError(f"{name}: shape {other.shape}, but the source's: {one.shape}")
    difference = float(np.max(np.abs(one - other)))
    # Last bits are larger in larger logits.
    limit = TOLERANCE * max(1.0, float(np.max(np.abs(one))) / 10)
    differences.append(f"{difference:.1e} in {np.dtype(dtype).name}")
    if difference <= limit:
      return f"logits of real text, {name}: largest difference {', '.join(differences)}"
  raise ConversionError(
    f"the logits of real text differ by {', '.join(differences)} (at most {limit:.0e}) between the "
    f"source and what was written, {name}: nothing was kept"
  )
