"""Opens a run or a Hugging Face folder as an `InteractiveModel`."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence

from rosetta_t5.interactive.model import InteractiveModel
from rosetta_t5.trained_model import read_run
from rosetta_t5.training.optimizers.adafactor import Adafactor
from rosetta_t5.training.optimizers.factor_rules import standard_logical_factor_rules
from rosetta_t5.training.optimizers.optimizer_def import OptimizerDef


def open_model(
  source: str | os.PathLike[str],
  output_dir: str,
  batch_size: int = 8,
  task_feature_lengths: Mapping[str, int] | None = None,
  flags: Sequence[str] = (),
  optimizer_def: OptimizerDef | None = None,
) -> InteractiveModel:
  """Opens what `rosetta-t5 infer --model_dir` opens.

  Args:
    source: a run's MODEL_DIR, one of its checkpoints, a Hugging Face folder, or OWNER/NAME on its hub.
    output_dir: folder for checkpoints, metrics and model-info.txt.
    batch_size: number of examples in a batch.
    task_feature_lengths: length of each feature; None for those of the run or the folder.
    flags: change the run, such as ["--gin.decoding.temperature_sample.temperature=0.7"].
    optimizer_def: the optimizer of training steps; None for T5's Adafactor.

  Raises:
    ValueError: there is no such model.
  """
  run, restore_cfg = read_run(source, flags)
  model, lengths = copy.copy(run["model"]), task_feature_lengths or run["task_feature_lengths"]
  rules = standard_logical_factor_rules()
  model.optimizer_def = optimizer_def or Adafactor(decay_rate=0.8, logical_factor_rules=rules)
  shapes = model.FEATURE_CONVERTER_CLS(pack=False).get_model_feature_lengths(lengths)
  return InteractiveModel(
    batch_size=batch_size,
    task_feature_lengths=lengths,
    output_dir=output_dir,
    partitioner=run["partitioner"],
    model=model,
    dtype="float32",
    restore_mode=restore_cfg.mode,
    checkpoint_path=str(restore_cfg.path),
    input_shapes={name: (batch_size, length) for name, length in shapes.items()},
    restore_cfg=restore_cfg,
  )
