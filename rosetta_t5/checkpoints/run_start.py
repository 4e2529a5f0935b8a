"""How a run begins: it locks MODEL_DIR, finds its checkpoint, compares the model with it, and restores the state."""

import contextlib
import functools
import inspect
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from etils import epath

from rosetta_t5.checkpoints import checkpoint_folders as folders
from rosetta_t5.checkpoints import config
from rosetta_t5.checkpoints import train_state_initializer as initializers
from rosetta_t5.checkpoints.arrays.parameter_trees import to_plain_tree
from rosetta_t5.checkpoints.formats.hugging_face import folder as hugging_face_folder
from rosetta_t5.checkpoints.formats.hugging_face import peft_folder
from rosetta_t5.checkpoints.manager import OrbaxCheckpointManagerInterface
from rosetta_t5.distributed.coordination import allgather_text, broadcast_text
from rosetta_t5.files import lock_until_closed
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.training.train_state import TrainState

# The run fact with digests of the vocabularies by side ("input", "output").
VOCABULARIES = "vocabularies"
# The run fact with the config.json of the model that a run started from.
SOURCE_CONFIG = "source_config"
# Fields that a run may choose: precision, and how full experts may be. Tables and biases are compared as arrays.
_FREE = (
  "bias_per_layer",
  "vocab_size",
  "unused_rows",
  "max_length",
  "float32_attention_logits",
  "expert_capacity",
  "route_padding",
)
LOCK_FILE = "run.lock"

_log = logging.getLogger(__name__)


def exclusive_model_dir(function: Callable[..., Any]) -> Callable[..., Any]:
  """Decorates a function with an argument `model_dir` so that it locks that folder while it runs."""
  signature = inspect.signature(function)

  @functools.wraps(function)
  def run(*args: Any, **kwargs: Any) -> Any:
    with lock_model_dir(signature.bind(*args, **kwargs).arguments["model_dir"]):
      return function(*args, **kwargs)

  # Gin inspects the arguments in a way that does not follow `__wrapped__`.
  run.__signature__ = signature  # type: ignore[attr-defined]
  return run


@contextlib.contextmanager
def lock_model_dir(model_dir: epath.PathLike) -> Iterator[None]:
  """Locks `model_dir` for this run inside a `with` statement. All processes of a run share the lock.

  The operating system releases the lock when process 0 ends, however it ends. Folders in the cloud
  and file systems without locks are not locked.

  Raises:
    ValueError: another run holds the lock, or the folder cannot be written to. All processes raise it.
  """
  refusal, path = "", epath.Path(model_dir) / LOCK_FILE
  with contextlib.ExitStack() as stack:
    if jax.process_index() == 0 and "://" not in os.fspath(model_dir):
      try:
        path.parent.mkdir(parents=True, exist_ok=True)
        refusal = _lock(stack.enter_context(open(path, "a+")))
      except OSError as error:
        refusal = f"cannot be written to ({error}). Set it to a writable folder"
    if refusal := broadcast_text(refusal, f"run lock {model_dir}"):
      raise ValueError(f"MODEL_DIR {model_dir} {refusal} (--gin.MODEL_DIR=\"'...'\")")
    yield


def _lock(file: Any) -> str:
  """Locks a file until it is closed, and writes the process into it; returns why it cannot, or ""."""
  if not lock_until_closed(file):
    file.seek(0)
    return (
      f"is in use by another training run: {file.read().strip()}. Wait until that run ends, stop it, or "
      "give this run its own folder"
    )
  since = time.strftime("%Y-%m-%d %H:%M:%S %z")
  file.truncate(0)
  print(f"process {os.getpid()} on {socket.gethostname()}, since {since}", file=file, flush=True)
  return ""


def find_start_checkpoint(
  checkpoint_cfg: config.CheckpointConfig, model_dir: epath.PathLike, total_steps: int | None = None
) -> tuple[config.RestoreCheckpointConfig | None, str | None]:
  """Returns what a training run in `model_dir` restores: a config and the path of one checkpoint.

  The latest checkpoint in `model_dir` is preferred to `checkpoint_cfg.restore`. (None, None) means
  that the run starts from scratch. With `total_steps`, the step at which the run ends, the checkpoint
  must be from before it.

  Raises:
    ValueError: `checkpoint_cfg.restore` names several checkpoints, or none although it does not
      allow a start from scratch, or the run would end before it begins.
  """
  save, given = checkpoint_cfg.save or config.SaveCheckpointConfig(), checkpoint_cfg.restore
  # Unlike in T5X, whose restarted run would compute with parameters of the dtype that is stored.
  own = config.RestoreCheckpointConfig(
    path=os.fspath(model_dir),
    dtype=None if given is None else given.dtype,
    restore_dataset=save.save_dataset,
  )
  candidates = [own, given] if given is not None and given.paths() else [own]
  cfg, paths = config.get_first_valid_restore_config_and_paths(candidates)
  if cfg is not own and candidates[-1] is given and not given.fallback_to_scratch:
    config.find_checkpoints([given])
  if not paths:
    return None, None
  if len(paths) > 1:
    raise ValueError(
      f"RestoreCheckpointConfig names {len(paths)} checkpoints ({', '.join(paths[:3])}, ...), but "
      "training starts from one: set mode = 'latest' or 'specific' and one path"
    )
  step = folders.step_of(paths[0]) or 0
  if save.ignore_dataset_until is not None and step <= save.ignore_dataset_until:
    own.restore_dataset = False
  # A restart of a run that is complete is allowed.
  if total_steps is not None and step >= total_steps + (cfg is own):
    raise ValueError(
      f"TRAIN_STEPS (train.total_steps) must be more than {step}, the step of {paths[0]}, from which the "
      f"run starts, got {total_steps}. To train {total_steps} more steps, set TRAIN_STEPS = "
      f"{step + total_steps}, or TRAIN_STEPS_RELATIVE (train.relative_steps) = {total_steps}"
    )
  return cfg, paths[0]


def read_start_facts(model_dir: epath.PathLike, restore_path: str | None) -> dict[str, Any]:
  """Returns the run facts with which a run in `model_dir` continues; {} if it starts anew.

  If those of the latest checkpoint are damaged or missing, they are read from the checkpoints before it, to
  which the run falls back.
  """
  is_own = restore_path and epath.Path(restore_path).parent == epath.Path(model_dir)
  for step in reversed(folders.all_steps(model_dir) if is_own else []):
    with contextlib.suppress(ValueError):
      if facts := folders.read_run_facts(folders.checkpoint_path(model_dir, step)):
        return facts
  return {}


def read_source_config(path: epath.PathLike) -> dict[str, Any]:
  """Returns the config.json of Transformers with which a checkpoint's model came; {} if there is none.

  It is a file of a Hugging Face folder and of a checkpoint that was converted from one. Runs that started
  from either store it as a run fact.
  """
  folder = peft_folder.find_base(path) if peft_folder.is_peft(path) else path
  file = epath.Path(folder) / hugging_face_folder.CONFIG
  if file.exists():
    return hugging_face_folder.read_config(file)
  with contextlib.suppress(ValueError):  # Damaged facts are reported by the restore.
    return dict(folders.read_run_facts(path).get(SOURCE_CONFIG) or {})
  return {}


def check_model(
  model: Any, digests: Mapping[str, str], restore_cfg: config.RestoreCheckpointConfig | None
) -> None:
  """Checks that a model has the vocabularies and computes what its checkpoints were trained with.

  With others of the same size, the parameters would give meaningless texts without an error.

  Args:
    model: the run's model.
    digests: the contents of its vocabularies, by side (`data.vocabulary_digests`). Those that are missing
      here, or in the checkpoints of other programs, are not compared.
    restore_cfg: the checkpoints. Those of Hugging Face, or converted from one, state the network's settings.

  Raises:
    ValueError: a vocabulary differs, or the network has other settings. With `strict = False` different
      settings are logged.
  """
  cfg, paths = config.get_first_valid_restore_config_and_paths([restore_cfg] if restore_cfg else [])
  for path in paths:
    trained: Mapping[str, str] = {}
    with contextlib.suppress(ValueError):  # raised again by the restore
      trained = folders.read_run_facts(path).get(VOCABULARIES) or {}
    if changed := [side for side in digests if trained.get(side, digests[side]) != digests[side]]:
      raise ValueError(
        f"The model's vocabulary ({', '.join(changed)}) is not the one with which {path} was trained. Use "
        "the original file, or accept the other one with verify_matching_vocabs_fn = None"
      )
    if differences := list(_differing_settings(model, path)):
      lines = "\n  ".join(differences)
      message = (
        f"{path}/{hugging_face_folder.CONFIG} does not describe this run's model. Set\n  {lines}"
      )
      if cfg is None or cfg.strict:
        raise ValueError(
          f"{message}\nor accept another computation with RestoreCheckpointConfig.strict = False"
        )
      _log.warning("%s", message)


def _differing_settings(model: Any, path: str) -> Iterator[str]:
  """Yields what has to be set so that a model computes what the config.json of a checkpoint states."""
  file = epath.Path(path) / hugging_face_folder.CONFIG
  if not file.exists():
    return
  stated, network = hugging_face_folder.read_config(file), model.network_config
  arrays = to_plain_tree(folders.read_arrays(path))
  settings = hugging_face_folder.network_settings(file, stated, arrays)
  for name, value in settings.items():
    given = getattr(network, name, value)  # A user's own network may lack the field.
    given = tuple(given) if isinstance(given, list) else given
    if name == "decoder_start_token_id" and given is None:  # It means the padding's.
      given = network.pad_id
    if name not in _FREE and given != value:
      yield f"network.{type(network).__name__}.{name} = {value!r} (it is {given!r})"
  expected, end = stated.get("eos_token_id"), model.output_vocabulary.eos_id
  is_shifted = settings.get("padding_never_follows", False)
  ends = [x for x in (expected if isinstance(expected, list) else [expected]) if x is not None]
  ends = [x + is_shifted for x in ends if x + is_shifted < settings["vocab_size"]]
  if ends and end is not None and end not in ends:
    yield f"the folder's vocabulary, whose texts end with token {expected} (not {end - is_shifted})"


def restore_for_inference(
  model: Any,
  restore_cfg: config.RestoreCheckpointConfig,
  partitioner: BasePartitioner,
  task_feature_lengths: Mapping[str, int],
) -> tuple[Any, Any]:
  """Returns an `InferenceState` of one checkpoint, and the same with PartitionSpecs in place of arrays.

  Args:
    model: the model.
    restore_cfg: the checkpoint.
    partitioner: specifies how the parameters are sharded.
    task_feature_lengths: the lengths of the features.

  Raises:
    ValueError: there is no checkpoint, or it belongs to another model.
  """
  lengths = model.FEATURE_CONVERTER_CLS(pack=False).get_model_feature_lengths(task_feature_lengths)
  initializer = initializers.TrainStateInitializer(
    optimizer_def=None,
    init_fn=model.get_initial_variables,
    input_shapes={name: (1, length) for name, length in lengths.items()},
    partitioner=partitioner,
  )
  config.find_checkpoints([restore_cfg])
  return initializer.from_checkpoint([restore_cfg]), initializer.train_state_axes


def create_checkpoint_manager_and_restore(
  train_state_initializer: initializers.TrainStateInitializer,
  partitioner: BasePartitioner,
  restore_checkpoint_cfg: config.RestoreCheckpointConfig | None,
  restore_path: str | None,
  fallback_init_rng: jax.Array | None,
  save_checkpoint_cfg: config.SaveCheckpointConfig | None = None,
  model_dir: epath.PathLike | None = None,
  ds_iter: Any = None,
  use_orbax: bool = False,
) -> tuple[TrainState | None, OrbaxCheckpointManagerInterface | None]:
  """Returns (restored train state or None, manager or None), with which a run begins.

  Args:
    train_state_initializer: knows the train state's shapes.
    partitioner: specifies the sharding of restored arrays.
    restore_checkpoint_cfg: how to restore (`find_start_checkpoint` returns it with the path).
    restore_path: the checkpoint to restore, or None.
    fallback_init_rng: for values that the checkpoint lacks, if the config allows that.
    save_checkpoint_cfg: how to save; None for a manager that only restores.
    model_dir: the folder to save into.
    ds_iter: the training data's iterator.
    use_orbax: T5X's switch between layouts. It has no effect: checkpoints have Orbax's layout.

  Raises:
    CheckpointMismatchError: the checkpoint belongs to another model.
    UnreadableCheckpointError: the checkpoint is damaged.
  """
  if save_checkpoint_cfg is None and restore_path is None:
    return None, None
  manager = config.create_orbax_checkpoint_manager(
    save_cfg=save_checkpoint_cfg,
    restore_cfg=restore_checkpoint_cfg,
    train_state=train_state_initializer.global_train_state_shape,
    partitioner=partitioner,
    ds_iter=ds_iter,
    model_dir=model_dir,
  )
  cfg, init = restore_checkpoint_cfg, train_state_initializer.from_scratch
  if restore_path is None or cfg is None:
    return None, manager
  fallback_state = initializers.get_fallback_state(cfg, init, fallback_init_rng)
  return _restore_latest_undamaged(manager, restore_path, cfg, fallback_state, model_dir), manager


def _restore_latest_undamaged(
  manager: OrbaxCheckpointManagerInterface,
  path: str,
  cfg: config.RestoreCheckpointConfig,
  fallback_state: Mapping[str, Any] | None,
  model_dir: epath.PathLike | None,
) -> Any:
  """Restores `path`, or if it is MODEL_DIR's latest checkpoint and damaged, the one before it."""
  while True:
    state, damage = None, ""
    try:
      state = initializers.restore(manager, path, cfg, fallback_state)
    except folders.UnreadableCheckpointError as error:
      damage = str(error)
    # A process sees only damage in its part.
    damages = allgather_text(damage, f"restored {path}")
    if not any(damages):
      return state
    folder, older = epath.Path(path), folders.older_steps(path)
    is_own = model_dir is not None and folder.parent == epath.Path(model_dir)
    damage = next(filter(None, damages))
    if not (is_own and cfg.mode == "latest" and older):
      raise folders.UnreadableCheckpointError(damage)
    path = os.fspath(folders.checkpoint_path(folder.parent, older[-1]))
    if jax.process_index() == 0:
      renamed = folder.with_name(f"damaged_{folder.name}")
      if renamed.exists():  # A checkpoint of this step was damaged, and written again, before.
        renamed = folder.with_name(f"{renamed.name}_{time.time_ns()}")
      folder.rename(renamed)
      _log.error("%s It is renamed to %s; the run continues from %s", damage, renamed, path)
    broadcast_text("", f"renamed {folder.name}")  # The others wait for the rename.
    manager.reload()
