"""The signatures that users' own dataset functions have (T5X's protocols)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rosetta_t5.data.dataset_config import DatasetConfig


class GetDatasetCallable(Protocol):
  """Makes the training data."""

  def __call__(
    self,
    cfg: DatasetConfig,
    shard_id: int,
    num_shards: int,
    feature_converter_cls: Callable[..., Any],
    num_epochs: int | None = None,
    continue_from_last_checkpoint: bool = True,
  ) -> Any:
    """Returns a tf.data.Dataset, or a clu DatasetIterator, of this shard's batches."""


class GetEvalDatasetCallable(Protocol):
  """Makes the data that the loss is measured on."""

  def __call__(
    self,
    cfg: DatasetConfig,
    shard_id: int,
    num_shards: int,
    eval_steps: int,
    feature_converter_cls: Callable[..., Any],
  ) -> Mapping[str, Any]:
    """Returns a dataset for each task."""
