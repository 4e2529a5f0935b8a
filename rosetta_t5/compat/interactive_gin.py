"""T5X's function that writes the setup of an interactive model as a gin file."""

from __future__ import annotations

import enum
from typing import Any

from rosetta_t5.interactive.model import InteractiveModel


class T5XScriptType(enum.Enum):
  """The kind of run that a gin file configures."""

  FINETUNING = 1
  INFERENCE = 2
  EVALUATION = 3
  PRETRAINING = 4


_RUNS = {
  T5XScriptType.FINETUNING: "train",
  T5XScriptType.PRETRAINING: "train",
  T5XScriptType.INFERENCE: "infer",
  T5XScriptType.EVALUATION: "eval",
}


def get_gin_config_from_interactive_model(
  interactive_model: InteractiveModel,
  script_type: T5XScriptType,
  task_name: str,
  partitioner_config_str: str,
  model_config_str: str,
  train_steps: int = 1,
  imports_str: str = "",
) -> str:
  """Returns a gin file for a run with an interactive model's setup (T5X's function).

  Args:
    interactive_model: determines the folder, lengths, batch size and checkpoint.
    script_type: the run. FINETUNING and PRETRAINING are for `t5x.train`, INFERENCE for `t5x.infer`,
      EVALUATION for `t5x.eval`.
    task_name: the task, for example from `get_seqio_task_from_examples`.
    partitioner_config_str: gin that binds the partitioner.
    model_config_str: gin that defines MODEL.
    train_steps: TRAIN_STEPS, including the steps of the checkpoint.
    imports_str: imports that these two strings need.

  Raises:
    ValueError: INFERENCE or EVALUATION of a model that was not restored from a checkpoint.
  """
  setup = interactive_model.setup
  restore = setup["restore"]
  run = _RUNS[script_type]
  if restore is None and run != "train":
    raise ValueError(
      f"A run for {script_type.name} needs a checkpoint: build the InteractiveModel with a "
      "checkpoint_path, such as that of the checkpoint that save_checkpoint() wrote"
    )
  values = _train_values(setup, train_steps) if run == "train" else _other_values(run, setup)
  values += (
    f"MIXTURE_OR_TASK_NAME = {task_name!r}\n"
    f"TASK_FEATURE_LENGTHS = {dict(setup['lengths'])!r}\n"
    "DROPOUT_RATE = 0.0\n"
  )
  if restore is not None:
    values += (
      f"utils.RestoreCheckpointConfig:\n  path = {restore.path!r}\n  mode = {restore.mode!r}\n"
      f"  dtype = {restore.dtype!r}\n"
    )
  head = (
    "from __gin__ import dynamic_registration\n\n"
    f"import __main__ as {run}_script\nfrom t5x import utils\n"
  )
  include = f"include 't5x/configs/runs/{'pretrain' if run == 'train' else run}.gin'\n"
  # The values come last, so that they override the bindings of models and partitioners.
  parts = [head, imports_str, include, model_config_str, partitioner_config_str, values]
  return "\n".join(part for part in parts if part)


def _other_values(run: str, setup: dict[str, Any]) -> str:
  return (
    f"{run.upper()}_OUTPUT_DIR = {setup['output_dir']!r}\n"
    f"CHECKPOINT_PATH = {setup['restore'].path!r}\n"
    "MIXTURE_OR_TASK_SPLIT = 'validation'\n"
    f"utils.DatasetConfig.batch_size = {setup['batch_size']}\n"
  )


def _train_values(setup: dict[str, Any], train_steps: int) -> str:
  save = setup["save"]
  return (
    f"MODEL_DIR = {setup['output_dir']!r}\n"
    f"BATCH_SIZE = {setup['batch_size']}\n"
    f"TRAIN_STEPS = {train_steps}\n"
    "USE_CACHED_TASKS = False\n"
    "SHUFFLE_TRAIN_EXAMPLES = False\n"
    f"utils.SaveCheckpointConfig:\n  period = {save.period}\n  dtype = {save.dtype!r}\n"
    f"  keep = {save.keep}\n  save_dataset = {save.save_dataset}\n"
    "train/utils.DatasetConfig.pack = False\n"
    "train_eval/utils.DatasetConfig.pack = False\n"
  )
