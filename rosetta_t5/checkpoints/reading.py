"""Reading of a checkpoint of any layout as lazily read arrays under T5X's names."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray, as_stored_array
from rosetta_t5.checkpoints.formats import mesh_tf, orbax_reader, t5x_legacy
from rosetta_t5.checkpoints.formats.hugging_face import folder as hugging_face_folder
from rosetta_t5.checkpoints.model_dir.checkpoint_folders import (
  CheckpointTypes,
  detect_checkpoint_type,
  older_steps,
)

# What the readers raise for missing and damaged files. RuntimeError is not one of them: a device that
# runs out of memory is not damage.
DAMAGE_ERRORS = (OSError, ValueError, KeyError, TypeError, IndexError)
_READERS: dict[CheckpointTypes, Callable[[Any], Mapping[str, Any]]] = {
  CheckpointTypes.ORBAX: orbax_reader.read_arrays,
  CheckpointTypes.T5X: t5x_legacy.read_arrays,
  CheckpointTypes.T5X_TF: mesh_tf.read_arrays,
  CheckpointTypes.HUGGING_FACE: hugging_face_folder.read_arrays,
}


class UnreadableCheckpointError(ValueError):
  """A checkpoint exists but cannot be read."""


def read_arrays(path: epath.PathLike) -> dict[str, StoredArray]:
  """Returns {flat name: array} of the checkpoint at `path`, under T5X's names. No value is read yet.

  Args:
    path: a checkpoint of any layout: Orbax, T5X's older one, Mesh TensorFlow (folder or prefix), or a
      Hugging Face folder. The layout is detected from the files.

  Raises:
    UnreadableCheckpointError: files are missing or damaged.
    ValueError: there is no checkpoint.
  """
  layout = detect_checkpoint_type(path)
  try:
    return {name: as_stored_array(value) for name, value in _READERS[layout](path).items()}
  except DAMAGE_ERRORS as error:
    raise unreadable_error(path, error) from error


def unreadable_error(path: epath.PathLike, error: Exception) -> UnreadableCheckpointError:
  """Returns the error for a damaged checkpoint, which names the reason and the older checkpoints."""
  folder = epath.Path(path)
  reason = textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
  text = f"checkpoint {folder} cannot be read: {reason}"
  older = older_steps(folder)
  if not older:
    return UnreadableCheckpointError(f"{text}. There is no older checkpoint beside it.")
  return UnreadableCheckpointError(
    f"{text}. Older steps beside it: {', '.join(map(str, older))}. To continue from step {older[-1]}, "
    f"move {folder.name} out of {folder.parent}."
  )
