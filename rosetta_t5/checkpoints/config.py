"""What a run is told about checkpoints: when to save, and what to start from (T5X's fields)."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from rosetta_t5.checkpoints.arrays.assignment_map import apply_assignment_map
from rosetta_t5.checkpoints.manager import OrbaxCheckpointManagerInterface

_MODES = ("latest", "all", "specific")


@runtime_checkable
class SetsManagerOptions(Protocol):
  """A checkpointer that configures the checkpoint manager.

  `SaveCheckpointConfig.checkpointer_cls` may build such an object, as `SaveBestCheckpointer` is.
  """

  def manager_options(self) -> Mapping[str, Any]:
    """Returns keyword arguments for `SaveCheckpointConfig.checkpoint_manager_cls`."""


@dataclasses.dataclass
class SaveCheckpointConfig:
  """When and how checkpoints are saved.

  Attributes:
    dtype: of the stored floating-point parameters.
    period: steps between checkpoints; None for none but the last.
    checkpoint_steps: more steps to save at.
    keep: how many of the latest stay; None for all.
    keep_dataset_checkpoints: how many of the latest dataset positions stay; None for all.
    save_dataset: whether the position in the training data is stored too.
    checkpointer_cls: T5X's field for its older layout. Checkpoints are always written in Orbax's
      layout. If the class implements `SetsManagerOptions`, as SaveBestCheckpointer does, its options
      (metric_name_to_monitor, ...) are given to the manager.
    state_transformation_fns: `fn(state_dict, parameter_infos)` returns both, changed, before the
      state is written.
    checkpoint_manager_cls: builds the manager; bind its further arguments (such as
      force_keep_period) there.
  """

  dtype: str | None = "float32"
  period: int | None = None
  checkpoint_steps: Sequence[int] | None = None
  keep: int | None = None
  keep_dataset_checkpoints: int | None = None
  save_dataset: bool = False
  checkpointer_cls: Callable[..., Any] | None = None
  state_transformation_fns: Sequence[Callable[..., Any]] = dataclasses.field(default_factory=list)
  checkpoint_manager_cls: Callable[..., OrbaxCheckpointManagerInterface] = (
    OrbaxCheckpointManagerInterface
  )

  def __post_init__(self) -> None:
    _check_dtype(self.dtype, "SaveCheckpointConfig.dtype")


@dataclasses.dataclass
class RestoreCheckpointConfig:
  """What a run starts from when MODEL_DIR has no checkpoint of its own.

  Attributes:
    path: a checkpoint's folder (mode 'specific') or a folder of checkpoints; or several; an empty
      one means none. A checkpoint may be Orbax's, T5X's older one, Mesh TensorFlow's (folder or
      prefix) or a Hugging Face folder: its layout is found by looking.
    mode: 'specific' takes path as it is, 'latest' the last checkpoint in it, 'all' every one.
    assignment_map: (pattern, replacement) pairs: a parameter of the model whose whole name the
      regular expression matches takes the value of the checkpoint's name that the replacement gives;
      None leaves it out (then set fallback_to_scratch).
    strict: refuse names in the checkpoint that the model does not have.
    fallback_to_scratch: initialise what the checkpoint lacks.
    dtype: of the restored floating-point parameters; None for the model's own.
    restore_dataset: go on at the stored position in the training data.
    checkpointer_cls: T5X's field for its older layout; the layout is found by looking.
    state_transformation_fns: `fn(checkpoint's state dict, model's)` returns the former changed,
      after assignment_map.
    checkpoint_manager_cls: builds the manager.
  """

  path: str | Sequence[str]
  mode: str = "latest"
  assignment_map: Sequence[tuple[str, str | None]] | None = None
  strict: bool = True
  fallback_to_scratch: bool = False
  dtype: str | None = None
  restore_dataset: bool = False
  checkpointer_cls: Callable[..., Any] | None = None
  state_transformation_fns: Sequence[Callable[..., Any]] = ()
  checkpoint_manager_cls: Callable[..., OrbaxCheckpointManagerInterface] = (
    OrbaxCheckpointManagerInterface
  )

  def __post_init__(self) -> None:
    if self.mode not in _MODES:
      near = difflib.get_close_matches(str(self.mode), _MODES, n=1)
      hint = f"; did you mean {near[0]!r}?" if near else ""
      raise ValueError(
        f"RestoreCheckpointConfig.mode = {self.mode!r} is none of {', '.join(_MODES)}{hint}"
      )
    _check_dtype(self.dtype, "RestoreCheckpointConfig.dtype")
    if self.assignment_map is not None:
      # As in T5X, the map is the first of the transformations.
      renaming = functools.partial(apply_assignment_map, assignment_map=self.assignment_map)
      self.state_transformation_fns = (renaming, *self.state_transformation_fns)


@dataclasses.dataclass
class CheckpointConfig:
  """Saving and restoring; None for neither."""

  save: SaveCheckpointConfig | None = None
  restore: RestoreCheckpointConfig | None = None


def _check_dtype(dtype: Any, field: str) -> None:
  if dtype not in (None, "float32", "bfloat16", "float16"):
    raise ValueError(f"{field} = {dtype!r} is none of 'float32', 'bfloat16', None")
