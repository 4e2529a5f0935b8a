"""The configuration of checkpoints, when to save and what to restore (T5X's fields), and its manager."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from etils import epath

from rosetta_t5.argument_types import NonNegative, Positive, check_one_of, one_of
from rosetta_t5.checkpoints import checkpoint_folders
from rosetta_t5.checkpoints.arrays.state_dicts import apply_assignment_map, resize_vocabulary
from rosetta_t5.checkpoints.checkpoint_folders import CheckpointTypes
from rosetta_t5.checkpoints.formats.hugging_face.folder import local_folder
from rosetta_t5.checkpoints.manager import OrbaxCheckpointManagerInterface
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.training.train_state import TrainState

# The modules of T5X's class and of the manager, whose methods are not a user's.
_T5X_CHECKPOINTERS = ("t5x.checkpoints", OrbaxCheckpointManagerInterface.__module__)
_ManagerClass = Callable[..., OrbaxCheckpointManagerInterface]
_MODES = ("latest", "all", "specific")
Mode = Annotated[str, one_of(_MODES)]
StoredDType = Annotated[str, one_of(("float32", "bfloat16", "float16"))]


@dataclasses.dataclass
class SaveCheckpointConfig:
  """When and how checkpoints are saved.

  Attributes:
    dtype: the dtype of the stored floating-point parameters.
    period: steps between checkpoints; None for only the last.
    checkpoint_steps: more steps at which to save.
    keep: how many of the latest checkpoints are kept; None for all.
    keep_dataset_checkpoints: how many of the latest dataset positions are kept; None for all.
    save_dataset: whether the position in the training data is stored too.
    ignore_dataset_until: the positions of MODEL_DIR's checkpoints up to this step are not restored, so
      a restart from them starts the data from its beginning; None restores every position.
    checkpointer_cls: a subclass of T5X's Checkpointer. Its `save` is called if it overrides T5X's.
      Checkpoints are always written in Orbax's layout. What its method `manager_options` returns, as
      SaveBestCheckpointer's does (metric_name_to_monitor, ...), is given to the manager's class.
    state_transformation_fns: before the state is written, each `fn(state_dict, parameter_infos)`
      returns both of them, changed.
    checkpoint_manager_cls: builds the manager. Bind its other arguments (such as force_keep_period)
      on this class.
  """

  dtype: StoredDType | None = "float32"
  period: NonNegative | None = None
  checkpoint_steps: Sequence[NonNegative] | None = None
  keep: Positive | None = None
  keep_dataset_checkpoints: Positive | None = None
  save_dataset: bool = False
  ignore_dataset_until: NonNegative | None = None
  checkpointer_cls: Callable[..., Any] | None = None
  state_transformation_fns: Sequence[Callable[..., Any]] = dataclasses.field(default_factory=list)
  checkpoint_manager_cls: _ManagerClass = OrbaxCheckpointManagerInterface

  def times(self) -> str:
    """Returns when checkpoints are saved, such as "every 100 steps and at start and end"."""
    times = [f"every {self.period} steps"] if self.period else []
    times += [f"at {', '.join(map(str, self.checkpoint_steps))}"] if self.checkpoint_steps else []
    return " and ".join([*times, "at start and end"])


class _Added(functools.partial[Any]):
  """A transformation that `RestoreCheckpointConfig` makes from its other fields."""


@dataclasses.dataclass
class RestoreCheckpointConfig:
  """What a run restores if MODEL_DIR has no checkpoint of its own.

  Attributes:
    path: a checkpoint's folder (mode 'specific') or a folder of checkpoints; or several of them. An
      empty path means none. A checkpoint may have the layout of Orbax, T5X's older one, Mesh
      TensorFlow (folder or prefix) or Hugging Face; the layout is detected.
    mode: 'specific' takes `path` as it is, 'latest' the last checkpoint in it, 'all' every one.
    assignment_map: (pattern, replacement) pairs. A parameter of the model whose whole name matches
      the regular expression gets the checkpoint's value that the replacement names. None leaves the
      parameter out; fallback_to_scratch must then be set.
    resize_vocabulary: give the tables of tokens the model's number of rows: new rows are the mean of the
      others, and the last rows are left out if there are too many.
    strict: raise an error for names in the checkpoint that the model does not have.
    fallback_to_scratch: initialize what the checkpoint lacks.
    dtype: the dtype of the restored floating-point parameters; None for the model's.
    restore_dataset: continue at the stored position in the training data.
    checkpointer_cls: a subclass of T5X's Checkpointer that overrides `restore`, which then restores.
      T5X's own classes are not needed, since the layout is detected. If the class has a function
      `transform_restored_state`, as UpcycleCheckpointer does, it follows assignment_map.
    state_transformation_fns: after assignment_map, each `fn(checkpoint's state dict, model's)`
      returns the first one, changed.
    checkpoint_manager_cls: builds the manager.
  """

  path: str | Sequence[str] | None
  mode: Mode = "latest"
  assignment_map: Sequence[tuple[str, str | None]] | None = None
  strict: bool = True
  fallback_to_scratch: bool = False
  dtype: StoredDType | None = None
  restore_dataset: bool = False
  checkpointer_cls: Callable[..., Any] | None = None
  state_transformation_fns: Sequence[Callable[..., Any]] = ()
  checkpoint_manager_cls: _ManagerClass = OrbaxCheckpointManagerInterface
  resize_vocabulary: bool = False

  def __post_init__(self) -> None:
    check_one_of("RestoreCheckpointConfig.mode", self.mode, _MODES)
    # A copy that `dataclasses.replace` makes is given what its original has added.
    fns = [fn for fn in self.state_transformation_fns if not isinstance(fn, _Added)]
    if (transform := getattr(self.checkpointer_cls, "transform_restored_state", None)) is not None:
      fns.insert(0, _Added(transform))
    if self.assignment_map is not None:
      # As in T5X, the map is the first of the transformations.
      fns.insert(0, _Added(apply_assignment_map, assignment_map=self.assignment_map))
    if self.resize_vocabulary and resize_vocabulary not in fns:
      fns.append(resize_vocabulary)
    self.state_transformation_fns = tuple(fns)

  def paths(self) -> list[str]:
    """Returns `path` as a list, without empty paths."""
    given = [self.path] if isinstance(self.path, str | os.PathLike) else list(self.path or ())
    return [os.fspath(path) for path in given if os.fspath(path)]


@dataclasses.dataclass
class CheckpointConfig:
  """Saving and restoring; None disables either."""

  save: SaveCheckpointConfig | None = None
  restore: RestoreCheckpointConfig | None = None


def get_first_valid_restore_config_and_paths(
  restore_cfgs: Sequence[RestoreCheckpointConfig],
) -> tuple[RestoreCheckpointConfig | None, tuple[str, ...]]:
  """Returns the first config that names a checkpoint, and the checkpoints' paths; (None, ()) if none does.

  With mode 'specific', the path is returned even if nothing is there.
  """
  for cfg in restore_cfgs:
    paths = tuple(path for given in cfg.paths() for path in _checkpoints_at(given, cfg.mode))
    if paths:
      return cfg, paths
  return None, ()


def find_checkpoints(
  restore_cfgs: Sequence[RestoreCheckpointConfig],
) -> tuple[RestoreCheckpointConfig, tuple[str, ...]]:
  """Returns the first config that names a checkpoint, and the checkpoints' paths.

  Raises:
    ValueError: no config names a checkpoint, or something else is at a path.
  """
  cfg, paths = get_first_valid_restore_config_and_paths(restore_cfgs)
  wrong = [path for path in paths if not checkpoint_folders.find_checkpoint_type(path)]
  if cfg is None:
    wrong = [path for each in restore_cfgs for path in each.paths()]
  if cfg is None or wrong:
    found = checkpoint_folders.describe(epath.Path(wrong[0])) if wrong else "the path is empty"
    raise ValueError(
      f"there is no checkpoint to restore in {', '.join(wrong)} (mode = {restore_cfgs[0].mode!r}): {found}. "
      "Set RestoreCheckpointConfig.path (CHECKPOINT_PATH, INITIAL_CHECKPOINT_PATH) to a folder that "
      "contains checkpoint_STEP folders, or mode = 'specific' and the path of one checkpoint"
    )
  return cfg, paths


def _checkpoints_at(path: str, mode: str) -> list[str]:
  """Returns the checkpoints that a path names in a mode."""
  if mode == "specific":
    return [local_folder(path)]  # It may be the name of a model on Hugging Face's hub.
  # These layouts have no folders of steps.
  layout = checkpoint_folders.find_checkpoint_type(path)
  if layout in (CheckpointTypes.HUGGING_FACE, CheckpointTypes.T5X_TF):
    return [path]
  steps = checkpoint_folders.all_steps(path)
  chosen = steps[-1:] if mode == "latest" else steps
  return [os.fspath(checkpoint_folders.checkpoint_path(path, step)) for step in chosen]


def create_orbax_checkpoint_manager(
  *,
  save_cfg: SaveCheckpointConfig | None = None,
  restore_cfg: RestoreCheckpointConfig | None = None,
  train_state: TrainState,
  partitioner: BasePartitioner,
  ds_iter: Any = None,
  model_dir: epath.PathLike | None = None,
) -> OrbaxCheckpointManagerInterface:
  """Returns a manager that saves into `model_dir`, restores, or both.

  Args:
    save_cfg: how to save; None for a manager that only restores.
    restore_cfg: how to restore; None for a manager that only saves.
    train_state: the run's train state, or its shapes.
    partitioner: specifies the sharding of restored arrays.
    ds_iter: the training data's iterator.
    model_dir: the folder of checkpoints; None for the path of `restore_cfg`.

  Raises:
    ValueError: Orbax cannot save into the folder.
  """
  save = save_cfg or SaveCheckpointConfig()
  load = restore_cfg or RestoreCheckpointConfig(path=None)
  directory = model_dir or next(iter(load.paths()), None)
  assert directory is not None, "a checkpoint manager needs a MODEL_DIR or a path to restore"
  if save_cfg is not None and set("*?[]\\").intersection(os.fspath(directory)):  # Orbax's patterns
    raise ValueError(f"MODEL_DIR must not contain * ? [ ] or a backslash, got {directory}")
  state: dict[str, Any] = {"train_state": train_state, "partitioner": partitioner}

  def make(checkpointer_cls: Any, **arguments: Any) -> Any:
    return checkpointer_cls and checkpointer_cls(**state, **arguments)

  # It is built even if only its settings are needed: gin applies its bindings when it is called.
  saver = make(save.checkpointer_cls, checkpoints_dir=os.fspath(directory))
  positions = ds_iter if load.restore_dataset else None
  restorer = make(
    load.checkpointer_cls, dataset_iterator=positions, checkpoints_dir="", restore_dtype=load.dtype
  )
  names = ("keep", "period", "checkpoint_steps", "keep_dataset_checkpoints")
  saving = {name: getattr(save, name) for name in names}
  saving |= saver.manager_options() if hasattr(saver, "manager_options") else {}
  manager = (save_cfg or load).checkpoint_manager_cls(
    directory=directory,
    **state,
    dataset_iterator=ds_iter if save.save_dataset or load.restore_dataset else None,
    save_dtype=save.dtype,
    restore_dtype=load.dtype,
    **saving,
  )
  # These are attributes, so that users' own manager classes with T5X's arguments work.
  manager.state_transformation_fns = tuple(save.state_transformation_fns)
  manager.strict, manager.restores_dataset = load.strict, load.restore_dataset
  if (user_save := _overridden(saver, "save")) is not None:
    saver.manager, manager.user_save = manager, user_save
  manager.user_restore = _overridden(restorer, "restore")
  return manager


def _overridden(checkpointer: Any, name: str) -> Callable[..., Any] | None:
  """Returns a method of a user's checkpointer; None if it is the one of T5X's class."""
  method = getattr(checkpointer, name, None)
  return None if method is None or method.__module__ in _T5X_CHECKPOINTERS else method
