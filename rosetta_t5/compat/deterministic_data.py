"""Training data that a run continues by step number, as in T5X's pretrain_deterministic.gin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from absl import logging
from etils import epath

from rosetta_t5 import data
from rosetta_t5.checkpoints.checkpoint_folders import latest_step
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
  model_dir: epath.PathLike | None = None,
  start_step: int = 0,
) -> tf.data.Dataset:
  """Returns the batches of `get_dataset`, starting with the one for the run's next step.

  T5X's gin files name this function, but the published T5X does not contain it. A run that continues
  in MODEL_DIR skips the batches of its earlier steps without a stored position. Reading those again
  takes time, so long runs should store the position (SaveCheckpointConfig.save_dataset = True). Two
  runs get equal batches if they have the same `cfg.seed`.

  Args:
    cfg: the dataset.
    shard_id: which shard of the data to read.
    num_shards: the number of shards.
    feature_converter_cls: see `get_dataset`.
    num_epochs: passes over the data; None for an endless dataset.
    continue_from_last_checkpoint: whether to start at the step of MODEL_DIR's last checkpoint.
    model_dir: the folder of the run's checkpoints; None starts at `start_step`.
    start_step: the step that uses the first batch of the data.

  Raises:
    ValueError: `get_dataset` cannot read the data, the data is prepared, or the last checkpoint's step
      is before `start_step`.
  """
  if isinstance(cfg.mixture_or_task_name, PreparedTask):
    raise ValueError(
      "get_deterministic_dataset reads SeqIO tasks only. Prepared data always has the same order: "
      "leave train.get_dataset_fn out, and set SaveCheckpointConfig.save_dataset = True."
    )
  dataset = data.get_dataset(cfg, shard_id, num_shards, feature_converter_cls, num_epochs)
  last = latest_step(model_dir) if model_dir and continue_from_last_checkpoint else None
  if last is None:
    return dataset
  if last < start_step:
    raise ValueError(
      f"get_deterministic_dataset.start_step must not exceed the step of the last checkpoint in "
      f"{model_dir}, got {start_step}: set it to {last} or less."
    )
  logging.info("Dataset '%s': skipping %d batches", cfg.name, last - start_step)
  return dataset.skip(last - start_step)
