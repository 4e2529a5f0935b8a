"""A task that reads files of tf.train.Example for inference."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence

from rosetta_t5.data.tensorflow_import import seqio, tf


def create_task_from_tfexample_file(
  paths: Sequence[str],
  file_type: str,
  inputs_key: str,
  targets_key: str | None,
  features: Mapping[str, seqio.Feature],
  task_id: str | None = None,
) -> str:
  """Registers a task with the split `infer` and returns its name (T5X's function).

  A second call with the same files and keys returns the same task.

  Args:
    paths: file names or patterns.
    file_type: the type of all files; must be 'tfrecord'.
    inputs_key: the key of the input text.
    targets_key: the key of the target text, for scores; None for empty targets.
    features: {"inputs": Feature, "targets": Feature} with their vocabularies.
    task_id: the last part of the task's name; None means a digest of the file names and keys.

  Raises:
    ValueError: no such file exists, or this type of file is not supported.
  """
  paths = [paths] if isinstance(paths, str) else list(paths)
  if file_type != "tfrecord":
    raise ValueError(
      "create_task_from_tfexample_file.file_type must be 'tfrecord', got "
      f"{file_type!r}: set TF_EXAMPLE_FILE_TYPE = 'tfrecord' and give TFRecord files"
    )
  if not tf.io.gfile.glob(paths):
    raise ValueError(
      f"There is no file {', '.join(map(repr, paths))}: set TF_EXAMPLE_FILE_PATHS "
      "(create_task_from_tfexample_file.paths) to a list of file names or patterns"
    )
  if task_id is None:
    names = ":".join([*paths, inputs_key, targets_key or ""])
    task_id = hashlib.md5(names.encode(), usedforsecurity=False).hexdigest()[:10]
  name = f"infer_{task_id}"
  if name in seqio.TaskRegistry.names():
    return name
  keys = {"inputs": inputs_key, "targets": targets_key}
  schema = {key: tf.io.FixedLenFeature([], tf.string) for key in keys.values() if key}
  seqio.TaskRegistry.add(
    name,
    source=seqio.TFExampleDataSource({"infer": paths}, schema),
    preprocessors=[
      functools.partial(seqio.preprocessors.rekey, key_map=keys),
      seqio.preprocessors.tokenize_and_append_eos,
    ],
    output_features=dict(features),
  )
  return name
