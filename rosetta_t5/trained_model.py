"""Opens what a training run has left: the model that its config.gin tells, with its last parameters."""

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
    partitioner: how arrays are split over devices.
    state: an `InferenceState`, its parameters on the devices.
    state_axes: the same with PartitionSpecs in place of arrays.
    lengths: tokens of inputs and targets that it was trained with.
  """

  model: Any
  partitioner: BasePartitioner
  state: Any
  state_axes: Any
  lengths: Mapping[str, int]


def train(**arguments: Any) -> dict[str, Any]:
  """Stands in for the run page where gin configures it, and returns what that would receive."""
  return arguments


def open_model_dir(model_dir: str | os.PathLike[str]) -> OpenedModel:
  """Returns the model of a training run.

  Args:
    model_dir: its MODEL_DIR, whose last checkpoint is taken, or one of its checkpoints.

  Raises:
    ValueError: there is no config.gin or no checkpoint, or what config.gin names is not there.
  """
  from rosetta_t5.config.configuration import configure
  from rosetta_t5.config.language.names import temporary_run_function
  from rosetta_t5.config.language.statements import read_program

  folder = pathlib.Path(model_dir).absolute()
  mode = "latest"
  if not (folder / "config.gin").is_file() and (folder.parent / "config.gin").is_file():
    folder, mode = folder.parent, "specific"
  if not (folder / "config.gin").is_file():
    raise ValueError(
      f"there is no {folder / 'config.gin'}: give the MODEL_DIR of a training run, which holds "
      "config.gin and checkpoint_STEP folders, or one of these"
    )
  sys.path.insert(0, os.getcwd())  # as python -m does: gin files import the user's modules
  with temporary_run_function(train):
    recipe = configure(read_program([str(folder / "config.gin")], [], ["."]), train)()
  model, partitioner = recipe["model"], recipe["partitioner"]
  lengths = recipe["train_dataset_cfg"].task_feature_lengths
  model_lengths = model.FEATURE_CONVERTER_CLS(pack=False).get_model_feature_lengths(lengths)
  initializer = checkpoints.TrainStateInitializer(
    optimizer_def=None,
    init_fn=model.get_initial_variables,
    input_shapes={name: (1, length) for name, length in model_lengths.items()},
    partitioner=partitioner,
  )
  path = os.fspath(folder if mode == "latest" else pathlib.Path(model_dir).absolute())
  state = initializer.from_checkpoint([checkpoints.RestoreCheckpointConfig(path, mode=mode)])
  if state is None:
    raise ValueError(
      f"there is no checkpoint in {folder}: train first, with utils.CheckpointConfig.save"
    )
  return OpenedModel(model, partitioner, state, initializer.train_state_axes, lengths)
