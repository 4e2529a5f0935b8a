"""What is exported: a model's predictions or scores as a function of parameters and features."""

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
from jax import export as jax_export

from rosetta_t5 import checkpoints
from rosetta_t5.parallel import BasePartitioner

PyTree = Any
Features = Mapping[str, Any]
InferenceFn = Callable[[PyTree, Features], tuple[Any, ...]]

_PROGRAM, _PARAMS, _ABOUT = "program.stablehlo", "params.npz", "about.json"


@dataclasses.dataclass(frozen=True)
class CustomInferenceMode:
  """A method of a model that is none of the usual ones (T5X's class).

  Attributes:
    model_fn_name: the method, called as f(params, batch).
    fetch_output: makes the results of what it returns; None for its leaves in order.
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
) -> InferenceFn:
  """Returns f(params, features) → the leaves of what the model says (T5X's function).

  Args:
    model: the model.
    inference_mode: 'predict' for (decodes, scores), 'score' for (scores,), or a mode of one's own.
    partitioner: T5X's choice; an exported function runs on one device, or as its caller splits it.
    train_state_initializer: goes with the partitioner.
    decoding_state_callback_fn: called with the state of decoding after each step.
    enable_jax2tf: return a function of TensorFlow's tensors.
    enable_xla: False is not possible any more; jax exports StableHLO.
    polymorphic_shapes_inputs: with enable_jax2tf, the shapes that stay open, such as
      {"encoder_input_tokens": "b, ..."}; None for none.
    native_lowering: T5X's choice; the function is always exported as StableHLO.
    model_fn_extra_kwargs: further arguments of the method, such as {"num_decodes": 4}.

  Raises:
    ValueError: there is no such mode, or enable_xla is False.
  """
  del partitioner, train_state_initializer, native_lowering
  if not enable_xla:
    raise ValueError(
      "export_lib.save.enable_xla = False is not possible with this jax: leave it out"
    )
  mode = _mode(inference_mode)
  extra = dict(model_fn_extra_kwargs or {})

  def function(params: PyTree, features: Features) -> tuple[Any, ...]:
    batch = dict(features)
    decoder_params = dict(batch.pop("decoder_params", {}))
    if decoding_state_callback_fn is not None:
      decoder_params["state_callback_fn"] = decoding_state_callback_fn
    options = {**extra, **({"decoder_params": decoder_params} if decoder_params else {})}
    outputs = getattr(model, mode.model_fn_name)(params, batch, **options)
    return (
      tuple(jax.tree.leaves(outputs)) if mode.fetch_output is None else mode.fetch_output(outputs)
    )

  if not enable_jax2tf:
    return function
  from jax.experimental import jax2tf

  def function_for_tensorflow(params: PyTree, features: Features) -> tuple[Any, ...]:
    with _top_k_by_sorting():
      return function(params, features)

  # Without a gradient: decoding has none.
  shapes = [None, polymorphic_shapes_inputs]
  return jax2tf.convert(function_for_tensorflow, polymorphic_shapes=shapes, with_gradient=False)


@contextlib.contextmanager
def _top_k_by_sorting() -> Iterator[None]:
  """Traces top-k as a sort: TensorFlow 2.21 cannot read the operation that jax 0.10 writes for it."""

  def top_k(operand: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    index = jax.lax.broadcasted_iota(jnp.int32, operand.shape, operand.ndim - 1)
    # Stable: of equal values the first comes first, as with top-k.
    negative, order = jax.lax.sort((-operand, index), dimension=-1, num_keys=1)
    return -negative[..., :k], order[..., :k]

  lax: Any = jax.lax
  original, lax.top_k = lax.top_k, top_k
  try:
    yield
  finally:
    lax.top_k = original


def _mode(inference_mode: str | CustomInferenceMode) -> CustomInferenceMode:
  if isinstance(inference_mode, CustomInferenceMode):
    return inference_mode
  if inference_mode not in _MODES:
    raise ValueError(
      f"export_lib.save.inference_mode = {inference_mode!r} does not exist: set 'predict', 'score' "
      "or a CustomInferenceMode"
    )
  return _MODES[inference_mode]


def feature_shapes(
  model: Any, task_feature_lengths: Mapping[str, int], batch_size: int | None
) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes of the model's features; a batch size of None stays open."""
  lengths = model.FEATURE_CONVERTER_CLS(pack=False).get_model_feature_lengths(task_feature_lengths)
  batch: Any = jax_export.symbolic_shape("b")[0] if batch_size is None else batch_size
  return {n: jax.ShapeDtypeStruct((batch, length), jnp.int32) for n, length in lengths.items()}


def restore_params(
  model: Any,
  restore_cfg: checkpoints.RestoreCheckpointConfig,
  partitioner: BasePartitioner,
  task_feature_lengths: Mapping[str, int],
) -> PyTree:
  """Returns a checkpoint's parameters on the host, as arrays of numpy.

  Raises:
    ValueError: there is no checkpoint, or it is of another model.
  """
  shapes = feature_shapes(model, task_feature_lengths, 1)
  initializer = checkpoints.TrainStateInitializer(
    optimizer_def=None,
    init_fn=model.get_initial_variables,
    input_shapes={name: x.shape for name, x in shapes.items()},
    partitioner=partitioner,
  )
  state = initializer.from_checkpoint([restore_cfg])
  if state is None:
    raise ValueError(
      f"there is no checkpoint to export in {restore_cfg.path} (mode = {restore_cfg.mode!r}): set "
      "CHECKPOINT_PATH (RestoreCheckpointConfig.path)"
    )
  return jax.tree.map(np.asarray, state.params)


def write_stablehlo(
  folder: epath.PathLike,
  function: InferenceFn,
  params: PyTree,
  features: Mapping[str, jax.ShapeDtypeStruct],
  about: Mapping[str, Any],
) -> None:
  """Writes a function and its parameters, for `load_stablehlo`.

  Args:
    folder: where to.
    function: f(params, features) of `create_inference_function`.
    params: the parameters.
    features: their shapes.
    about: facts for people and programs, as JSON knows them.
  """
  path = epath.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
  # Portable: what is exported on a CPU runs on a GPU.
  exported = jax_export.export(jax.jit(function), platforms=["cpu", "cuda"])(shapes, dict(features))
  (path / _PROGRAM).write_bytes(exported.serialize())
  flat = {"/".join(key.key for key in keys): x for keys, x in jax.tree.leaves_with_path(params)}
  # Numpy's files know no bfloat16: stored as the integers of the same bits.
  dtypes = {name: str(x.dtype) for name, x in flat.items()}
  stored = {n: x.view(np.uint16) if x.dtype == jnp.bfloat16 else x for n, x in flat.items()}
  with (path / _PARAMS).open("wb") as file:
    np.savez(file, **stored)
  (path / _ABOUT).write_text(json.dumps({**about, "dtypes": dtypes}, indent=2))


def load_stablehlo(folder: epath.PathLike) -> Callable[[Features], tuple[jax.Array, ...]]:
  """Returns the function that `save` has written, with its parameters; needs jax and numpy alone.

  Args:
    folder: the folder `stablehlo` of an export.

  Returns:
    f(features) → results; compiled once for each batch size.
  """
  path = epath.Path(folder)
  exported = jax_export.deserialize(bytearray((path / _PROGRAM).read_bytes()))
  dtypes = json.loads((path / _ABOUT).read_text())["dtypes"]
  params: dict[str, Any] = {}
  with (path / _PARAMS).open("rb") as file, np.load(file) as stored:
    for name, dtype in dtypes.items():
      *parents, leaf = name.split("/")
      node = params
      for parent in parents:
        node = node.setdefault(parent, {})
      node[leaf] = jnp.asarray(stored[name].view(jnp.dtype(dtype)))
  call = jax.jit(exported.call)
  return lambda features: call(params, dict(features))
