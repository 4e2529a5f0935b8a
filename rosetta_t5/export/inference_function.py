"""The function that is exported, from parameters and features to results, and its form as StableHLO."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax.core import unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import export as jax_export

from rosetta_t5 import checkpoints, data, manifest
from rosetta_t5.argument_types import Positive
from rosetta_t5.inference.infer_fn import inference_step
from rosetta_t5.parallel import BasePartitioner

PyTree = Any
Features = Mapping[str, Any]
InferenceFn = Callable[[PyTree, Features], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class CustomInferenceMode:
  """Exports another method of a model than the two usual ones (T5X: CustomInferenceMode).

  Attributes:
    model_fn_name: the name of the method, which is called as f(params, batch).
    fetch_output: converts what it returns to the results; None for its leaves in order.
  """

  model_fn_name: str
  fetch_output: Callable[[PyTree], Any] | None = None


_MODES = {
  "predict": CustomInferenceMode("predict_batch_with_aux"),
  "score": CustomInferenceMode("score_batch"),
}


def create_inference_function(
  *,
  model: Any,
  inference_mode: str | CustomInferenceMode,
  partitioner: BasePartitioner | None = None,
  train_state_initializer: Any = None,
  decoding_state_callback_fn: Callable[..., Any] | None = None,
  enable_jax2tf: bool = False,
  enable_xla: bool = True,
  polymorphic_shapes_inputs: Any = None,
  native_lowering: bool = True,
  model_fn_extra_kwargs: Mapping[str, Any] | None = None,
  output_len: Positive | None = None,
) -> InferenceFn:
  """Returns f(params, features) → the model's outputs as a flat tuple (as in T5X).

  Args:
    model: the model.
    inference_mode: 'predict' for (decodes, scores), 'score' for (scores,), or a custom mode. With
      experts, the last result is the fraction of each example's tokens that no expert computed.
    partitioner: accepted as in T5X; an exported function runs on one device, or its caller shards it.
    train_state_initializer: accepted as in T5X.
    decoding_state_callback_fn: called with the decoding state after each step.
    enable_jax2tf: whether to return a function of TensorFlow tensors.
    enable_xla: accepted as in T5X; False is an error, because jax always exports StableHLO.
    polymorphic_shapes_inputs: with enable_jax2tf, the shapes with symbolic dimensions, such as
      {"encoder_input_tokens": "b, ..."}; None for none.
    native_lowering: accepted as in T5X; the function is always exported as StableHLO.
    model_fn_extra_kwargs: other arguments of the method, such as {"num_decodes": 4}.
    output_len: the number of results that the caller expects; None for any number.

  Raises:
    ValueError: the mode does not exist, enable_xla is False, or the number of results differs.
  """
  del partitioner, train_state_initializer, native_lowering
  if not enable_xla:
    raise ValueError("export_lib.save.enable_xla = False is not possible with this jax: remove it")
  mode = _find_mode(inference_mode)

  def function(params: PyTree, features: Features) -> tuple[Any, ...]:
    batch = dict(features)
    decoder_params = dict(batch.pop("decoder_params", {}))
    if decoding_state_callback_fn is not None:
      decoder_params["state_callback_fn"] = decoding_state_callback_fn
    options = dict(model_fn_extra_kwargs or {})
    if decoder_params:
      options["decoder_params"] = decoder_params
    outputs = inference_step(model, mode.model_fn_name)(params, batch, **options)
    results = mode.fetch_output(outputs) if mode.fetch_output else tuple(jax.tree.leaves(outputs))
    if output_len not in (None, len(results)):
      raise ValueError(
        f"create_inference_function.output_len must be {len(results)}, the number of results of "
        f"{type(model).__name__}.{mode.model_fn_name}, got {output_len}: leave it None"
      )
    return results

  if not enable_jax2tf:
    return function
  from jax.experimental import jax2tf

  def function_for_tensorflow(params: PyTree, features: Features) -> tuple[Any, ...]:
    with _top_k_by_sorting():
      return function(params, features)

  # Decoding has no gradient.
  shapes = [None, polymorphic_shapes_inputs]
  return jax2tf.convert(function_for_tensorflow, polymorphic_shapes=shapes, with_gradient=False)


@contextlib.contextmanager
def _top_k_by_sorting() -> Iterator[None]:
  """Inside a `with`, traces top-k as a sort: TensorFlow 2.21 cannot read the top-k of jax 0.10."""

  def top_k(operand: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    index = jax.lax.broadcasted_iota(jnp.int32, operand.shape, operand.ndim - 1)
    # A stable sort: equal values keep their order, as in top-k.
    negative, order = jax.lax.sort((-operand, index), dimension=-1, num_keys=1)
    return -negative[..., :k], order[..., :k]

  lax: Any = jax.lax
  original, lax.top_k = lax.top_k, top_k
  try:
    yield
  finally:
    lax.top_k = original


def _find_mode(inference_mode: str | CustomInferenceMode) -> CustomInferenceMode:
  if isinstance(inference_mode, CustomInferenceMode):
    return inference_mode
  if inference_mode not in _MODES:
    raise ValueError(
      "export_lib.save.inference_mode must be 'predict', 'score' or a CustomInferenceMode, got "
      f"{inference_mode!r}"
    )
  return _MODES[inference_mode]


def feature_shapes(
  model: Any, task_feature_lengths: Mapping[str, int], batch_size: int | None
) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes of the model's features; a batch size of None becomes symbolic."""
  lengths = model.FEATURE_CONVERTER_CLS(pack=False).get_model_feature_lengths(task_feature_lengths)
  batch: Any = jax_export.symbolic_shape("b")[0] if batch_size is None else batch_size
  return {n: jax.ShapeDtypeStruct((batch, length), jnp.int32) for n, length in lengths.items()}


def restore_params(
  model: Any,
  restore_cfg: checkpoints.RestoreCheckpointConfig,
  partitioner: BasePartitioner,
  task_feature_lengths: Mapping[str, int],
) -> PyTree:
  """Returns the parameters of a checkpoint as numpy arrays.

  Raises:
    ValueError: there is no checkpoint, or it belongs to another model.
  """
  checkpoints.check_vocabularies(data.vocabulary_digests(model), restore_cfg)
  state, _ = checkpoints.restore_for_inference(
    model, restore_cfg, partitioner, task_feature_lengths
  )
  return jax.tree.map(np.asarray, unfreeze(state.params))


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
