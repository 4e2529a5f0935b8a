"""The names of T5X's older checkpointers, which gin files may bind; their layout is not read yet."""

from __future__ import annotations

from typing import Any


class Checkpointer:
  """Stands for T5X's older checkpointer (msgpack and zarr), the default of the configs' field.

  Its presence in a config changes nothing: checkpoints are Orbax's.
  """

  def __init__(self, *args: Any, **kwargs: Any):
    """Refuses: there is nothing to build yet."""
    del args, kwargs
    raise ValueError(
      f"checkpoints.{type(self).__name__} (T5X's older checkpoint layout) is not supported yet: use "
      "checkpoints.OrbaxCheckpointManagerInterface"
    )


class SaveBestCheckpointer(Checkpointer):
  """Stands for T5X's checkpointer that keeps the best by a metric."""


def refuse_legacy_checkpointer(checkpointer_cls: Any, field: str) -> None:
  """Raises ValueError if a config asks for more than the default checkpointer.

  Args:
    checkpointer_cls: the config's field of that name.
    field: how the user writes it, for the message.
  """
  if checkpointer_cls not in (None, Checkpointer):
    name = getattr(checkpointer_cls, "__name__", repr(checkpointer_cls))
    raise ValueError(
      f"{field} = {name} is not supported yet: remove that binding, checkpoints are then saved by "
      "OrbaxCheckpointManagerInterface"
    )
