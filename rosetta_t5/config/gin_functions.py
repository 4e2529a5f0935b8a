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
