"""Functions that calculate values inside gin files."""

import contextlib
from typing import Any

import gin

from rosetta_t5.argument_types import Positive


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
  """Returns the parts of a text between separators, or only the part at `index`."""
  parts = text.split(separator, maxsplit)
  return parts if index is None else parts[index]


@gin.configurable(module="t5x.gin_utils")
def steps_of(samples: float = gin.REQUIRED, batch_size: Positive | None = None) -> int:
  """Returns the number of full batches in a number of examples.

  T5X does not have this function. With it, gin files can give any number of steps as a number of
  examples: `TRAIN_STEPS = @total/gin_utils.steps_of()`, `total/gin_utils.steps_of.samples = 1e9`.
  Each such number needs its own scope, here `total`.

  Args:
    samples: the number of examples.
    batch_size: the number of examples of a step; None for the run's BATCH_SIZE.

  Raises:
    ValueError: `samples` is not an integer or is less than one batch, or the batch size is not a positive integer.
  """
  scope = "/".join([*gin.current_scope(), "gin_utils.steps_of"])
  if batch_size is None:
    with contextlib.suppress(TypeError):  # BATCH_SIZE is not set
      batch_size = gin.get_configurable("BATCH_SIZE/gin.macro")()
  if not isinstance(batch_size, int) or batch_size < 1:
    raise ValueError(
      f"BATCH_SIZE or {scope}.batch_size must be a positive integer, got {batch_size!r}"
    )
  if samples % 1 != 0 or samples < batch_size:
    raise ValueError(
      f"{scope}.samples must be an integer of at least {batch_size} (one batch), got {samples!r}"
    )
  return int(samples) // batch_size
