"""Writes a checkpoint as a SavedModel with text on both sides, and beside it as StableHLO."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from rosetta_t5 import checkpoints
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio, import_tensorflow
from rosetta_t5.export.functions import (
  create_inference_function,
  feature_shapes,
  restore_params,
  write_stablehlo,
)
from rosetta_t5.export.text_functions import (
  create_batch_polymorphic_shapes,
  create_postprocessor,
  create_preprocessor,
)
from rosetta_t5.parallel import BasePartitioner, PjitPartitioner
from rosetta_t5.telemetry import console

STABLEHLO = "stablehlo"
_SIGNATURE = "serving_default"


def save(
  *,
  model: Any,
  inference_mode: Any,
  restore_checkpoint_cfg: checkpoints.RestoreCheckpointConfig,
  exportable_module_cls: Callable[..., Any] | None = None,
  create_preprocessor_fn: Callable[..., Any] = create_preprocessor,
  create_inference_function_fn: Callable[..., Any] = create_inference_function,
  create_postprocessor_fn: Callable[..., Any] = create_postprocessor,
  partitioner: BasePartitioner | None = None,
  create_decoding_state_callback_fn: Callable[..., Any] | None = None,
  output_features: Mapping[str, Any] | None = None,
  task_feature_lengths: Mapping[str, int],
  batch_size: int | None,
  output_dir: str | Mapping[str, str],
  model_name: str,
  warmup_examples: Sequence[Any] | None = None,
  tokenized_inputs: bool = False,
  write_warmup_example_fn: Callable[..., None] | None = None,
  mixture_or_task_name: str | None = None,
  validation_examples: Sequence[Any] | None = None,
  native_lowering: bool = False,
  enable_xla: bool = True,
  decode_outputs: bool | None = None,
  trailing_shapes: Mapping[str, tuple[int, ...]] | None = None,
  output_vocab_feature_name: str | None = "targets",
  signature_name: str = _SIGNATURE,
  create_polymorphic_shapes_fn: Callable[..., Any] = create_batch_polymorphic_shapes,
) -> None:
  """Exports a checkpoint (T5X: export_lib.save).

  `output_dir` becomes a SavedModel whose signature takes a batch of texts, and
  `output_dir/stablehlo` the same model from tokens on, for `load_stablehlo`, with jax alone.

  Args:
    model: the model.
    inference_mode: 'predict', 'score' or a `CustomInferenceMode`.
    restore_checkpoint_cfg: the checkpoint; its dtype is that of the exported parameters.
    exportable_module_cls: puts the parts together; None for `ExportableModule`.
    create_preprocessor_fn: makes the function from texts to features.
    create_inference_function_fn: makes the function of parameters and features.
    create_postprocessor_fn: makes the function from results to texts.
    partitioner: restores the checkpoint; None for one copy of the model.
    create_decoding_state_callback_fn: makes what is called while decoding.
    output_features: the `seqio.Feature` of inputs and targets,
    task_feature_lengths: their tokens,
    batch_size: examples a batch; None for any number.
    output_dir: the folder; of T5X's dict of folders the one for 'cpu'.
    model_name: the name in warm-up requests.
    warmup_examples: requests that a server makes when it starts.
    tokenized_inputs: whether tokens come in place of texts.
    write_warmup_example_fn: writes these requests; None for `write_warmup_examples`.
    mixture_or_task_name: gives output_features, in their place.
    validation_examples: inputs on which the exported model is compared with the original.
    native_lowering: T5X's choice; functions are always exported as StableHLO.
    enable_xla: False is not possible any more.
    decode_outputs: whether texts come out; None for texts where texts go in.
    trailing_shapes: not needed here.
    output_vocab_feature_name: the feature whose vocabulary the predictions are in.
    signature_name: the SavedModel's signature.
    create_polymorphic_shapes_fn: says which shapes stay open.

  Raises:
    ValueError: something given does not fit together, or the exported model says something else than
      the original.
  """
  del trailing_shapes
  folder = _folder(output_dir)
  features = _output_features(mixture_or_task_name, output_features)
  partitioner = partitioner or PjitPartitioner(num_partitions=1)
  vocabulary = features[output_vocab_feature_name].vocabulary if output_vocab_feature_name else None
  preprocess, signature = create_preprocessor_fn(
    batch_size=batch_size,
    output_features=features,
    task_feature_lengths=task_feature_lengths,
    tokenized_inputs=tokenized_inputs,
  )
  make_callback = create_decoding_state_callback_fn
  make_function = functools.partial(
    create_inference_function_fn,
    model=model,
    inference_mode=inference_mode,
    partitioner=partitioner,
    train_state_initializer=None,
    decoding_state_callback_fn=make_callback(vocab=vocabulary) if make_callback else None,
    enable_xla=enable_xla,
    native_lowering=native_lowering,
  )
  function = make_function(enable_jax2tf=False)
  params = restore_params(model, restore_checkpoint_cfg, partitioner, task_feature_lengths)
  mode, path = str(inference_mode), str(restore_checkpoint_cfg.path)
  about = {"model": model_name, "mode": mode, "from": path}
  shapes = feature_shapes(model, task_feature_lengths, batch_size)
  write_stablehlo(folder / STABLEHLO, function, params, shapes, about)

  tf = import_tensorflow()
  decode = not tokenized_inputs if decode_outputs is None else decode_outputs
  module = (exportable_module_cls or ExportableModule)(
    preproc_tf_fn=preprocess,
    model_tf_fn=make_function(
      enable_jax2tf=True,
      polymorphic_shapes_inputs=create_polymorphic_shapes_fn(signature, preprocess),
    ),
    postproc_tf_fn=create_postprocessor_fn(vocabulary, inference_mode, decode_outputs=decode),
    params=params,
    batch_size=batch_size,
  )
  concrete = module.__call__.get_concrete_function(*signature)
  tf.saved_model.save(module, os.fspath(folder), signatures={signature_name: concrete})
  if warmup_examples:
    (write_warmup_example_fn or write_warmup_examples)(
      warmup_examples, output_dir=os.fspath(folder), model_name=model_name,
      signature_name=signature_name, batch_sizes=[batch_size], input_tensor_name=signature[0].name
    )  # fmt: skip
  if validation_examples:
    _validate(folder, validation_examples, preprocess, function, params)
  console.print_line(f"exported  {folder} (SavedModel), {folder / STABLEHLO} (StableHLO)")


def ExportableModule(
  preproc_tf_fn: Callable[..., Any],
  model_tf_fn: Callable[..., Any],
  postproc_tf_fn: Callable[..., Any],
  params: Mapping[str, Any],
  batch_size: int | None,
  num_batch_threads: int = 8,
  max_enqueued_batches: int = 64,
  batch_timeout_micros: int = 1_000_000,
  max_batch_size: int | None = None,
  allowed_batch_sizes: Sequence[int] | None = None,
  jit_compile: bool = True,
  use_batch_function: bool = False,
  use_gpu: bool = False,
  enable_large_batch_splitting: bool = True,
) -> Any:
  """Returns a tf.Module that goes from texts to texts, with the parameters as its variables.

  Args:
    preproc_tf_fn: from texts to features.
    model_tf_fn: f(params, features).
    postproc_tf_fn: from results to texts.
    params: the parameters.
    batch_size: examples a batch; None for any number.
    num_batch_threads: see tf.nondifferentiable_batch_function, as with the rest.
    max_enqueued_batches: likewise.
    batch_timeout_micros: likewise.
    max_batch_size: likewise; None for the largest allowed one.
    allowed_batch_sizes: likewise, for a batch size of None.
    jit_compile: let XLA compile the model.
    use_batch_function: put requests together into batches on the server.
    use_gpu: T5X's choice; TensorFlow places the variables when the model is loaded.
    enable_large_batch_splitting: see above.

  Raises:
    ValueError: use_batch_function without a batch size or allowed ones.
  """
  del use_gpu
  tf = import_tensorflow()
  sizes = list(allowed_batch_sizes or ([batch_size] if batch_size else []))
  if use_batch_function and not sizes:
    raise ValueError(
      "ExportableModule.use_batch_function = True needs batches of known sizes: set BATCH_SIZE or "
      "ExportableModule.allowed_batch_sizes"
    )
  variables = tf.nest.map_structure(
    lambda x: tf.Variable(np.asarray(x), trainable=False), dict(params)
  )
  run_model = tf.function(
    lambda features: model_tf_fn(variables, features), autograph=False, jit_compile=jit_compile
  )

  def call(*inputs: Any) -> Any:
    return postproc_tf_fn(run_model(preproc_tf_fn(*inputs)))

  if use_batch_function:
    call = tf.nondifferentiable_batch_function(
      num_batch_threads=num_batch_threads,
      max_batch_size=max_batch_size or max(sizes),
      batch_timeout_micros=batch_timeout_micros,
      allowed_batch_sizes=sizes,
      max_enqueued_batches=max_enqueued_batches,
      enable_large_batch_splitting=enable_large_batch_splitting,
    )(call)

  class Exportable(tf.Module):  # type: ignore[name-defined]
    """What TensorFlow saves: all that hangs on it."""

    def __init__(self) -> None:
      super().__init__()
      self.params = tf.nest.flatten(variables)
      # What a task's preprocessors hold: tables, files.
      functions = (preproc_tf_fn, postproc_tf_fn)
      self.resources = [getattr(function, "trackable_resources", None) for function in functions]

    __call__ = tf.function(lambda self, *inputs: call(*inputs), autograph=False)

  return Exportable()


def write_warmup_examples(
  text_batch: Sequence[Any],
  output_dir: str,
  model_name: str,
  signature_name: str,
  *,
  generate_examples_fn: Callable[[], list[Sequence[Any]]] | None = None,
  batch_sizes: Sequence[int | None],
  input_tensor_name: str = "text_batch",
  decoder_params_spec: Sequence[tuple[str, Any, Sequence[int]]] | None = None,
  request_to_prediction_log: Callable[..., Any] | None = None,
) -> None:
  """Writes requests that TensorFlow Serving makes when it loads a model (T5X's function).

  Args:
    text_batch: texts or lists of tokens, repeated or cut to each batch size.
    output_dir: the SavedModel's folder.
    model_name: the model's name on the server.
    signature_name: its signature.
    generate_examples_fn: makes batches in place of text_batch.
    batch_sizes: a request for each; None leaves a batch as it is.
    input_tensor_name: the signature's argument.
    decoder_params_spec: (name, dtype, shape) of further arguments, which are zeros.
    request_to_prediction_log: wraps a request; None for a PredictionLog.

  Raises:
    ValueError: the package that knows these requests is not installed.
  """
  tf = import_tensorflow()
  try:
    from tensorflow_serving.apis import predict_pb2, prediction_log_pb2
  except ImportError as error:
    raise ValueError(
      "warm-up requests need TensorFlow Serving's messages: pip install --no-deps "
      "tensorflow-serving-api, or leave export_lib.save.warmup_examples out"
    ) from error

  def log(request: Any) -> Any:
    if request_to_prediction_log is not None:
      return request_to_prediction_log(request)
    return prediction_log_pb2.PredictionLog(
      predict_log=prediction_log_pb2.PredictLog(request=request)
    )

  folder = epath.Path(output_dir) / "assets.extra"
  folder.mkdir(parents=True, exist_ok=True)
  batches = generate_examples_fn() if generate_examples_fn is not None else [text_batch]
  with tf.io.TFRecordWriter(os.fspath(folder / "tf_serving_warmup_requests")) as writer:
    for batch, size in itertools.product(batches, batch_sizes):
      rows = list(batch) if size is None else list(itertools.islice(itertools.cycle(batch), size))
      request = predict_pb2.PredictRequest()
      request.model_spec.name = model_name
      request.model_spec.signature_name = signature_name
      request.inputs[input_tensor_name].CopyFrom(tf.make_tensor_proto(rows))
      for name, dtype, shape in decoder_params_spec or ():
        zeros = tf.zeros((len(rows), *shape), dtype)
        request.inputs[name].CopyFrom(tf.make_tensor_proto(zeros))
      writer.write(log(request).SerializeToString())


def _folder(output_dir: str | Mapping[str, str]) -> epath.Path:
  if isinstance(output_dir, str):
    return epath.Path(output_dir)
  if "cpu" not in output_dir:
    raise ValueError(
      f"export_lib.save.output_dir has folders for {', '.join(output_dir)}: give a folder, or one "
      "for 'cpu'; models for TPUs are not made"
    )
  return epath.Path(output_dir["cpu"])


def _output_features(
  task_name: str | None, output_features: Mapping[str, Any] | None
) -> Mapping[str, Any]:
  if (task_name is None) == (output_features is None):
    raise ValueError(
      "export_lib.save needs output_features or mixture_or_task_name, and not both: set the other to "
      "None"
    )
  if task_name is None:
    return output_features  # type: ignore[return-value]
  return import_seqio().get_mixture_or_task(task_name).output_features


def _validate(
  folder: epath.Path,
  examples: Sequence[Any],
  preprocess: Callable[..., Any],
  function: Callable[..., Any],
  params: Any,
) -> None:
  """Compares the numbers that the saved model and the original give for some inputs."""
  import jax

  from rosetta_t5.export.functions import load_stablehlo

  loaded = load_stablehlo(folder / STABLEHLO)
  features = {
    n: np.asarray(x) for n, x in preprocess(import_tensorflow().constant(examples)).items()
  }
  wanted = jax.jit(function)(jax.tree.map(jax.numpy.asarray, params), features)
  for got, want in zip(loaded(features), wanted, strict=True):
    if not np.allclose(
      np.asarray(got, np.float32), np.asarray(want, np.float32), atol=1e-3, rtol=1e-3
    ):
      raise ValueError(f"the exported model in {folder} says something else than the original")
