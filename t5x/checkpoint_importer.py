"""T5X's `checkpoint_importer`: lazily read T5 checkpoints of Mesh TensorFlow, under T5X's names."""

from collections.abc import Mapping
from typing import Any

from etils import epath

from rosetta_t5.checkpoints.arrays.lazy_arrays import LazyArray
from rosetta_t5.checkpoints.arrays.parameter_trees import (
  rename_shared_biases as _maybe_correct_relpos_bias,
)
from rosetta_t5.checkpoints.arrays.state_dicts import flatten_arrays, unflatten_state_dict
from rosetta_t5.checkpoints.formats import mesh_tf
from rosetta_t5.checkpoints.formats.mesh_tf import *
from rosetta_t5.checkpoints.restore import find_mismatches, mismatch_error
from t5x.checkpoints import LazyThreadPoolArray


def restore_from_t5_checkpoint(
  state_dict: Mapping[str, Any],
  path: epath.PathLike,
  lazy_parameters: bool = False,
  strict: bool = True,
  translator: mesh_tf.CheckpointTranslator | None = None,
) -> dict[str, Any]:
  """Returns a nested state dict with the values of a Mesh TensorFlow checkpoint (T5X's function).

  Args:
    state_dict: the state dict of the model with T5X's Adafactor; only its shapes are used.
    path: a prefix, or a folder, whose latest checkpoint is then read.
    lazy_parameters: leave the values on disk until they are used.
    strict: raise an error for names that `state_dict` lacks; otherwise they are left out.
    translator: the rules; None for those of T5 1.0 and 1.1.

  Raises:
    CheckpointMismatchError: names or shapes differ.
  """
  arrays = mesh_tf.read_arrays(path, translator)
  expected = flatten_arrays(state_dict)
  # As in T5X, a name that only the model has is reported later, by the train state.
  ignored = {"missing"} if strict else {"missing", "unexpected"}
  mismatches = [m for m in find_mismatches(arrays, expected) if m.problem not in ignored]
  if mismatches:
    raise mismatch_error(path, mismatches)
  kept = {name: array for name, array in arrays.items() if strict or name in expected}
  return unflatten_state_dict(
    {n: x.get() if isinstance(x, LazyArray) and not lazy_parameters else x for n, x in kept.items()}
  )
