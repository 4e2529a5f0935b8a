"""Opens a model: that of a training run, a Hugging Face folder, or a model on its hub."""

import dataclasses
import functools
import os
import pathlib
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rosetta_t5 import checkpoints, config, data
from rosetta_t5.argument_types import near_hint
from rosetta_t5.checkpoints import adapter_checkpoints
from rosetta_t5.config.binding_checks import unused_bindings
from rosetta_t5.config.command_line import parse_command_line
from rosetta_t5.config.hugging_face_recipe import RUN_PART
from rosetta_t5.config.language.allow_list import limited_to_list
from rosetta_t5.config.language.binding import temporary_run_function
from rosetta_t5.config.language.statements import COMMAND_LINE, Import
from rosetta_t5.config.launch import join_run
from rosetta_t5.config.model_file import ARGUMENTS, NAME, read_model_file
from rosetta_t5.parallel import BasePartitioner

_ADVICE = (
  "give the MODEL_DIR of a training run, which contains config.gin and checkpoint_STEP folders, one of "
  "these folders, a Hugging Face folder with config.json, or the name of a model on its hub, OWNER/NAME"
)


@dataclasses.dataclass(frozen=True)
class OpenedModel:
  """A model with its parameters.

  Attributes:
    model: the model.
    partitioner: splits arrays over the devices.
    state: an `InferenceState` with parameters on the devices.
    state_axes: the same with PartitionSpecs in place of arrays.
    lengths: the feature lengths of the training data.
  """

  model: Any
  partitioner: BasePartitioner
  state: Any
  state_axes: Any
  lengths: Mapping[str, int]


def open_model_dir(
  model_dir: str | os.PathLike[str],
  flags: Sequence[str] = (),
  trust: bool = False,
  adapters: Sequence[str] | None = None,
) -> OpenedModel:
  """Returns a model with its parameters.

  Args:
    model_dir: see `read_run`, as for the other arguments and the errors.
  """
  return open_checkpoint(*read_run(model_dir, flags, trust, ("model", "partitioner"), adapters))


def read_run(
  model_dir: str | os.PathLike[str],
  flags: Sequence[str] = (),
  trust: bool = False,
  used: Collection[str] | None = None,
  adapters: Sequence[str] | None = None,
) -> tuple[Mapping[str, Any], checkpoints.RestoreCheckpointConfig]:
  """Returns the arguments of `train` for a model, and its checkpoint.

  Those of a training run are read from model.json, which runs no code. config.gin is read instead if there is
  none, if it says that the run has functions or classes that it cannot describe, if flags change the run,
  or if the user trusts the folder. For a Hugging Face folder, they are made from its files.

  Args:
    model_dir: a run's MODEL_DIR, whose best or latest checkpoint is used, one of its checkpoints, a Hugging Face
      folder, a PEFT folder, or the name of a model on its hub, such as google/flan-t5-small.
    flags: flags of `rosetta-t5 train` that change the run, such as --gin.NAME=VALUE.
    trust: whether config.gin may use all code that it names; otherwise only the listed code.
    used: the arguments of `train` that the caller uses besides the feature lengths; None for all.
    adapters: PEFT folders or runs, each PATH or PATH=WEIGHT, whose changes are added (`adapter_checkpoints`).

  Raises:
    ValueError: there is no such folder or model, or it is of another kind; model.json is invalid; a flag
      changes nothing that is used; or adapters are added to a model that has one already.
    SystemExit: config.gin cannot be built with these flags; the error has been printed.
  """
  if "--dry_run" in flags:
    raise config.ConfigError("--dry_run describes what gin files would run: leave --model_dir out")
  path, config_file = find_recipe(model_dir)
  restore_cfg = _select_checkpoint(model_dir)
  recipe = _read_recipe(config_file, flags, trust, used)
  if config_file == path:
    checkpoints.add_prompt(recipe["model"], *restore_cfg.paths())
  if not adapters:
    return recipe, restore_cfg
  if recipe["model"].adapter is not None or any(map(checkpoints.is_peft, restore_cfg.paths())):
    raise ValueError(
      "--adapter needs the base as --model_dir, which here has an adapter itself: give both with --adapter"
    )
  given = [adapter_checkpoints.parse_sum(text) for text in adapters]
  add: Any = functools.partial(adapter_checkpoints.add_changes, given=given)
  fns = (*restore_cfg.state_transformation_fns, add)
  return recipe, dataclasses.replace(restore_cfg, state_transformation_fns=fns)


def _read_recipe(
  file: pathlib.Path, flags: Sequence[str], trust: bool, used: Collection[str] | None
) -> Mapping[str, Any]:
  """Returns the arguments of `train`, of a config.gin or a Hugging Face folder."""
  if file.is_dir():
    return _read_gin(file, [f"--gin_file={RUN_PART}", *flags], trust, used)
  if (model_file := file.with_name(NAME)).is_file():
    run = read_model_file(model_file)
    run.use_data_folders()
    command = parse_command_line(["rosetta-t5", *flags])
    if run.is_complete and not (command.gin_file or command.gin_bindings or trust):
      join_run(command)
      run.import_modules()
      return run
  return _read_gin(file, flags, trust, used)


def read_model_recipe(
  model_dir: str | os.PathLike[str], flags: Sequence[str] = (), trust: bool = False
) -> tuple[Mapping[str, Any], str, str]:
  """Returns the arguments of `train` for a model, its checkpoint, and its part of the gin file.

  The gin file has what MODEL refers to, and nothing of the run that trained it.

  Args:
    model_dir: see `read_run`.
    flags: flags of `rosetta-t5 train`; gin files and bindings among them have no effect.
    trust: whether config.gin may use all code that it names; otherwise only the listed code.

  Raises:
    ValueError: there is no such folder, model or checkpoint, or it is of another kind.
    SystemExit: config.gin cannot be built; the error has been printed.
  """
  path, file = find_recipe(model_dir)
  flags = [flag for flag in flags if not flag.startswith(("--gin.", "--gin_"))]
  parts = [f"--gin_file={RUN_PART}"] if file == path else []
  with temporary_run_function(train), limited_to_list(not trust):
    # The run's own data is not opened.
    argv = ["rosetta-t5", *parts, f"--gin_file={file}", "--gin.MIXTURE_OR_TASK_NAME=''", *flags]
    run = config.run_from_command_line(train, argv)
    program = parse_command_line(argv).read_program()
    unused = {binding.key for binding in unused_bindings(program, train, ("model",))}
  bindings = [b for key, b in program.effective_bindings().items() if key not in unused]
  used = {word for b in bindings for word in re.findall(r"\w+", f"{b.name} {b.value!r}")}
  imports = [s.gin_statement for s in program.statements if isinstance(s, Import)]
  # gin needs the first import, which is a switch.
  lines = [s.format() for s in imports if s.bound_name() in {"dynamic_registration", *used}]
  lines += [f"{binding.name} = {binding.value!r}" for binding in bindings]
  _, (checkpoint, *_) = checkpoints.find_checkpoints([_select_checkpoint(model_dir)])
  return run, checkpoint, "\n".join(dict.fromkeys(lines))


def find_recipe(model_dir: str | os.PathLike[str]) -> tuple[pathlib.Path, pathlib.Path]:
  """Returns a model's folder and its config.gin (a Hugging Face folder itself); of a PEFT folder, its base's.

  Raises:
    ValueError: there is no such folder, or it is of another kind.
  """
  path = pathlib.Path(checkpoints.local_folder(model_dir)).absolute()
  if not path.is_dir():
    siblings = {*os.listdir(path.parent)} - {path.name} if path.parent.is_dir() else ()
    raise ValueError(f"There is no folder {model_dir}{near_hint(path.name, siblings)}: {_ADVICE}")
  if checkpoints.is_peft(path):
    return find_recipe(checkpoints.find_base(path))
  if checkpoints.is_hugging_face(path):
    return path, path
  # The folder is a MODEL_DIR, or a checkpoint in one.
  for file in (path / "config.gin", path.parent / "config.gin"):
    if file.is_file():
      return path, file
  raise ValueError(f"There is no {path / 'config.gin'}: {_ADVICE}")


def _select_checkpoint(model_dir: str | os.PathLike[str]) -> checkpoints.RestoreCheckpointConfig:
  """Returns the checkpoint of a model that `find_recipe` has found, and says if it is not a run's latest."""
  path = pathlib.Path(checkpoints.local_folder(model_dir)).absolute()
  is_foreign = checkpoints.is_peft(path) or checkpoints.is_hugging_face(path)
  is_run = not is_foreign and (path / "config.gin").is_file()
  best, value = checkpoints.best_checkpoint(path) if is_run else (None, "")
  if best and best.name != f"checkpoint_{checkpoints.latest_step(path)}":
    print(f"note: {best} is the best of the run, with {value}, not the latest", file=sys.stderr)
  mode = "latest" if is_run and not best else "specific"
  chosen = os.fspath(best or path)
  # Tokens may have been added to a folder of another program.
  return checkpoints.RestoreCheckpointConfig(chosen, mode, resize_vocabulary=is_foreign)


def _read_gin(
  file: pathlib.Path, flags: Sequence[str], trust: bool, used: Collection[str] | None
) -> dict[str, Any]:
  """Returns the arguments of `train` in a gin file: all if it is trusted, else those in ARGUMENTS."""
  with temporary_run_function(train), limited_to_list(not trust):
    argv = ["rosetta-t5", f"--gin_file={file}", *flags]
    recipe = config.run_from_command_line(train, argv)
    command = parse_command_line(argv)
    if used is not None and command.gin_bindings:
      _check_flags_are_used(command.read_program(), used)
  lengths = recipe["train_dataset_cfg"].task_feature_lengths
  names = recipe if trust else [name for name in ARGUMENTS if name in recipe]
  return {**{name: recipe[name] for name in names}, "task_feature_lengths": lengths}


def _check_flags_are_used(program: Any, used: Collection[str]) -> None:
  for binding in unused_bindings(program, train, used):
    if binding.source.file == COMMAND_LINE and "task_feature_lengths" not in binding.name.lower():
      raise config.ConfigError(
        f"--gin.{binding.name} has no effect: this command uses the run's {' and '.join(used)}, and "
        "nothing in them refers to it. Leave it out, refer to it (models.EncoderDecoderModel.decode_fn = "
        "@decoding.beam_search makes bindings of beam_search count), or use an option (--help)"
      )


def train(**arguments: Any) -> dict[str, Any]:
  """Returns its arguments; gin configures it in place of the run function of the same name."""
  return arguments


def open_checkpoint(
  recipe: Mapping[str, Any], restore_cfg: checkpoints.RestoreCheckpointConfig
) -> OpenedModel:
  """Returns the model of a run with the parameters of a checkpoint.

  Args:
    recipe: the arguments of `train`.
    restore_cfg: the checkpoint.

  Raises:
    ValueError: there is no checkpoint.
  """
  model, partitioner = recipe["model"], recipe["partitioner"]
  lengths = recipe["task_feature_lengths"]
  checkpoints.check_model(model, data.vocabulary_digests(model), restore_cfg)
  state, axes = checkpoints.restore_for_inference(model, restore_cfg, partitioner, lengths)
  return OpenedModel(model, partitioner, state, axes, lengths)
