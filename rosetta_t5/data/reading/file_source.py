"""SeqIO data sources of files; tf.data can save and restore a position in them.

This module imports SeqIO, so it is imported when the first task is made.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rosetta_t5.data.reading import BlockReader
from rosetta_t5.data.tensorflow_import import seqio, tf

_COUNTED_BYTES = 1 << 30  # of a split; the number of examples in more data is estimated


class FileSource(seqio.FileDataSource):
  """A source of examples {name: text} with a reader for each split. A position in it contains no paths.

  Attributes:
    arguments: JSON values that determine the examples besides the files.
  """

  is_movable = True
  arguments: Mapping[str, Any] | None = None

  def __init__(self, splits: Mapping[str, tuple[Sequence[str], BlockReader]], names: Sequence[str]):
    """Makes a source of each split's files and reader; `names` are those of an example's texts."""
    patterns = {split: list(paths) for split, (paths, _) in splits.items()}
    super().__init__(read_file_fn=None, split_to_filepattern=patterns)
    self._files, self._names = splits, names

  def list_shards(self, split: str) -> Sequence[str]:
    """Returns the files of a split."""
    return list(self._files[split][0])

  def count_examples(self, split: str, max_bytes: int = _COUNTED_BYTES) -> tuple[int, bool]:
    """Returns the number of examples of a split, and whether it is exact.

    Files of more than `max_bytes` together are counted up to this size (at least one of them), and the
    number is that of the whole split in proportion.
    """
    paths, reader = self._files[split]
    sizes = [os.path.getsize(path) for path in paths]
    examples = counted = 0
    for path, size in zip(paths, sizes, strict=True):
      if counted and counted + size > max_bytes:
        return round(examples * sum(sizes) / counted), False
      examples += _count_in_file(reader, path)
      counted += size
    return examples, True

  def get_dataset(self, split: str = "train", **options: Any) -> tf.data.Dataset:
    """Returns the examples of a split; see `seqio.FileDataSource`."""
    paths, reader = self._files[split]
    source = seqio.FileDataSource(
      read_file_fn=lambda number: _examples(reader, paths, number, self._names),
      split_to_filepattern={split: list(paths)},
    )
    source.list_shards = lambda split: [str(number) for number in range(len(paths))]
    return source.get_dataset(split=split, **options)


class CountedTask(seqio.Task):
  """A task that counts the examples of its files, for example for `seqio.mixing_rate_num_examples`.

  A source of files states no number, because SeqIO would keep small ones in memory and in positions.
  """

  def num_input_examples(self, split: str) -> int | None:
    """Returns the number of examples of a split, or an estimate."""
    known = self.source.num_input_examples(split)
    return self.source.count_examples(split)[0] if known is None else known


@functools.lru_cache(maxsize=256)
def _count_in_file(reader: BlockReader, path: str) -> int:
  return sum(1 for _ in reader.examples(path))


def _examples(
  reader: BlockReader, paths: Sequence[str], number: Any, names: Sequence[str]
) -> tf.data.Dataset:
  """Returns the examples of the file with this number in `paths`."""
  types = [tf.bool, *[tf.string] * len(names)]

  def read_block(number: bytes, block: np.int64, is_block: np.bool_) -> list[Any]:
    examples, has_more = reader.read(paths[int(number)], int(block)) if is_block else ([], False)
    columns = [[fields[name].encode() for fields in examples] for name in names]
    return [np.bool_(has_more), *(np.array(column, object) for column in columns)]

  def step(is_block: Any, block: Any) -> tuple[Any, Any]:
    # For tf.data this function has no state, because a block depends only on its number.
    given = [number, block, is_block]
    has_more, *columns = tf.numpy_function(read_block, given, types, stateful=False)
    has_more.set_shape([])
    for column in columns:
      column.set_shape([None])
    return has_more, (is_block, dict(zip(names, columns, strict=True)))

  blocks = tf.data.Dataset.counter().scan(tf.constant(True), step)
  blocks = blocks.take_while(lambda is_block, _: is_block)
  return blocks.flat_map(lambda _, columns: tf.data.Dataset.from_tensor_slices(columns))
