"""Comparison of a checkpoint with a train state by names, shapes and dtypes, without reading values."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import logging
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from rosetta_t5.checkpoints.arrays.parameter_trees import OPTIMIZER_STATE

# The collections in which flax's and Transformer Engine's fp8 layers keep their scales.
FP8_COLLECTIONS = ("flax_mutables/_overwrite_with_gradient/", "flax_mutables/fp8_metas/")

_EXPERT = re.compile(r"target/.*/mlp/expert/.*")

# The settings of a network that are sizes of its parameters: a pattern of their names, the axis, the setting.
_SIZES = (
  (re.compile(r"token_embedder/embedding$"), 0, "vocab_size"),
  (re.compile(r"logits_dense/kernel$"), -1, "vocab_size"),
  (re.compile(r"token_embedder/embedding$"), 1, "emb_dim"),
  (re.compile(r"rel_embedding$"), 0, "num_heads"),
  (re.compile(r"rel_embedding$"), -1, "num_buckets"),
  (re.compile(r"/mlp/wi(_\d)?/kernel$"), -1, "mlp_dim"),
  (re.compile(r"/mlp/expert/"), 0, "num_experts"),
)

_log = logging.getLogger(__name__)

_MAX_ROWS = 20


class CheckpointMismatchError(ValueError):
  """A checkpoint belongs to a different model or optimizer."""


@dataclasses.dataclass(frozen=True)
class Mismatch:
  """One difference between a checkpoint and a train state.

  Attributes:
    problem: "missing", "unexpected", "wrong shape" or "wrong dtype".
    name: the array's name.
    stored: its shape and dtype in the checkpoint.
    expected: its shape and dtype in the train state.
  """

  problem: str
  name: str
  stored: str = "-"
  expected: str = "-"


def is_optimizer_state(name: str) -> bool:
  """Returns whether an array of a train state belongs to the optimizer."""
  return name.startswith(OPTIMIZER_STATE)


def find_mismatches(stored: Mapping[str, Any], expected: Mapping[str, Any]) -> list[Mismatch]:
  """Returns all differences between two flat dicts of leaves with `shape` and `dtype`.

  Args:
    stored: the checkpoint's arrays, by name.
    expected: the train state's, by name. If it has no optimizer state at all, as in inference, the
      checkpoint's optimizer state is ignored.
  """
  missing = sorted(set(expected) - set(stored))
  unexpected = sorted(set(stored) - set(expected))
  if not any(map(is_optimizer_state, expected)):
    unexpected = [name for name in unexpected if not is_optimizer_state(name)]
  mismatches = [Mismatch("missing", name, expected=_describe(expected[name])) for name in missing]
  mismatches += [Mismatch("unexpected", n, stored=_describe(stored[n])) for n in unexpected]
  for name in sorted(set(stored) & set(expected)):
    found, wanted = stored[name], expected[name]
    if tuple(found.shape) != tuple(wanted.shape):
      mismatches.append(Mismatch("wrong shape", name, _describe(found), _describe(wanted)))
    elif _dtype_kind(found.dtype) != _dtype_kind(wanted.dtype):
      mismatches.append(Mismatch("wrong dtype", name, _describe(found), _describe(wanted)))
  return mismatches


def find_restorable(
  path: Any,
  stored: Mapping[str, Any],
  expected: Mapping[str, Any],
  allow_missing: bool,
  allow_unexpected: bool,
) -> set[str]:
  """Returns the names of `expected` that can be restored from `stored`.

  Args:
    path: the checkpoint, for messages.
    allow_missing: leave out what the checkpoint lacks, and optimizer state that does not match.
      Otherwise, if nothing but optimizer state differs, all of it is left out.
    allow_unexpected: ignore what only the checkpoint has.

  Raises:
    CheckpointMismatchError: there is another difference.
  """
  has_state = any(map(is_optimizer_state, stored))
  mismatches = find_mismatches(stored, expected)
  only_state_differs = mismatches and all(is_optimizer_state(m.name) for m in mismatches)
  if has_state and only_state_differs and not allow_missing:
    _log.warning(
      f"checkpoint {path} was written with a different OPTIMIZER: its optimizer state is not used, and "
      f"this run's optimizer state is initialized\n{_table(mismatches)}"
    )
    return {name for name in expected if not is_optimizer_state(name)}
  allowed = {"missing": allow_missing, "unexpected": allow_unexpected}
  # What is initialized wherever the checkpoint differs.
  initialized: tuple[str, ...] = (
    FP8_COLLECTIONS if has_state else (*FP8_COLLECTIONS, OPTIMIZER_STATE, "state/step")
  )
  if allow_missing:
    initialized = (*FP8_COLLECTIONS, OPTIMIZER_STATE)
  refused = [
    m for m in mismatches if not (m.name.startswith(initialized) or allowed.get(m.problem))
  ]
  if refused:
    raise mismatch_error(path, refused)
  _log_mismatches(path, mismatches)
  omitted = {mismatch.name for mismatch in mismatches}
  # A parameter's optimizer state is restored as a whole or not at all.
  incomplete = {name.rpartition("/")[0] for name in omitted if is_optimizer_state(name)}
  return {n for n in expected if n not in omitted and n.rpartition("/")[0] not in incomplete}


def mismatch_error(path: Any, mismatches: list[Mismatch]) -> CheckpointMismatchError:
  """Returns the error that shows the mismatches of the checkpoint at `path` in one table."""
  counts = collections.Counter(mismatch.problem for mismatch in mismatches)
  summary = ", ".join(f"{count} {problem}" for problem, count in counts.items())
  return CheckpointMismatchError(
    f"checkpoint {path} does not match this run's model: {summary}\n"
    f"{_table(mismatches)}\n{_advice(path, mismatches)}"
  )


def _log_mismatches(path: Any, mismatches: list[Mismatch]) -> None:
  """Logs what is not restored, except for state, whose initialization is logged by the restore."""
  consequences = {"missing": "is not in it and is initialized", "unexpected": "is not used"}
  for mismatch in mismatches:
    if not mismatch.name.startswith(("state/", *FP8_COLLECTIONS)):
      default = f"has a {mismatch.problem} and is initialized"
      consequence = consequences.get(mismatch.problem, default)
      _log.warning("checkpoint %s: %s %s", path, mismatch.name, consequence)
  unused = [m.name for m in mismatches if is_optimizer_state(m.name) and m.problem != "missing"]
  if unused:
    _log.warning(
      f"checkpoint {path}: {len(unused)} arrays of its optimizer state do not match and are not used "
      f"(such as {unused[0]})"
    )


def _table(mismatches: list[Mismatch]) -> str:
  rows = [("problem", "name", "checkpoint", "model", "")]
  # Parameters come first: they identify the model better than the optimizer's state does.
  ordered = sorted(mismatches, key=lambda mismatch: is_optimizer_state(mismatch.name))
  for m in ordered[:_MAX_ROWS]:
    rows.append((m.problem, m.name, m.stored, m.expected, _similar_name(m, mismatches)))
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  template = "".join(f"  {{:<{width}}}" for width in widths)
  lines = [template.format(*row).rstrip() for row in rows]
  if len(mismatches) > _MAX_ROWS:
    lines.append(f"  ... and {len(mismatches) - _MAX_ROWS} more")
  return "\n".join(lines)


def _advice(path: Any, mismatches: list[Mismatch]) -> str:
  problems = {mismatch.problem for mismatch in mismatches}
  options = {
    "missing": " RestoreCheckpointConfig.fallback_to_scratch = True initializes what is missing.",
    "unexpected": " RestoreCheckpointConfig.strict = False ignores what only the checkpoint has.",
  }
  advice = _advice_about_sizes(mismatches) or (
    f"To use the checkpoint, give the gin file with which it was trained (see config.gin beside {path}). "
  )
  experts = {m.problem for m in mismatches if _EXPERT.fullmatch(m.name)}
  if experts == {"missing"}:
    advice = "To start the experts from this dense model, use gin/runs/moe/sparse_upcycle.gin. "
  return (
    f"{advice}To train from scratch instead, set an empty folder (--gin.MODEL_DIR=\"'...'\") and no "
    "INITIAL_CHECKPOINT_PATH."
    f"{''.join(text for problem, text in options.items() if problem in problems)}"
  )


def _advice_about_sizes(mismatches: list[Mismatch]) -> str:
  """Returns a sentence that names the network's settings with which the shapes would be equal, or ""."""
  settings: dict[str, str] = {}
  for mismatch in (m for m in mismatches if m.problem == "wrong shape"):
    texts = (mismatch.stored, mismatch.expected)
    stored, expected = (re.findall(r"\d+", text.split(")")[0]) for text in texts)
    for pattern, axis, setting in _SIZES:
      if pattern.search(mismatch.name) and len(stored) == len(expected):
        settings |= {setting: stored[axis]} if stored[axis] != expected[axis] else {}
  if not settings:
    return ""
  advice = f"Set {', '.join(f'{name} = {size}' for name, size in settings.items())} in the network's config"
  if [*settings] == ["vocab_size"]:
    advice += (
      ", or RestoreCheckpointConfig.resize_vocabulary = True, which adds rows (the mean of the others) "
      "or leaves out the last ones"
    )
  return f"{advice}. "


def _similar_name(mismatch: Mismatch, mismatches: list[Mismatch]) -> str:
  """Returns a hint at the unexpected name that a missing one may have, or the reverse."""
  opposite = {"missing": "unexpected", "unexpected": "missing"}.get(mismatch.problem)
  others = [other.name for other in mismatches if other.problem == opposite]
  close = difflib.get_close_matches(mismatch.name, others, n=1, cutoff=0.8)
  return f"(similar: {close[0]})" if close else ""


def _describe(leaf: Any) -> str:
  return f"{tuple(leaf.shape)} {np.dtype(leaf.dtype).name}"


def _dtype_kind(dtype: Any) -> str:
  """Returns the kind of a dtype: floats of any width convert into each other, as do integers."""
  if jnp.issubdtype(dtype, jnp.floating):
    return "float"
  return "int" if jnp.issubdtype(dtype, jnp.integer) else np.dtype(dtype).name
