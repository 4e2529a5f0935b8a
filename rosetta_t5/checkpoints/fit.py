"""Whether a checkpoint fits a train state: names, shapes and dtypes, compared before any is read."""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

OPTIMIZER_STATE = "state/param_states/"
# Where flax's and Transformer Engine's fp8 layers keep their scales.
FP8_COLLECTIONS = ("flax_mutables/_overwrite_with_gradient/", "flax_mutables/fp8_metas/")

_log = logging.getLogger(__name__)

_ROWS_SHOWN = 20
_NEAR = 0.8


class CheckpointMismatchError(ValueError):
  """A checkpoint is of another model or optimizer than the run."""


@dataclasses.dataclass(frozen=True)
class Misfit:
  """One difference: what is wrong with `name`, what the checkpoint has, what the run expects."""

  problem: str
  name: str
  stored: str = "-"
  expected: str = "-"


def compare(stored: Mapping[str, Any], expected: Mapping[str, Any]) -> list[Misfit]:
  """Returns every difference between two flat dicts of things with `shape` and `dtype`.

  Args:
    stored: what the checkpoint has, by name.
    expected: what the train state needs, by name. Where it has no optimizer state at all (as in
      inference), the checkpoint's is left alone.
  """
  ignored = () if _has_optimizer_state(expected) else tuple(filter(_is_optimizer_state, stored))
  unexpected = sorted(set(stored) - set(expected) - set(ignored))
  missing = sorted(set(expected) - set(stored))
  misfits = [Misfit("missing", name, expected=_describe(expected[name])) for name in missing]
  misfits += [Misfit("unexpected", name, stored=_describe(stored[name])) for name in unexpected]
  for name in sorted(set(stored) & set(expected)):
    misfits += _compare_leaf(name, stored[name], expected[name])
  return misfits


def check_fit(
  path: Any,
  stored: Mapping[str, Any],
  expected: Mapping[str, Any],
  allow_missing: bool = False,
  allow_unexpected: bool = False,
) -> set[str]:
  """Returns the names of `expected` that a restore can take from `stored`.

  Args:
    path: the checkpoint, for what is said.
    stored: what it has, by name.
    expected: what the train state needs, by name.
    allow_missing: leave out what the checkpoint lacks, and optimizer state that does not fit.
    allow_unexpected: ignore what only the checkpoint has.

  Raises:
    CheckpointMismatchError: something else does not fit.
  """
  fresh = list(FP8_COLLECTIONS)
  if allow_missing or not any(map(_is_optimizer_state, stored)):
    fresh += [OPTIMIZER_STATE, *([] if allow_missing else ["state/step"])]
  allowed = {"missing": allow_missing, "unexpected": allow_unexpected}
  misfits = compare(stored, expected)
  tolerated = [m for m in misfits if m.name.startswith(tuple(fresh)) or allowed.get(m.problem)]
  if len(tolerated) < len(misfits):
    raise mismatch_error(path, misfits)
  _log_tolerated(path, tolerated)
  begun_again = _with_their_siblings(tolerated, expected)
  return {name for name in expected if name not in begun_again}


def _with_their_siblings(misfits: list[Misfit], expected: Mapping[str, Any]) -> set[str]:
  """Returns the names to leave out: an optimizer's state of one parameter is restored whole or not."""
  names = {misfit.name for misfit in misfits}
  folders = {name.rpartition("/")[0] for name in names if _is_optimizer_state(name)}
  siblings = {n for n in expected if _is_optimizer_state(n) and n.rpartition("/")[0] in folders}
  return names | siblings


def _log_tolerated(path: Any, misfits: list[Misfit]) -> None:
  """Says what is left out; what starts afresh is said when it does (`fresh_state.completed`)."""
  done = {"missing": "is not in it and starts from scratch", "unexpected": "is not used"}
  for misfit in misfits:
    what = done.get(misfit.problem, f"is of {misfit.problem} and starts from scratch")
    of_state = misfit.name.startswith(("state/", *FP8_COLLECTIONS))
    _log.log(logging.DEBUG if of_state else logging.WARNING, "%s: %s %s", path, misfit.name, what)
  misfitting = [m for m in misfits if _is_optimizer_state(m.name) and m.problem != "missing"]
  if misfitting:
    _log.warning(
      "checkpoint %s: %d parts of its optimizer's state do not fit and are not used (such as %s)",
      *(path, len(misfitting), misfitting[0].name),
    )


def _compare_leaf(name: str, stored: Any, expected: Any) -> Iterable[Misfit]:
  if tuple(stored.shape) != tuple(expected.shape):
    yield Misfit("wrong shape", name, _describe(stored), _describe(expected))
  elif _kind(stored.dtype) != _kind(expected.dtype):
    yield Misfit("wrong dtype", name, _describe(stored), _describe(expected))


def mismatch_error(path: Any, misfits: list[Misfit]) -> CheckpointMismatchError:
  """Returns the error that shows `misfits` of the checkpoint at `path` as one table."""
  counts = [
    f"{sum(misfit.problem == problem for misfit in misfits)} {problem}"
    for problem in ("missing", "unexpected", "wrong shape", "wrong dtype")
    if any(misfit.problem == problem for misfit in misfits)
  ]
  return CheckpointMismatchError(
    f"checkpoint {path} is not of this run's model: {', '.join(counts)}\n"
    f"{_table(misfits)}\n{_advice(path, misfits)}"
  )


def _table(misfits: list[Misfit]) -> str:
  rows = [("problem", "name", "checkpoint", "model", "")]
  # Parameters first: they say more about the model than the optimizer's copies of their shapes.
  ordered = sorted(misfits, key=lambda misfit: _is_optimizer_state(misfit.name))
  for misfit in ordered[:_ROWS_SHOWN]:
    rows.append(
      (misfit.problem, misfit.name, misfit.stored, misfit.expected, _near(misfit, misfits))
    )
  widths = [max(len(row[column]) for row in rows) for column in range(4)] + [0]
  lines = [
    "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for row in rows
  ]
  if len(misfits) > _ROWS_SHOWN:
    lines.append(f"  ... and {len(misfits) - _ROWS_SHOWN} more")
  return "\n".join(lines)


def _advice(path: Any, misfits: list[Misfit]) -> str:
  if all(_is_optimizer_state(misfit.name) for misfit in misfits):
    return (
      "The parameters fit, the optimizer's state does not: the checkpoint was written with another "
      "OPTIMIZER. Bind that one (its state may also depend on how layers are stacked), or train in another MODEL_DIR; RestoreCheckpointConfig."
      "fallback_to_scratch = True starts what does not fit afresh."
    )
  return (
    "To train this model, give an empty folder (--gin.MODEL_DIR=\"'...'\") and no "
    "INITIAL_CHECKPOINT_PATH; to use the checkpoint, give the gin file it was made with (see "
    f"config.gin beside {path})."
  )


def _describe(leaf: Any) -> str:
  return f"{tuple(leaf.shape)} {np.dtype(leaf.dtype).name}"


def _kind(dtype: Any) -> str:
  """Floats of any width convert into each other, and so do integers."""
  if jnp.issubdtype(dtype, jnp.floating):
    return "float"
  return "int" if jnp.issubdtype(dtype, jnp.integer) else np.dtype(dtype).name


def _near(misfit: Misfit, misfits: list[Misfit]) -> str:
  """Names the missing one that an unexpected one may be, and the other way round."""
  opposite = {"missing": "unexpected", "unexpected": "missing"}.get(misfit.problem)
  others = [other.name for other in misfits if other.problem == opposite]
  close = difflib.get_close_matches(misfit.name, others, n=1, cutoff=_NEAR)
  return f"(near: {close[0]})" if close else ""


def _is_optimizer_state(name: str) -> bool:
  return name.startswith(OPTIMIZER_STATE)


def _has_optimizer_state(names: Iterable[str]) -> bool:
  return any(map(_is_optimizer_state, names))
