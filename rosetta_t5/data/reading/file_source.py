"""Makes a SeqIO data source of files; tf.data can save and restore a position in it."""

from __future__ import annotations

import abc
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rosetta_t5.data.reading import BlockReader
from rosetta_t5.data.tensorflow_import import seqio, tf

_COUNTED_BYTES = 1 << 30  # of a split; the number of examples in more data is estimated


class LineSource(abc.ABC):
  """A SeqIO data source that knows the lines and the number of its examples."""

  @abc.abstractmethod
  def count_examples(self, split: str, max_bytes: int = _COUNTED_BYTES) -> tuple[int, bool]:
    """Returns the number of examples of a split, and whether it is exact.

    Files of more than `max_bytes` together are counted up to this size (at least one of them), and the
    number is that of the whole split in proportion.
    """

  @abc.abstractmethod
  def line_of(self, split: str, path: str, number: int) -> int:
    """Returns the line of the example with index `number`, from 0, among those of the file `path`."""


def make_file_source(
  files: Mapping[str, Sequence[str]],
  readers: Mapping[str, BlockReader],
  names: Sequence[str],
  arguments: Mapping[str, Any] | None = None,
) -> seqio.DataSource:
  """Returns a data source of examples {name: text}. A position in it contains no paths.

  Args:
    files: the files of each split.
    readers: the reader of each split.
    names: the features of the examples.
    arguments: JSON values that determine the examples besides the files, the source's `arguments`.
  """

  class NumberedFiles(seqio.FileDataSource):
    """Reads files by their numbers, where SeqIO's class expands patterns."""

    def list_shards(self, split: str) -> Sequence[str]:
      return [str(number) for number in range(len(files[split]))]

  class FileSource(seqio.FileDataSource, LineSource):
    """Has a reader for each split."""

    is_movable = True

    def list_shards(self, split: str) -> Sequence[str]:
      return list(files[split])

    def count_examples(self, split: str, max_bytes: int = _COUNTED_BYTES) -> tuple[int, bool]:
      return count_examples(readers[split], tuple(files[split]), max_bytes)

    def line_of(self, split: str, path: str, number: int) -> int:
      return readers[split].line_of(path, number)

    def get_dataset(self, split: str = "train", **options: Any) -> Any:
      paths = {str(number): path for number, path in enumerate(files[split])}
      source = NumberedFiles(
        read_file_fn=lambda number: _examples(readers[split], paths, number, names),
        split_to_filepattern=files,
      )
      return source.get_dataset(split=split, **options)

  source = FileSource(read_file_fn=None, split_to_filepattern=files)
  source.arguments = arguments
  return source


@functools.lru_cache(maxsize=256)
def _count_in_file(reader: BlockReader, path: str) -> int:
  return sum(1 for _ in reader.examples(path))


def count_examples(reader: BlockReader, paths: Sequence[str], max_bytes: int) -> tuple[int, bool]:
  """Returns what `LineSource.count_examples` does for files that `reader` reads."""
  sizes = [os.path.getsize(path) for path in paths]
  examples = counted = number = 0
  for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
    if number and counted + size > max_bytes:
      return round(examples * sum(sizes) / max(counted, 1)), False
    examples += _count_in_file(reader, path)
    counted += size
  return examples, True


@functools.cache
def counted_task_class() -> type[seqio.Task]:
  """Returns a class of SeqIO tasks that count the examples of their files.

  A source of files states no number, because SeqIO would keep small ones in memory and in positions.
  """

  class CountedTask(seqio.Task):
    """A task with a number of examples, for example for `seqio.mixing_rate_num_examples`."""

    def num_input_examples(self, split: str) -> int | None:
      known = self.source.num_input_examples(split)
      return self.source.count_examples(split)[0] if known is None else known

  return CountedTask


def _examples(
  reader: BlockReader, paths: Mapping[str, str], number: Any, names: Sequence[str]
) -> Any:
  """Returns a tf.data.Dataset of the examples of the file with this number in `paths`."""
  text_types = [tf.string] * len(names)

  def read_block(number: bytes, block: np.int64) -> list[Any]:
    file = number.decode()
    # Positions that older versions saved contain the path.
    examples, has_more = reader.read(paths.get(file, file), int(block))
    columns = [[fields[name].encode() for fields in examples] for name in names]
    return [np.bool_(has_more), *(np.array(column, object) for column in columns)]

  def load(block: Any) -> list[Any]:
    # For tf.data this function has no state, because a block depends only on its number.
    types = [tf.bool, *text_types]
    has_more, *columns = tf.numpy_function(read_block, [number, block], types, stateful=False)
    has_more.set_shape([])
    for column in columns:
      column.set_shape([None])
    return [has_more, *columns]

  def load_nothing() -> list[Any]:
    return [tf.constant(False), *(tf.constant([], dtype) for dtype in text_types)]

  def step(is_block: Any, block: Any) -> tuple[Any, Any]:
    has_more, *columns = tf.cond(is_block, lambda: load(block), load_nothing)
    return has_more, (is_block, dict(zip(names, columns, strict=True)))

  blocks = tf.data.Dataset.counter().scan(tf.constant(True), step)
  blocks = blocks.take_while(lambda is_block, _: is_block)
  return blocks.flat_map(lambda _, columns: tf.data.Dataset.from_tensor_slices(columns))
