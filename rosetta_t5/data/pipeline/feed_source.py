"""Makes one kind of source out of everything that gives host batches."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from clu.data import dataset_iterator
from etils import epath


def feed_source(data: Any) -> dataset_iterator.DatasetIterator:
  """Returns `data` as a clu DatasetIterator: next, element_spec, save, restore, reset.

  Args:
    data: such an iterator, a tf.data.Dataset, or an iterable of dictionaries of numpy arrays.

  Raises:
    ValueError: it is none of them.
  """
  if isinstance(data, dataset_iterator.DatasetIterator):
    return data
  # Whoever holds a tf.data.Dataset has imported TensorFlow; nobody else must.
  tensorflow = sys.modules.get("tensorflow")
  if tensorflow is not None and isinstance(data, tensorflow.data.Dataset):
    return dataset_iterator.TfDatasetIterator(data, checkpoint=True)
  if not isinstance(data, Iterable) or isinstance(data, Mapping | str):
    raise ValueError(
      f"The dataset function returned {type(data).__name__}. It must return a tf.data.Dataset, a "
      "clu DatasetIterator, or an iterable of batches: dictionaries of numpy arrays."
    )
  return IterableSource(data)


class IterableSource(dataset_iterator.DatasetIterator):
  """Batches of any iterable. Its position is a count; to restore it, batches are drawn and dropped.

  That is exact for an iterable that begins anew in the same order.
  """

  def __init__(self, batches: Iterable[Mapping[str, np.ndarray]]):
    self._batches = batches
    self._spec: dict[str, dataset_iterator.ArraySpec] | None = None
    self.reset()

  def reset(self) -> None:
    """Begins anew, which an iterator (unlike a list or a Dataset) cannot."""
    self._iterator: Iterator[Mapping[str, np.ndarray]] = iter(self._batches)
    self._drawn = 0

  def __next__(self) -> Mapping[str, np.ndarray]:
    batch = next(self._iterator)
    self._drawn += 1
    return batch

  @property
  def element_spec(self) -> dict[str, dataset_iterator.ArraySpec]:
    """Shapes and dtypes of the first batch, which is looked at and put back.

    That happens once: a generator cannot be asked while another thread draws from it.
    """
    if self._spec is not None:
      return self._spec
    first = next(self._iterator, None)
    if first is None:
      raise ValueError("The training data has no batch: the dataset function's iterable is empty.")
    self._iterator = itertools.chain([first], self._iterator)
    arrays = {name: np.asarray(value) for name, value in first.items()}
    self._spec = {n: dataset_iterator.ArraySpec(a.dtype, a.shape) for n, a in arrays.items()}
    return self._spec

  def save(self, filename: epath.PathLike) -> None:
    """Writes how many batches were drawn."""
    epath.Path(filename).write_text(json.dumps({"drawn": self._drawn}))

  def restore(self, filename: epath.PathLike) -> None:
    """Draws and drops batches up to the saved count."""
    saved = json.loads(epath.Path(filename).read_text())["drawn"]
    if saved < self._drawn:
      self.reset()
    for _ in range(saved - self._drawn):
      next(self)
