"""Arguments that T5X once had. Gin files that set them still run, without any effect."""

from __future__ import annotations

# The functions and classes that had each argument.
_RETIRED = {
  # Whether arrays are global: since jax 0.4 all arrays are. T5X's own export.gin still sets False.
  "use_gda": {"RestoreCheckpointConfig", "SaveCheckpointConfig", "train", "evaluate", "infer"},
}


def is_retired(name: str, argument: str) -> bool:
  """Returns whether T5X's function or class of this name once had this argument."""
  return name in _RETIRED.get(argument, ())
