"""Small functions to calculate with inside gin files."""

from __future__ import annotations

from typing import Any

import gin


@gin.configurable(module="t5x.gin_utils")
def sum_fn(var1: Any = gin.REQUIRED, var2: Any = gin.REQUIRED) -> Any:
  """Returns var1 + var2."""
  return var1 + var2


@gin.configurable(module="t5x.gin_utils")
def bool_fn(var1: Any = gin.REQUIRED) -> bool:
  """Returns whether var1 is true."""
  return bool(var1)


@gin.configurable(module="t5x.gin_utils")
def string_split_fn(
  text: Any = gin.REQUIRED,
  separator: Any = gin.REQUIRED,
  maxsplit: int = -1,
  index: int | None = None,
) -> list[str] | str:
  """Returns the parts of a text between separators, or the part at `index`."""
  parts = text.split(separator, maxsplit)
  return parts if index is None else parts[index]


@gin.configurable(module="t5x.gin_utils")
def steps_of(samples: float = gin.REQUIRED, batch_size: int | None = None) -> int:
  """Returns the steps that train on so many examples, at most, so that a length can be given in them.

  Not T5X's. Every length in steps can be one in examples: `TRAIN_STEPS = @total/gin_utils.steps_of()`
  with `total/gin_utils.steps_of.samples = 1e9`; a scope, here `total`, for each length.

  Args:
    samples: examples.
    batch_size: those of a step; None for the run's BATCH_SIZE.

  Raises:
    ValueError: that is not one whole step, or nothing says what the batch is.
  """
  scope = "/".join([*gin.current_scope(), "gin_utils.steps_of"])
  batch_size = _run_batch_size(scope) if batch_size is None else batch_size
  is_number = isinstance(samples, int | float)
  if not is_number or samples != int(samples) or samples < batch_size:
    raise ValueError(
      f"{scope}.samples = {samples!r} makes no whole step of batch {batch_size}: give a whole number of "
      f"examples, {batch_size} or more"
    )
  return int(samples) // batch_size


def _run_batch_size(scope: str) -> int:
  try:
    return int(gin.get_configurable("BATCH_SIZE/gin.macro")())
  except TypeError as error:
    raise ValueError(
      f"{scope} divides by the run's BATCH_SIZE, but no gin file sets it: set {scope}.batch_size"
    ) from error
