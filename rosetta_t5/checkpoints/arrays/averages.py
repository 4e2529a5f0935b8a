"""The parameters to evaluate in a checkpoint whose optimizer averages them."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

import numpy as np

from rosetta_t5.checkpoints.arrays.lazy_arrays import Index, StoredArray

_AVERAGE = re.compile(r"state/param_states/(?:.*/)?parameter_average/(.+)")
_SCHEDULE_FREE = re.compile(r"(state/param_states/(?:.*/)?)weight_sum")


def with_averages(arrays: Mapping[str, StoredArray]) -> dict[str, StoredArray]:
  """Returns a checkpoint's arrays with averages of the parameters, if it has any, in their place.

  They are those of `average_parameters`, or of a schedule-free optimizer: (y − (1 − b1)·z) / b1 for
  the stored parameters y.
  """
  averaged = dict(arrays)
  for prefix in [match[1] for match in map(_SCHEDULE_FREE.fullmatch, arrays) if match]:
    b1 = float(arrays[f"{prefix}b1"].get())
    for name in [name for name in arrays if name.startswith(f"{prefix}z/")]:
      target = f"target/{name.removeprefix(f'{prefix}z/')}"
      y, z = arrays[target], arrays[name]
      read = functools.partial(_extrapolate, y, z, b1)
      averaged[target] = StoredArray(y.shape, y.dtype, read, y.sliceable and z.sliceable)
  averages = ((match[1], match[0]) for match in map(_AVERAGE.fullmatch, arrays) if match)
  return averaged | {f"target/{parameter}": arrays[name] for parameter, name in averages}


def _extrapolate(y: StoredArray, z: StoredArray, b1: float, index: Index) -> np.ndarray:
  return (y.read(index) - (1 - b1) * z.read(index)) / b1
