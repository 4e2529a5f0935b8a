"""Files as a SeqIO source whose position tf.data can save."""

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
  """Returns a source of examples {name: text}.

  Args:
    files: for each split its files.
    readers: for each split what reads them.
    names: the examples' features.
  """
  seqio: Any = import_seqio()

  class FileSource(seqio.FileDataSource):
    """One reader a split, where SeqIO's own has one for all."""

    def get_dataset(self, split: str = "train", **options: Any) -> Any:
      self._reader = lambda path: _examples(readers[split], path, names)
      return super().get_dataset(split=split, **options)

    def list_shards(self, split: str) -> Sequence[str]:
      return list(files[split])

  return FileSource(read_file_fn=None, split_to_filepattern=files)


def _examples(reader: BlockReader, path: Any, names: Sequence[str]) -> Any:
  """Returns the tf.data.Dataset of one file's examples."""
  tf = import_tensorflow()

  def read_block(path: bytes, block: np.int64) -> tuple[Any, ...]:
    examples, more = reader.read(path.decode(), int(block))
    columns = [_as_array([fields[name] for fields in examples]) for name in names]
    return (np.bool_(more), *columns)

  def load(block: Any) -> list[Any]:
    # Stateless as far as tf.data can know: a block depends on its number alone.
    kinds = [tf.bool, *[tf.string] * len(names)]
    more, *columns = tf.numpy_function(read_block, [path, block], kinds, stateful=False)
    more.set_shape([])
    for column in columns:
      column.set_shape([None])
    return [more, *columns]

  def nothing() -> list[Any]:
    return [tf.constant(False), *[tf.constant([], tf.string)] * len(names)]

  def step(is_there: Any, block: Any) -> tuple[Any, Any]:
    more, *columns = tf.cond(is_there, lambda: load(block), nothing)
    return more, (is_there, dict(zip(names, columns, strict=True)))

  blocks = tf.data.Dataset.counter().scan(tf.constant(True), step)
  blocks = blocks.take_while(lambda is_there, _: is_there)
  return blocks.flat_map(lambda _, columns: tf.data.Dataset.from_tensor_slices(columns))


def _as_array(texts: Sequence[str]) -> np.ndarray:
  array = np.empty(len(texts), object)
  array[:] = [text.encode() for text in texts]
  return array
