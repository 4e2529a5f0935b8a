"""Makes a SeqIO data source of files; tf.data can save and restore a position in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rosetta_t5.data.reading import BlockReader
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio, import_tensorflow

if TYPE_CHECKING:
  import seqio


def make_file_source(
  files: Mapping[str, Sequence[str]], readers: Mapping[str, BlockReader], names: Sequence[str]
) -> seqio.DataSource:
  """Returns a data source of examples {name: text}.

  Args:
    files: the files of each split.
    readers: the reader of each split.
    names: the features of the examples.
  """
  seqio: Any = import_seqio()

  class OneReaderSource(seqio.FileDataSource):
    """Takes the files as they are listed, where SeqIO's class expands patterns."""

    def list_shards(self, split: str) -> Sequence[str]:
      return list(files[split])

  class FileSource(OneReaderSource):
    """Has a reader for each split."""

    def get_dataset(self, split: str = "train", **options: Any) -> Any:
      source = OneReaderSource(
        read_file_fn=lambda path: _examples(readers[split], path, names),
        split_to_filepattern=files,
      )
      return source.get_dataset(split=split, **options)

  return FileSource(read_file_fn=None, split_to_filepattern=files)


def _examples(reader: BlockReader, path: Any, names: Sequence[str]) -> Any:
  """Returns a tf.data.Dataset of one file's examples."""
  tf = import_tensorflow()
  text_types = [tf.string] * len(names)

  def read_block(path: bytes, block: np.int64) -> list[Any]:
    examples, has_more = reader.read(path.decode(), int(block))
    columns = [[fields[name].encode() for fields in examples] for name in names]
    return [np.bool_(has_more), *(np.array(column, object) for column in columns)]

  def load(block: Any) -> list[Any]:
    # For tf.data this function has no state, because a block depends only on its number.
    types = [tf.bool, *text_types]
    has_more, *columns = tf.numpy_function(read_block, [path, block], types, stateful=False)
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
