"""Models as StableHLO with their parameters, which run without TensorFlow."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax.core import unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import export as jax_export

from rosetta_t5 import manifest
from rosetta_t5.export.inference_function import Features, InferenceFn, PyTree

_PROGRAM, _PARAMS, _ABOUT = "program.stablehlo", "params.npz", "about.json"


def write_stablehlo(
  folder: epath.PathLike,
  function: InferenceFn,
  params: PyTree,
  features: Mapping[str, jax.ShapeDtypeStruct],
  about: Mapping[str, Any],
) -> None:
  """Writes a function and its parameters for `load_stablehlo`.

  Args:
    folder: the folder of the files.
    function: the function (params, features) from `create_inference_function`.
    params: the parameters.
    features: the shapes of the features.
    about: information about the model, which is stored as JSON.
  """
  path = epath.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  params = unfreeze(params)  # The file does not depend on types of flax.
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
  # For both platforms, so that a model exported on a CPU also runs on a GPU.
  exported = jax_export.export(jax.jit(function), platforms=["cpu", "cuda"])(shapes, dict(features))
  (path / _PROGRAM).write_bytes(exported.serialize())
  flat = flatten_dict(params, sep="/")
  # Numpy's format has no bfloat16, which is stored as integers with the same bits.
  dtypes = {name: str(x.dtype) for name, x in flat.items()}
  stored = {n: x.view(np.uint16) if x.dtype == jnp.bfloat16 else x for n, x in flat.items()}
  with (path / _PARAMS).open("wb") as file:
    np.savez(file, **stored)
  (path / _ABOUT).write_text(json.dumps({**about, "dtypes": dtypes}, indent=2))
  manifest.write(path, [_PROGRAM, _PARAMS, _ABOUT])


def load_stablehlo(folder: epath.PathLike) -> Callable[[Features], tuple[jax.Array, ...]]:
  """Loads a function and its parameters, without TensorFlow.

  Args:
    folder: the folder `stablehlo` of an export.

  Returns:
    f(features) → results, which is compiled once for each batch size.

  Raises:
    DamagedFileError: a file has changed since the export.
  """
  path = epath.Path(folder)
  manifest.verify(path)
  dtypes = json.loads((path / _ABOUT).read_text())["dtypes"]
  exported = jax_export.deserialize(bytearray((path / _PROGRAM).read_bytes()))
  with (path / _PARAMS).open("rb") as file, np.load(file) as stored:
    flat = {name: jnp.asarray(stored[name].view(jnp.dtype(d))) for name, d in dtypes.items()}
  params = unflatten_dict(flat, sep="/")
  call = jax.jit(exported.call)
  return lambda features: call(params, dict(features))
