"""Training data whose place follows from the step alone, as T5X's pretrain_deterministic.gin wants it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from absl import logging

from rosetta_t5 import data
from rosetta_t5.checkpoints.model_dir.checkpoint_folders import latest_step
from rosetta_t5.data.prepared import PreparedTask

if TYPE_CHECKING:
  import tensorflow as tf


def get_deterministic_dataset(
  cfg: data.DatasetConfig,
  shard_id: int,
  num_shards: int,
  feature_converter_cls: Any,
  num_epochs: int | None = None,
  continue_from_last_checkpoint: bool = True,
  *,
  model_dir: str | os.PathLike[str] | None = None,
  start_step: int = 0,
) -> tf.data.Dataset:
  """Returns `get_dataset`'s batches from the one on that the run's next step takes.

  T5X's gin files name this function; T5X itself was published without it. A run that continues in
  MODEL_DIR skips what its steps have used, without a stored position; reading that again costs
  time, so long runs rather store it (SaveCheckpointConfig.save_dataset = True). Two runs see equal
  batches if they have equal `cfg.seed`.

  Args:
    cfg: the dataset.
    shard_id: which shard of the data to read.
    num_shards: shards in all.
    feature_converter_cls: see `get_dataset`.
    num_epochs: passes over the data, or None for no end.
    continue_from_last_checkpoint: whether to begin at the step of MODEL_DIR's last checkpoint.
    model_dir: where the run keeps its checkpoints; None begins at `start_step`.
    start_step: the step that the first batch of the data is for.

  Raises:
    ValueError: as `get_dataset`; the data is prepared, or the last checkpoint is of a step before
      `start_step`.
  """
  if isinstance(cfg.mixture_or_task_name, PreparedTask):
    raise ValueError(
      "get_deterministic_dataset is for SeqIO's tasks. Prepared data comes in the same order by "
      "itself: leave train.get_dataset_fn out, and set SaveCheckpointConfig.save_dataset = True."
    )
  dataset = data.get_dataset(cfg, shard_id, num_shards, feature_converter_cls, num_epochs)
  last = latest_step(model_dir) if model_dir and continue_from_last_checkpoint else None
  if last is None:
    return dataset
  if last < start_step:
    raise ValueError(
      f"The last checkpoint in {model_dir} is of step {last}, before the first batch's step "
      f"{start_step}: set get_deterministic_dataset.start_step to {last} or less."
    )
  logging.info("Dataset '%s': %d batches are skipped", cfg.name, last - start_step)
  return dataset.skip(last - start_step)
