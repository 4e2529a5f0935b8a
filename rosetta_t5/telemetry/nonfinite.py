"""When training has gone bad (NaN, infinity): which tensor was first, and what to do about it."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rosetta_t5.telemetry.run_measures import SKIPPED_STEPS, WEIGHT_NORM

PyTree = Any


@dataclasses.dataclass(frozen=True)
class NonFinite:
  """A tensor with NaN or infinity in it.

  Attributes:
    group: what kind of tensor it is ("loss", "gradients", "parameters", ...).
    name: its name within the group; empty for a single number.
    shape: its shape.
    dtype: its dtype's name.
    nans: how many NaN it has.
    infs: how many infinities it has.
  """

  group: str
  name: str
  shape: tuple[int, ...]
  dtype: str
  nans: int
  infs: int

  def __str__(self) -> str:
    what = f"{self.group} {self.name}".rstrip()
    counts = [f"{self.nans} NaN" if self.nans else "", f"{self.infs} infinite" if self.infs else ""]
    found = " and ".join(filter(None, counts))
    size = int(np.prod(self.shape, dtype=np.int64))
    return f"{what} {self.shape} {self.dtype}: {found} of {size} value{'s' if size != 1 else ''}"


class NonFiniteError(ArithmeticError):
  """Training has gone bad; the run stops so that nothing good is overwritten.

  Attributes:
    step: the step in which it was seen.
    first_bad: the first tensor that was not finite, if it is known.
  """

  def __init__(self, step: int, first_bad: NonFinite | str | None, last_good: Any = None):
    """Builds the error.

    Args:
      step: the step in which it was seen.
      first_bad: the first tensor that was not finite, or its name.
      last_good: path of the last checkpoint saved before it; None if there is none.
    """
    self.step = step
    self.first_bad = first_bad
    super().__init__(_explain(step, first_bad, last_good))


def check_finite(
  record: Any, train_state: Any, manager: Any, measures: Mapping[str, float] | None = None
) -> None:
  """Raises NonFiniteError if the steps just made were not finite.

  Not so where the optimizer leaves such steps out (`optax.apply_if_finite`) and has left them all out,
  so that the parameters are finite.

  Args:
    record: what `training.step` kept of them: `bad`, booleans for the loss and each parameter's
      gradient in the first bad step, and `step`, the updates made before it; None for nothing.
    train_state: gives the parameters' names.
    manager: the checkpoint manager, whose running save is let finish; None for none.
    measures: what `RunMeasures` has measured after them; None if it has not.
  """
  bad_name = None if record is None else name_in_step(record.bad, train_state.params)
  if bad_name is None or _were_left_out(measures or {}):
    return
  updates_made = int(record.step)
  good = None
  if manager is not None:
    manager.wait_until_finished()
    steps = [step for step in manager.all_steps() if step <= updates_made]
    good = manager.directory / f"checkpoint_{steps[-1]}" if steps else None
  raise NonFiniteError(updates_made + 1, bad_name, good)


def _were_left_out(measures: Mapping[str, float]) -> bool:
  return SKIPPED_STEPS in measures and math.isfinite(measures[WEIGHT_NORM])


def first_nonfinite(
  groups: Iterable[tuple[str, PyTree | Callable[[], PyTree]]],
) -> NonFinite | None:
  """Returns the first tensor that is not finite, in the order of `groups`, or None.

  Args:
    groups: (name, tree) pairs, causes before effects: batch, loss, gradients, parameters, optimizer
      state. A tree may be given as a function, which is called only if all before are finite.
  """
  for group, tree in groups:
    leaves = jax.tree_util.tree_leaves_with_path(tree() if callable(tree) else tree)
    for path, leaf in leaves:
      found = _inspect(group, jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
      if found is not None:
        return found
  return None


def name_in_step(bad: Any, params: PyTree) -> str | None:
  """Returns what was first not finite in a step: "loss", or the gradients of a parameter, or None.

  Args:
    bad: [1 + number of parameters] booleans, for the loss and each parameter's gradient.
    params: the parameters, whose names are used.
  """
  names = ["loss"] + [
    f"gradients {jax.tree_util.keystr(path, simple=True, separator='/')}"
    for path, _ in jax.tree_util.tree_leaves_with_path(params)
  ]
  return next((name for name, is_bad in zip(names, np.asarray(bad), strict=True) if is_bad), None)


def _inspect(group: str, name: str, leaf: Any) -> NonFinite | None:
  array = jnp.asarray(leaf)
  if not jnp.issubdtype(array.dtype, jnp.inexact):
    return None
  nans, infs = int(jnp.sum(jnp.isnan(array))), int(jnp.sum(jnp.isinf(array)))
  if not (nans or infs):
    return None
  return NonFinite(group, name, array.shape, array.dtype.name, nans, infs)


def _explain(step: int, first_bad: NonFinite | str | None, last_good: Any) -> str:
  where = f"first in {first_bad}" if first_bad else "every tensor looked at now is finite"
  kept = (
    f"the last good checkpoint is {os.fspath(last_good)}; a run with other settings in the same "
    "MODEL_DIR goes on from there"
    if last_good
    else "there is no checkpoint from before it"
  )
  return (
    f"training is not finite (NaN or infinity) at step {step}: {where}. {kept[0].upper()}{kept[1:]}. "
    f"{_advice(first_bad)}"
  )


def _advice(first_bad: NonFinite | str | None) -> str:
  group = first_bad.group if isinstance(first_bad, NonFinite) else ""
  if group == "batch":
    return "The input holds it already: look at the task's preprocessors."
  if group in ("parameters", "optimizer state"):
    return "The state was bad before this step: restart from an earlier checkpoint."
  return (
    "To try: a lower learning rate or more warm-up steps; clip the gradients "
    "(optax.clip_by_global_norm in optimizers.chain); network.T5Config.dtype = 'float32' if it is "
    "bfloat16; z_loss = 0.0001."
  )
