"""Arguments that T5X once had and that nothing depends on any more: gin files that set them still run."""

from __future__ import annotations

# By argument: the functions and classes that had it.
_RETIRED = {
  # Whether arrays are global ones: since jax 0.4 all are. T5X's own export.gin still says False.
  "use_gda": {"RestoreCheckpointConfig", "SaveCheckpointConfig", "train", "evaluate", "infer"},
}


def is_retired(name: str, argument: str) -> bool:
  """Whether T5X's function or class of this name once had this argument."""
  return name in _RETIRED.get(argument, ())
