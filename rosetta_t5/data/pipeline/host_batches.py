"""Batches of one host: any iterable of them as an iterator with a position, and checks of their values."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from clu.data import dataset_iterator
from etils import epath

_INT32 = np.iinfo(np.int32)


def as_batch_iterator(data: Any) -> dataset_iterator.DatasetIterator:
  """Returns `data` as a clu DatasetIterator, which has next, element_spec, save, restore and reset.

  Args:
    data: a DatasetIterator, a tf.data.Dataset, or an iterable of dictionaries of numpy arrays.

  Raises:
    ValueError: `data` has another type.
  """
  if isinstance(data, dataset_iterator.DatasetIterator):
    return data
  # A tf.data.Dataset exists only if TensorFlow has been imported, so it is not imported here.
  tensorflow = sys.modules.get("tensorflow")
  if tensorflow is not None and isinstance(data, tensorflow.data.Dataset):
    return dataset_iterator.TfDatasetIterator(data, checkpoint=True)
  if not isinstance(data, Iterable) or isinstance(data, Mapping | str):
    raise ValueError(
      "The dataset function must return a tf.data.Dataset, a clu DatasetIterator, or an iterable of "
      f"batches (dictionaries of numpy arrays), got {type(data).__name__}."
    )
  return IterableBatches(data)


class IterableBatches(dataset_iterator.DatasetIterator):
  """The batches of any iterable. Its position is a count, so restoring it reads and skips batches.

  The position is exact if the iterable yields the same batches each time.
  """

  def __init__(self, batches: Iterable[Mapping[str, np.ndarray]]):
    self._batches = batches
    self._iterator: Iterator[Mapping[str, np.ndarray]] = iter(batches)
    self._drawn = 0
    self._spec: dict[str, dataset_iterator.ArraySpec] | None = None

  def reset(self) -> None:
    """Returns to the first batch.

    Raises:
      ValueError: batches of an iterable that can be read only once, such as a generator, were returned.
    """
    if not self._drawn:
      return
    if iter(self._batches) is self._batches:
      raise ValueError(
        f"the training data is a {type(self._batches).__name__}, which can be read only once and "
        "cannot go back: return a list from the dataset function, or an object whose __iter__ starts over"
      )
    self._iterator = iter(self._batches)
    self._drawn = 0

  def __next__(self) -> Mapping[str, np.ndarray]:
    batch = next(self._iterator)
    self._drawn += 1
    return batch

  @property
  def element_spec(self) -> dict[str, dataset_iterator.ArraySpec]:
    """Shapes and dtypes of the first batch, which is read for them and then returned as usual.

    They are stored, because a generator cannot be read while another thread is reading it.
    """
    if self._spec is None:
      first = next(self._iterator, None)
      if not isinstance(first, Mapping):
        found = "no batch" if first is None else type(first).__name__
        raise ValueError(
          "The dataset function's iterable must contain batches, which are dictionaries of numpy "
          f"arrays, got {found}"
        )
      self._iterator = itertools.chain([first], self._iterator)
      arrays = {name: np.asarray(value) for name, value in first.items()}
      self._spec = {n: dataset_iterator.ArraySpec(a.dtype, a.shape) for n, a in arrays.items()}
    return self._spec

  def describe_data(self) -> dict[str, str]:
    """Returns {}: nothing is known about the data of an iterable."""
    return {}

  def save(self, filename: epath.PathLike) -> None:
    """Writes the number of batches that have been returned."""
    epath.Path(filename).write_text(json.dumps({"drawn": self._drawn}))

  def restore(self, filename: epath.PathLike) -> None:
    """Continues after the saved number of batches, which are read and dropped."""
    saved = json.loads(epath.Path(filename).read_text())["drawn"]
    if saved < self._drawn:
      self.reset()
    for _ in range(saved - self._drawn):
      next(self)


@dataclasses.dataclass(frozen=True)
class TokenLimit:
  """The number of token ids that a model knows.

  Attributes:
    size: the rows of its embedding table.
    origin: the argument that sets it.
  """

  size: int
  origin: str


def token_limit(model: Any) -> TokenLimit | None:
  """Returns the limit of a model's token ids; None if its network does not state one."""
  config = getattr(model, "network_config", None)
  size = getattr(config, "vocab_size", None)
  return TokenLimit(size, f"network.{type(config).__name__}.vocab_size") if size else None


def check_ids(batch: Mapping[str, np.ndarray], data: str, limit: TokenLimit | None) -> None:
  """Checks that token ids are in the vocabulary, and that other integers fit into the devices' int32.

  Args:
    batch: arrays by feature, [B, ...]. The integers of a feature `*_tokens` are token ids.
    data: names the data in the message, such as "the task 'squad'".
    limit: the model's limit; None checks only for negative ids.

  Raises:
    ValueError: a value is out of range.
  """
  for name, values in batch.items():
    if getattr(values, "dtype", np.dtype(object)).kind not in "iu" or not values.size:
      continue
    low, high, reason = _INT32.min, _INT32.max, ", because integers have 32 bits on the devices"
    if name.endswith("_tokens"):
      low, high, reason = 0, limit.size - 1 if limit else high, ""
      if limit is not None:
        reason = f", since the model's vocabulary has {limit.size} ids ({limit.origin})"
    if values.min() >= low and values.max() <= high:
      continue
    row, *column = np.argwhere((values < low) | (values > high))[0].tolist()
    at = f"row {row}, position {column[0]}" if column else f"row {row}"
    value = values[(row, *column)]
    if value == -1:
      reason += (
        " (-1 is the id of what a SentencePiece vocabulary lacks, mostly the end token, eos_id)"
      )
    raise ValueError(
      f"{data} has the value {value} in {name} ({at} of a batch): it must be from {low} to {high}{reason}. "
      "Correct the task's vocabulary or its preprocessors"
    )


def check_has_target(batch: Mapping[str, np.ndarray], data: str) -> None:
  """Checks that a training batch has a target token with a loss weight other than 0.

  Raises:
    ValueError: it has none, so there would be nothing to learn from.
  """
  for name in ("decoder_loss_weights", "decoder_target_tokens"):
    if name in batch and not batch[name].any():
      raise ValueError(
        f"a batch of {data} has no target to learn from: its {len(batch[name])} rows have only 0 in "
        f"{name}, which means padding. Check the task's targets (rosetta-t5 inspect shows them): the "
        "preprocessors must return at least one token, and TASK_FEATURE_LENGTHS must leave room for it"
      )
