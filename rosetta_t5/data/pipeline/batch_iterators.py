"""Iterators of host batches: the interface of data that is indexed by step, and adapters for other data."""

from __future__ import annotations

import abc
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from clu.data import dataset_iterator
from etils import epath

from rosetta_t5.data.reading.files import digest_of


class StepIndexedIterator(dataset_iterator.DatasetIterator):
  """A source whose batches are a function of the step, such as prepared data.

  Its position is a step number, which any number of hosts can restore.
  """

  is_shard_independent = True

  @abc.abstractmethod
  def save(self, filename: epath.PathLike, steps_back: int = 0) -> None:
    """Writes the position that the iterator had `steps_back` batches ago."""

  @abc.abstractmethod
  def measures(self, step: int) -> dict[str, float]:
    """Returns metrics of the data at the beginning of a step, by name."""


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
    self._first_digest = ""

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
      if first is None:
        raise ValueError(
          "The training data is empty: the dataset function's iterable has no batch."
        )
      if not isinstance(first, Mapping):
        raise ValueError(
          f"The training data's batch must be a dictionary of numpy arrays, got {type(first).__name__}"
        )
      self._iterator = itertools.chain([first], self._iterator)
      arrays = {name: np.asarray(value) for name, value in first.items()}
      numeric = [name for name in sorted(arrays) if arrays[name].dtype.kind != "O"]
      self._first_digest = digest_of(arrays[name].tobytes() for name in numeric)
      self._spec = {n: dataset_iterator.ArraySpec(a.dtype, a.shape) for n, a in arrays.items()}
    return self._spec

  def describe_data(self) -> dict[str, str]:
    """Returns a digest of the first batch, with which a restart compares its own."""
    _ = self.element_spec
    return {"first_batch": self._first_digest}

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
