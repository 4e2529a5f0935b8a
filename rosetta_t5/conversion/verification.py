"""Verifies that a conversion kept the model: both checkpoints must compute the same logits."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.arrays.tree_layouts import to_plain_tree
from rosetta_t5.checkpoints.formats.hugging_face import gpt_names, t5_names
from rosetta_t5.checkpoints.formats.hugging_face.folder import is_hugging_face
from rosetta_t5.checkpoints.reading import read_arrays
from rosetta_t5.conversion import numpy_gpt, numpy_t5
from rosetta_t5.conversion.model_facts import ModelFacts, read_facts
from rosetta_t5.conversion.numpy_layers import Arrays
from rosetta_t5.conversion.sample_text import encode_sample_text
from rosetta_t5.conversion.transformers_reference import can_run_transformers, transformers_outputs

# The encoder's inputs [1, S], and the decoder's inputs [1, T].
Tokens = tuple[np.ndarray, np.ndarray]
# Computes a model's outputs in float32 or float64.
ComputeOutputs = Callable[[Any], np.ndarray]

TOLERANCE = 1e-4


class ConversionError(RuntimeError):
  """The model that was written is not the model that was read."""


def check(
  source: Arrays,
  folder: str | os.PathLike[str],
  facts: ModelFacts,
  tokenizer: str | os.PathLike[str] | None,
  report: Callable[[str], None],
) -> None:
  """Checks that the model in a folder computes the source's logits of real text.

  If there is no numpy forward pass for the model, the parameters must be equal.

  Args:
    source: the arrays that were converted.
    folder: what was written, of any layout.
    tokenizer: where the tokenizer's files are; None to encode the text as bytes.
    report: receives the differences.

  Raises:
    ConversionError: the logits or parameters differ.
  """
  written = read_arrays(folder, warn_without_checksums=False)  # this program has just written it
  plain = to_plain_tree(source)
  is_t5 = any(name.endswith("relpos_bias/rel_embedding") for name in plain)
  is_switch = facts.experts.router == "switch" and not facts.experts.normalize_expert_weights
  if not (is_t5 and is_switch) and facts.gpt is None:
    count = compare_arrays(source, written)
    report(f"both checkpoints read again: all {count} parameters are equal (no logits compared)")
    return
  is_transformers_folder = is_hugging_face(folder)
  written_facts = read_facts(folder, written) if is_transformers_folder else facts
  tokens = _make_tokens(plain, facts, tokenizer)
  before = functools.cache(lambda dtype: compute_outputs(source, tokens, facts, dtype))
  after = functools.partial(compute_outputs, written, tokens, written_facts)
  report(compare_outputs("both checkpoints read again", before, after, facts.ids_are_shifted))
  if not is_transformers_folder:
    return
  params = sum(array.size for array in written.values())
  if not can_run_transformers(params, np.float32):
    report("not compared with Transformers on PyTorch: not installed, or the model is too large")
    return
  theirs = functools.partial(transformers_outputs, folder, tokens, written_facts)
  may_use_float64 = can_run_transformers(params, np.float64)
  report(compare_outputs("by Transformers", before, theirs, facts.ids_are_shifted, may_use_float64))


def compare_arrays(before: Arrays, after: Arrays) -> int:
  """Checks that two checkpoints have equal parameters; either may stack its layers.

  Returns:
    The number of parameters.

  Raises:
    ConversionError: names or values differ.
  """
  ours, theirs = to_plain_tree(before), to_plain_tree(after)
  wrong = sorted(ours.keys() ^ theirs.keys()) or [
    name for name in ours if not np.array_equal(ours[name].get(), theirs[name].get())
  ]
  if wrong:
    raise ConversionError(
      f"{len(wrong)} parameters differ between the source and what was written, {wrong[0]} first: "
      "nothing was kept"
    )
  return len(ours)


def _make_tokens(
  arrays: Arrays, facts: ModelFacts, tokenizer: str | os.PathLike[str] | None
) -> Tokens:
  table = arrays.get(t5_names.EMBEDDING) or arrays[gpt_names.EMBEDDING]
  inputs_1S, targets_1T = encode_sample_text(table.shape[0], tokenizer)
  if facts.gpt is None:
    return inputs_1S, targets_1T
  # One long text, cut at the number of positions, because local attention needs more than its window.
  text = [[0, *inputs_1S[0, :-1], *targets_1T[0, 1:]]]
  return inputs_1S, np.array(text)[:, : arrays[gpt_names.POSITIONS].shape[0]]


def compute_outputs(arrays: Arrays, tokens: Tokens, facts: ModelFacts, dtype: Any) -> np.ndarray:
  """Returns the logits of a checkpoint's model, or an encoder's outputs if it has no decoder.

  Args:
    dtype: the dtype to compute in, float32 or float64.
  """
  # Values are converted as they are read; `astype` would first round them to the array's own dtype.
  plain = {
    name: StoredArray(array.shape, dtype, array.read, array.sliceable)
    for name, array in to_plain_tree(arrays).items()
  }
  inputs_1S, targets_1T = tokens
  if facts.gpt is not None:
    return numpy_gpt.compute_logits(plain, facts.gpt, targets_1T)
  if not any(name.startswith("target/decoder/") for name in plain):
    return numpy_t5.encode(plain, inputs_1S, facts.activations, facts.experts)
  has_encoder = any(name.startswith("target/encoder/") for name in plain)
  return numpy_t5.compute_logits(
    plain, inputs_1S if has_encoder else None, targets_1T, facts.activations, facts.experts
  )


def compare_outputs(
  name: str,
  before: ComputeOutputs,
  after: ComputeOutputs,
  may_add_row: bool = False,
  may_use_float64: bool = True,
) -> str:
  """Returns a sentence with the largest difference between the outputs of two models.

  Two implementations add float32 numbers in different orders, which sharp attention amplifies. If the
  outputs differ too much in float32, they are compared again in float64.

  Args:
    name: how the second outputs were computed.
    before: computes the source's outputs.
    after: computes the outputs of what was written.
    may_add_row: whether the second vocabulary may end with tokens that the first one lacks.
    may_use_float64: whether there is enough memory for it.

  Raises:
    ConversionError: the difference exceeds the tolerance.
  """
  differences: list[str] = []
  for dtype in [np.float32, np.float64] if may_use_float64 else [np.float32]:
    expected, actual = before(dtype), after(dtype)
    if may_add_row:
      actual = actual[..., : expected.shape[-1]]
    if actual.shape != expected.shape:
      raise ConversionError(f"{name}: the shape must be {expected.shape}, got {actual.shape}")
    difference = float(np.max(np.abs(expected - actual)))
    # Larger logits have larger rounding errors.
    limit = TOLERANCE * max(1.0, float(np.max(np.abs(expected))) / 10)
    differences.append(f"{difference:.1e} in {dtype.__name__}")
    if difference <= limit:
      return f"logits of real text, {name}: largest difference {', '.join(differences)}"
  raise ConversionError(
    f"the logits of real text differ by {', '.join(differences)} (at most {limit:.0e}) between the "
    f"source and what was written, {name}: nothing was kept"
  )
