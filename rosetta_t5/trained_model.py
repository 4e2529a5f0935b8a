"""Opens the model of a training run, from its config.gin and a checkpoint."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from rosetta_t5 import checkpoints
from rosetta_t5.parallel import BasePartitioner


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


def open_model_dir(model_dir: str | os.PathLike[str]) -> OpenedModel:
  """Returns the model of a training run.

  Args:
    model_dir: the run's MODEL_DIR, whose last checkpoint is used, or one of its checkpoints.

  Raises:
    ValueError: there is no config.gin or no checkpoint, or config.gin cannot be built.
  """
  from rosetta_t5.config.language.statements import read_program

  path = pathlib.Path(model_dir).absolute()
  config = next((f for f in (path / "config.gin", path.parent / "config.gin") if f.is_file()), None)
  if config is None:
    raise ValueError(
      f"There is no {path / 'config.gin'}: give the MODEL_DIR of a training run, which contains "
      "config.gin and checkpoint_STEP folders, or one of these folders"
    )
  # Gin files may import the user's modules, which `python -m` finds in the working directory.
  sys.path.insert(0, os.getcwd())
  recipe = run_arguments(read_program([str(config)]))
  mode = "latest" if config.parent == path else "specific"
  return open_checkpoint(recipe, checkpoints.RestoreCheckpointConfig(os.fspath(path), mode=mode))


def run_arguments(program: Any) -> dict[str, Any]:
  """Returns the arguments of `train` that a gin program configures (see `config.read_program`)."""
  from rosetta_t5.config.configuration import configure
  from rosetta_t5.config.language.names import temporary_run_function

  with temporary_run_function(train):
    return configure(program, train)()


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
  lengths = recipe["train_dataset_cfg"].task_feature_lengths
  model_lengths = model.FEATURE_CONVERTER_CLS(pack=False).get_model_feature_lengths(lengths)
  initializer = checkpoints.TrainStateInitializer(
    optimizer_def=None,
    init_fn=model.get_initial_variables,
    input_shapes={name: (1, length) for name, length in model_lengths.items()},
    partitioner=partitioner,
  )
  state = initializer.from_checkpoint([restore_cfg])
  if state is None:
    raise ValueError(
      f"There is no checkpoint in {restore_cfg.path}: train first, with utils.CheckpointConfig.save"
    )
  return OpenedModel(model, partitioner, state, initializer.train_state_axes, lengths)
