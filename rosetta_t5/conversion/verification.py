"""Verifies that a conversion kept the model.

Transformers is the only independent check: a mistake that reading and writing have in common shows in
nothing else. Without it, this project's network computes the logits of both checkpoints; if the model is
too large for that, its arrays are compared one by one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import numpy as np

from rosetta_t5.checkpoints.arrays import t5_names
from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.arrays.tree_layouts import to_plain_tree
from rosetta_t5.checkpoints.formats.hugging_face import gpt
from rosetta_t5.checkpoints.formats.hugging_face.folder import is_hugging_face
from rosetta_t5.checkpoints.reading import read_arrays
from rosetta_t5.conversion import transformers_reference
from rosetta_t5.conversion.model_facts import ModelFacts, read_facts
from rosetta_t5.conversion.network_outputs import Arrays, Tokens, network_outputs
from rosetta_t5.conversion.sample_text import encode_sample_text

TOLERANCE = 1e-4
# Two implementations may differ by this multiple of the rounding errors of one of them.
_ROUNDING_FACTOR = 10.0
_OF_TRANSFORMERS = (
  "logits of real text, by Transformers {version}: largest difference {difference}. {note}"
)
_INDEPENDENT = "This check shares no code with this project; one text does not show every token"
_OF_NETWORKS = (
  "logits of real text, by this project's network, because {reason}: largest difference {difference}. A "
  "mistake that reading and writing have in common cannot be seen; Transformers and PyTorch would show it"
)
_OF_ARRAYS = (
  "{count} arrays were read again, one by one, and are equal{reason}. Logits were not compared: the settings "
  "of the network, and a mistake that reading and writing have in common, cannot be seen"
)


class ConversionError(RuntimeError):
  """The model that was written is not the model that was read."""


def check(
  source: Arrays,
  path: str | os.PathLike[str],
  folder: str | os.PathLike[str],
  facts: ModelFacts,
  tokenizer: str | os.PathLike[str] | None,
  report: Callable[[str], None],
) -> None:
  """Checks that the model in a folder is the source's.

  Args:
    source: the arrays that were converted.
    path: the checkpoint that they are from.
    folder: what was written, of any layout.
    facts: the facts about the source's model.
    tokenizer: where the tokenizer's files are; None to encode the text as bytes.
    report: receives a sentence about each check.

  Raises:
    ConversionError: the logits or parameters differ.
  """
  written = read_arrays(folder, warn_without_checksums=False)  # this program has just written it
  theirs = next(filter(is_hugging_face, (folder, path)), None)
  params = sum(array.size for name, array in written.items() if name.startswith("target/"))
  reason = transformers_reference.why_not(params)
  if not is_hugging_face(folder):
    count = compare_arrays(source, written)
    if theirs is None or reason or facts.network is None:
      report(_OF_ARRAYS.format(count=count, reason=""))
      return
  elif facts.network is None or not transformers_reference.fits(params):
    count = compare_arrays(source, written, rtol=1e-6)
    report(_OF_ARRAYS.format(count=count, reason=f", because {reason}" if reason else ""))
    return
  tokens = _make_tokens(to_plain_tree(source), facts, tokenizer)
  if theirs is not None and not reason:
    ours = source if is_hugging_face(folder) else written
    _compare_with_transformers(ours, facts, theirs, tokens, report)
    return
  written_facts = read_facts(folder, written)
  before = network_outputs(source, facts, tokens)
  after = network_outputs(written, written_facts, tokens)
  difference, limit = _difference(before, after)
  if difference > limit:
    raise _conversion_error(difference, limit, "by this project's network")
  report(_OF_NETWORKS.format(reason=reason, difference=f"{difference:.1e}"))


def _compare_with_transformers(
  arrays: Arrays,
  facts: ModelFacts,
  folder: str | os.PathLike[str],
  tokens: Tokens,
  report: Callable[[str], None],
) -> None:
  compute = functools.partial(transformers_reference.outputs, folder, tokens, facts)
  ours, theirs = network_outputs(arrays, facts, tokens), compute(np.float32)
  difference, limit = _difference(ours, theirs)
  version = transformers_reference.version()
  text = f"{difference:.1e}"
  if difference > limit:
    # Sharp attention amplifies the rounding errors of float32, in Transformers too.
    exact = compute(np.float64)
    difference, _ = _difference(ours, exact)
    rounding, _ = _difference(theirs, exact)
    text += f" ({rounding:.1e} between Transformers in float32 and in float64)"
    if difference > _ROUNDING_FACTOR * rounding:
      raise _conversion_error(difference, max(limit, rounding), f"by Transformers {version}")
  report(_OF_TRANSFORMERS.format(version=version, difference=text, note=_INDEPENDENT))


def _conversion_error(difference: float, limit: float, name: str) -> ConversionError:
  return ConversionError(
    f"the logits of real text differ by {difference:.1e} (at most {limit:.0e}) between the source and "
    f"what was written, {name}: nothing was kept"
  )


def _difference(expected: np.ndarray, actual: np.ndarray) -> tuple[float, float]:
  """Returns the largest difference of two arrays, and the largest one that rounding explains."""
  # GPT's start token may have become the last one of the second vocabulary.
  actual = actual[..., : expected.shape[-1]]
  if actual.shape != expected.shape:
    raise ConversionError(f"the shape of the logits must be {expected.shape}, got {actual.shape}")
  limit = TOLERANCE * max(1.0, float(np.max(np.abs(expected))) / 10)
  return float(np.max(np.abs(expected - actual))), limit


def compare_arrays(before: Arrays, after: Arrays, rtol: float = 0.0) -> int:
  """Checks that two checkpoints have equal parameters; either may stack its layers.

  Args:
    before: the arrays of one checkpoint.
    after: those of the other one.
    rtol: the largest relative difference; a matrix may have been scaled twice.

  Returns:
    The number of arrays.

  Raises:
    ConversionError: names or values differ.
  """
  ours, theirs = to_plain_tree(before), to_plain_tree(after)
  wrong = sorted(ours.keys() ^ theirs.keys()) or [
    name for name, array in ours.items() if not _are_close(array, theirs[name], rtol)
  ]
  if wrong:
    raise ConversionError(
      f"{len(wrong)} parameters differ between the source and what was written, {wrong[0]} first: "
      "nothing was kept"
    )
  return len(ours)


def _are_close(a: StoredArray, b: StoredArray, rtol: float) -> bool:
  if a.shape != b.shape:
    return False
  rtol = max(rtol, 2.0**-8) if rtol and a.dtype.itemsize == 2 else rtol
  return all(
    np.allclose(a.read(part).astype(np.float64), b.read(part).astype(np.float64), rtol, 0.0)
    for part in a.parts()
  )


def _make_tokens(
  arrays: Arrays, facts: ModelFacts, tokenizer: str | os.PathLike[str] | None
) -> Tokens:
  table = arrays.get(t5_names.EMBEDDING) or arrays[gpt.EMBEDDING]
  inputs_1S, targets_1T = encode_sample_text(table.shape[0], tokenizer)
  if not facts.is_gpt:
    return inputs_1S, targets_1T
  # One long text, cut at the number of positions, because local attention needs more than its window.
  text = [[0, *inputs_1S[0, :-1], *targets_1T[0, 1:]]]
  return inputs_1S, np.array(text)[:, : arrays[gpt.POSITIONS].shape[0]]
