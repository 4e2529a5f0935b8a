"""Types of arguments that have a range, such as `Positive`, and the error for unknown names.

`config.value_checks` refuses values outside the range.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Collection, Iterable
from typing import Annotated, Any


@dataclasses.dataclass(frozen=True)
class Condition:
  """What the value of an argument must satisfy besides having the right type.

  Attributes:
    text: completes "the argument must be an integer …".
    holds: returns whether a value satisfies it.
    choices: the values that satisfy it, if they are few.
  """

  text: str
  holds: Callable[[Any], bool]
  choices: tuple[str, ...] = ()


def one_of(choices: Collection[str]) -> Condition:
  """Returns the condition that a value is one of a few strings."""
  known = tuple(choices)
  return Condition(f"one of {', '.join(map(repr, known))}", lambda value: value in known, known)


def near_hint(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
  """Returns " (did you mean 'x'?)" for the known name most similar to `name`, or ""."""
  near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
  return f" (did you mean {near[0]!r}?)" if near else ""


def check_one_of(name: str, value: Any, known: Collection[str]) -> None:
  """Raises ValueError, with the most similar known value, unless the argument `name` has a known one."""
  if value not in known:
    names, hint = ", ".join(map(repr, known)), near_hint(str(value), known)
    raise ValueError(f"{name} must be one of {names}, got {value!r}{hint}")


def _is_float_dtype(value: Any) -> bool:
  import jax.numpy as jnp

  try:
    return jnp.issubdtype(jnp.dtype(value), jnp.floating)
  except TypeError:
    return False


Positive = Annotated[int, Condition("of at least 1", lambda n: n >= 1)]
NonNegative = Annotated[int, Condition("of at least 0", lambda n: n >= 0)]
Steps = Annotated[int, Condition("of at least 0 and less than 2^31", lambda n: 0 <= n < 2**31)]
Seed = Annotated[int, Condition("of at most 63 bits", lambda n: -(2**63) <= n < 2**63)]
PositiveNumber = Annotated[float | int, Condition("greater than 0", lambda x: 0 < x < math.inf)]
NonNegativeNumber = Annotated[float | int, Condition("of at least 0", lambda x: 0 <= x < math.inf)]
# A rate of dropout, of smoothing, or of an average that decays.
Rate = Annotated[float | int, Condition("of at least 0 and less than 1", lambda x: 0 <= x < 1)]
Probability = Annotated[float | int, Condition("from 0 to 1", lambda x: 0 <= x <= 1)]
Percentage = Annotated[float | int, Condition("from 0 to 100", lambda x: 0 <= x <= 100)]
FolderName = Annotated[
  str,
  Condition(
    "that is not empty and does not begin with ~, which only a shell replaces",
    lambda name: name[:1] not in ("", "~"),
  ),
]
FloatDType = Annotated[
  Any, Condition("the name of a floating-point type, such as 'bfloat16'", _is_float_dtype)
]
