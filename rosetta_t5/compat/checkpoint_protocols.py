"""The signatures that users' own checkpoint functions and classes have (T5X's protocols)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

PyTree = Any


class SaveStateTransformationFn(Protocol):
  """Changes what is saved."""

  def __call__(self, state_dict: PyTree, parameter_infos: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the state dict and the tree of ParameterInfo, both changed."""


class RestoreStateTransformationFn(Protocol):
  """Changes what was stored into what the model expects."""

  def __call__(
    self, state_dict: PyTree, target_state_dict: PyTree, *, is_resuming: bool = False
  ) -> PyTree:
    """Returns the checkpoint's state dict changed; `is_resuming` says that the run's own is restored."""


class CheckpointerConstructor(Protocol):
  """Makes a checkpointer of T5X's older layout."""

  def __call__(
    self,
    train_state: Any,
    partitioner: Any,
    checkpoints_dir: str,
    dataset_iterator: Any = None,
    *,
    keep: int | None = None,
    save_dtype: Any = np.float32,
    restore_dtype: Any = None,
    keep_dataset_checkpoints: int | None = None,
  ) -> Any:
    """Returns a checkpointer."""


class CheckpointManagerConstructor(Protocol):
  """Makes a manager of checkpoints."""

  def __call__(
    self,
    directory: str,
    train_state: Any,
    partitioner: Any,
    dataset_iterator: Any = None,
    save_dtype: Any = None,
    restore_dtype: Any = None,
    keep: int | None = None,
    period: int | None = None,
    force_keep_period: int | None = None,
    checkpoint_steps: Sequence[int] | None = None,
  ) -> Any:
    """Returns a manager."""
