"""T5X's `interactive_model`: a model for interactive use, such as in a notebook."""

import enum

from rosetta_t5.data.pipeline.inference_data import (
  get_batches_from_seqio,
  get_dataset_from_natural_text_examples,
  get_seqio_task_from_examples,
)
from rosetta_t5.inference.text_inference import InferenceType
from rosetta_t5.interactive import InteractiveModel, open_model
from t5x.utils import extract_tokens_and_aux_values as _extract_tokens_and_aux_values


class T5XScriptType(enum.Enum):
  """The kind of run that a gin file configures."""

  FINETUNING = 1
  INFERENCE = 2
  EVALUATION = 3
  PRETRAINING = 4


# The runs that do not train.
_RUNS = {T5XScriptType.INFERENCE: "infer", T5XScriptType.EVALUATION: "eval"}


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
    script_type: the kind of run. FINETUNING and PRETRAINING are run by `t5x.train`, INFERENCE by
      `t5x.infer`, EVALUATION by `t5x.eval`.
    task_name: the task, for example from `get_seqio_task_from_examples`.
    partitioner_config_str: gin that binds the partitioner.
    model_config_str: gin that defines MODEL.
    train_steps: TRAIN_STEPS, including the steps of the checkpoint.
    imports_str: imports that the bindings of the partitioner and model need.

  Raises:
    ValueError: INFERENCE or EVALUATION of a model that was not restored from a checkpoint.
  """
  run = _RUNS.get(script_type, "train")
  restore, output_dir = interactive_model.restore_cfg, interactive_model.output_dir
  batch_size = interactive_model.batch_size
  if run == "train":
    save = interactive_model.save_cfg
    values = (
      f"MODEL_DIR = {output_dir!r}\nBATCH_SIZE = {batch_size}\nTRAIN_STEPS = {train_steps}\n"
      "USE_CACHED_TASKS = False\nSHUFFLE_TRAIN_EXAMPLES = False\n"
      f"utils.SaveCheckpointConfig:\n  period = {save.period}\n  dtype = {save.dtype!r}\n"
      f"  keep = {save.keep}\n  save_dataset = {save.save_dataset}\n"
      "train/utils.DatasetConfig.pack = False\ntrain_eval/utils.DatasetConfig.pack = False\n"
    )
  elif restore is None:
    raise ValueError(f"a run for {script_type.name} needs an InteractiveModel with checkpoint_path")
  else:
    values = (
      f"{run.upper()}_OUTPUT_DIR = {output_dir!r}\nCHECKPOINT_PATH = {restore.path!r}\n"
      "MIXTURE_OR_TASK_SPLIT = 'validation'\n"
      f"utils.DatasetConfig.batch_size = {batch_size}\n"
    )
  values += (
    f"MIXTURE_OR_TASK_NAME = {task_name!r}\n"
    f"TASK_FEATURE_LENGTHS = {dict(interactive_model.task_feature_lengths)!r}\n"
    "DROPOUT_RATE = 0.0\n"
  )
  if restore is not None:
    values += (
      f"utils.RestoreCheckpointConfig:\n  path = {restore.path!r}\n  mode = {restore.mode!r}\n"
      f"  dtype = {restore.dtype!r}\n"
    )
  head = f"from __gin__ import dynamic_registration\n\nimport __main__ as {run}_script\n"
  head += "from t5x import utils\n"
  include = f"include 't5x/configs/runs/{'pretrain' if run == 'train' else run}.gin'\n"
  # The values come last, so that they override the bindings of models and partitioners.
  parts = [head, imports_str, include, model_config_str, partitioner_config_str, values]
  return "\n".join(filter(None, parts))
