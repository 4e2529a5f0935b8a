"""Exports a checkpoint as a SavedModel from text to text, and as StableHLO."""

import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax.core import unfreeze

from rosetta_t5 import checkpoints, config, data, terminal
from rosetta_t5.argument_types import NonNegative, Positive
from rosetta_t5.data.tensorflow_import import seqio, tf
from rosetta_t5.export import functions
from rosetta_t5.files import complete_folder
from rosetta_t5.parallel import BasePartitioner, PjitPartitioner
from rosetta_t5.plan.description import describe_run

_STABLEHLO = "stablehlo"


def save(
  *,
  model: Any,
  inference_mode: Any,
  restore_checkpoint_cfg: checkpoints.RestoreCheckpointConfig,
  exportable_module_cls: Callable[..., Any] | None = None,
  create_preprocessor_fn: Callable[..., Any] = functions.create_preprocessor,
  create_inference_function_fn: Callable[..., Any] = functions.create_inference_function,
  create_postprocessor_fn: Callable[..., Any] = functions.create_postprocessor,
  partitioner: BasePartitioner | None = None,
  create_decoding_state_callback_fn: Callable[..., Any] | None = None,
  output_features: Mapping[str, Any] | None = None,
  task_feature_lengths: Mapping[str, int],
  batch_size: Positive | None,
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
  signature_name: str = "serving_default",
  create_polymorphic_shapes_fn: Callable[..., Any] = functions.create_batch_polymorphic_shapes,
) -> None:
  """Exports a checkpoint (T5X: export_lib.save).

  `output_dir` becomes a SavedModel whose signature takes a batch of texts. `output_dir/stablehlo`
  is the same model for tokens; `load_stablehlo` runs it with jax alone.

  Args:
    model: the model.
    inference_mode: 'predict', 'score' or a `CustomInferenceMode`.
    restore_checkpoint_cfg: the checkpoint; its dtype is the dtype of the exported parameters.
    exportable_module_cls: combines the parts into a tf.Module; None for `ExportableModule`.
    create_preprocessor_fn: builds the function from texts to features.
    create_inference_function_fn: builds the function of parameters and features.
    create_postprocessor_fn: builds the function from results to texts.
    partitioner: restores the checkpoint; None for one copy of the model.
    create_decoding_state_callback_fn: builds a callback for each decoding step.
    output_features: the `seqio.Feature` of inputs and targets.
    task_feature_lengths: the numbers of tokens of these features.
    batch_size: the number of examples in a batch; None for any number.
    output_dir: the folder; if it is T5X's dict of folders, the one for 'cpu' is used.
    model_name: the model's name in warm-up requests.
    warmup_examples: inputs of requests that a server sends to the model when it starts.
    tokenized_inputs: whether the inputs are tokens instead of texts.
    write_warmup_example_fn: writes these requests; None for `write_warmup_examples`.
    mixture_or_task_name: a task or mixture whose output_features are used.
    validation_examples: inputs for which the exported model is compared with the original.
    native_lowering: accepted as in T5X; functions are always exported as StableHLO.
    enable_xla: accepted as in T5X; False is an error.
    decode_outputs: whether the outputs are texts; None for texts unless tokenized_inputs.
    trailing_shapes: accepted as in T5X.
    output_vocab_feature_name: the feature with the vocabulary of the predictions.
    signature_name: the name of the SavedModel's signature.
    create_polymorphic_shapes_fn: returns the shapes with symbolic dimensions.

  Raises:
    ValueError: the arguments do not fit together, or the exported model differs from the original.
  """
  folder = _select_folder(output_dir)
  features = _select_features(output_features, mixture_or_task_name)
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
  params = _read_params(model, restore_checkpoint_cfg, partitioner, task_feature_lengths)
  shapes = _feature_shapes(model, task_feature_lengths, batch_size)
  with complete_folder(folder) as unfinished:
    functions.write_stablehlo(unfinished / _STABLEHLO, function, params, shapes)
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
    tf.saved_model.save(module, os.fspath(unfinished), signatures={signature_name: concrete})
    if warmup_examples:
      (write_warmup_example_fn or write_warmup_examples)(
        warmup_examples,
        output_dir=os.fspath(unfinished),
        model_name=model_name,
        signature_name=signature_name,
        batch_sizes=[batch_size],
        input_tensor_name=signature[0].name,
      )
    if validation_examples:
      features = preprocess(tf.constant(validation_examples))
      _validate(unfinished / _STABLEHLO, functools.partial(function, params), features)
  terminal.print_line(f"exported  {folder} (SavedModel), {folder / _STABLEHLO} (StableHLO)")


def save_model(
  model: Any,
  restore_checkpoint_cfg: checkpoints.RestoreCheckpointConfig,
  task_feature_lengths: Mapping[str, int],
  output_dir: str,
  batch_size: Positive | None = None,
  num_decodes: Positive | None = None,
) -> None:
  """Exports the predictions of an encoder-decoder; see `save`.

  Args:
    model: the model.
    restore_checkpoint_cfg: its checkpoint.
    task_feature_lengths: the numbers of tokens of inputs and targets.
    output_dir: the folder.
    batch_size: the number of texts in a batch; None for any number.
    num_decodes: the number of beams or samples, which are all returned; None for the best one.

  Raises:
    ValueError: the model is a decoder.
  """
  if set(model.FEATURE_CONVERTER_CLS(pack=False).TASK_FEATURES) != {"inputs", "targets"}:
    raise ValueError("export needs an encoder-decoder; the features of a decoder have no inputs")
  feature = seqio.Feature
  # TensorFlow cannot run a tokenizer.json.
  maps_tokens = hasattr(getattr(model.output_vocabulary, "tokenizer", None), "to_str")
  decodes = {"num_decodes": num_decodes, "return_all_decodes": True} if num_decodes else None
  save(
    model=model,
    inference_mode="predict",
    restore_checkpoint_cfg=restore_checkpoint_cfg,
    create_inference_function_fn=functools.partial(
      functions.create_inference_function, model_fn_extra_kwargs=decodes
    ),
    output_features={
      "inputs": feature(model.input_vocabulary, add_eos=not maps_tokens),
      "targets": feature(model.output_vocabulary),
    },
    task_feature_lengths=task_feature_lengths,
    batch_size=batch_size,
    output_dir=output_dir,
    model_name=epath.Path(output_dir).name,
    tokenized_inputs=maps_tokens,
  )


def main(argv: Sequence[str] | None = None) -> None:
  """Runs `save` with the arguments of the command line and its gin files (`python -m t5x.export`)."""
  config.run_from_command_line(save, argv, describe_run)


def ExportableModule(
  preproc_tf_fn: Callable[..., Any],
  model_tf_fn: Callable[..., Any],
  postproc_tf_fn: Callable[..., Any],
  params: Mapping[str, Any],
  batch_size: Positive | None,
  num_batch_threads: Positive = 8,
  max_enqueued_batches: Positive = 64,
  batch_timeout_micros: NonNegative = 1_000_000,
  max_batch_size: Positive | None = None,
  allowed_batch_sizes: Sequence[int] | None = None,
  jit_compile: bool = True,
  use_batch_function: bool = False,
  use_gpu: bool = False,
  enable_large_batch_splitting: bool = True,
) -> Any:
  """Returns a tf.Module from texts to texts, with the parameters as its variables.

  Args:
    preproc_tf_fn: the function from texts to features.
    model_tf_fn: the function of parameters and features.
    postproc_tf_fn: the function from results to texts.
    params: the parameters.
    batch_size: the number of examples in a batch; None for any number.
    num_batch_threads: an argument of tf.nondifferentiable_batch_function.
    max_enqueued_batches: an argument of tf.nondifferentiable_batch_function.
    batch_timeout_micros: an argument of tf.nondifferentiable_batch_function.
    max_batch_size: an argument of tf.nondifferentiable_batch_function; None for the largest allowed
      batch size.
    allowed_batch_sizes: an argument of tf.nondifferentiable_batch_function; None for batch_size.
    jit_compile: whether XLA compiles the model.
    use_batch_function: whether the server combines requests into batches.
    use_gpu: accepted as in T5X; TensorFlow places the variables when the model is loaded.
    enable_large_batch_splitting: an argument of tf.nondifferentiable_batch_function.

  Raises:
    ValueError: use_batch_function is set without a batch size.
  """
  sizes = list(allowed_batch_sizes or ([batch_size] if batch_size else []))
  if use_batch_function and not sizes:
    raise ValueError(
      "ExportableModule.use_batch_function = True needs known batch sizes: set BATCH_SIZE or "
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

  class Exportable(tf.Module):
    __call__ = tf.function(lambda self, *inputs: call(*inputs), autograph=False)

  # TensorFlow saves everything that a module references, such as the tables and files of a task's preprocessors.
  module: Any = Exportable()
  module.params = tf.nest.flatten(variables)
  resources = "trackable_resources"
  module.resources = [getattr(fn, resources, None) for fn in (preproc_tf_fn, postproc_tf_fn)]
  return module


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
  """Writes requests that TensorFlow Serving sends to a model when it loads it (as in T5X).

  Args:
    text_batch: texts or lists of tokens, which are repeated or truncated to each batch size.
    output_dir: the folder of the SavedModel.
    model_name: the model's name on the server.
    signature_name: the name of the signature.
    generate_examples_fn: returns batches to use instead of text_batch.
    batch_sizes: the batch size of each request; None does not change the batch.
    input_tensor_name: the name of the signature's argument.
    decoder_params_spec: (name, dtype, shape) of other arguments, which are zeros.
    request_to_prediction_log: wraps a request; None for a PredictionLog.

  Raises:
    ValueError: the package that defines these requests is not installed.
  """
  try:
    from tensorflow_serving.apis import predict_pb2, prediction_log_pb2
  except ImportError as error:
    text = "warmup_examples need a package: pip install --no-deps tensorflow-serving-api"
    raise ValueError(text) from error

  def wrap(request: Any) -> Any:
    predict_log = prediction_log_pb2.PredictLog(request=request)
    return prediction_log_pb2.PredictionLog(predict_log=predict_log)

  log = request_to_prediction_log or wrap
  file = epath.Path(output_dir) / "assets.extra" / "tf_serving_warmup_requests"
  file.parent.mkdir(parents=True, exist_ok=True)
  batches = generate_examples_fn() if generate_examples_fn is not None else [text_batch]
  with tf.io.TFRecordWriter(os.fspath(file)) as writer:
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


def _select_folder(output_dir: str | Mapping[str, str]) -> epath.Path:
  folder = epath.Path(output_dir if isinstance(output_dir, str) else output_dir["cpu"])
  if folder.exists() and any(folder.iterdir()) and not (folder / "saved_model.pb").exists():
    raise ValueError(
      "export_lib.save.output_dir must be a new folder, an empty one, or an earlier export to "
      f"replace, but {folder} contains something else: set another one"
    )
  return folder


def _select_features(output_features: Any, mixture_or_task_name: str | None) -> Any:
  if (mixture_or_task_name is None) == (output_features is None):
    raise ValueError(
      "export_lib.save needs output_features or mixture_or_task_name, and not both: set the other to None"
    )
  return output_features or seqio.get_mixture_or_task(mixture_or_task_name).output_features


def _read_params(
  model: Any, cfg: checkpoints.RestoreCheckpointConfig, partitioner: Any, lengths: Mapping[str, int]
) -> Any:
  checkpoints.check_model(model, data.vocabulary_digests(model), cfg)
  state, _ = checkpoints.restore_for_inference(model, cfg, partitioner, lengths)
  # safetensors requires arrays in C's order.
  return jax.tree.map(functools.partial(np.asarray, order="C"), unfreeze(state.params))


def _feature_shapes(model: Any, lengths: Mapping[str, int], batch_size: int | None) -> Any:
  converter = model.FEATURE_CONVERTER_CLS(pack=False)
  rows: Any = batch_size or jax.export.symbolic_shape("b")[0]
  return {
    name: jax.ShapeDtypeStruct((rows, length), jnp.int32)
    for name, length in converter.get_model_feature_lengths(lengths).items()
  }


def _validate(folder: epath.Path, function: Callable[[Any], Any], features: Any) -> None:
  batch = jax.tree.map(np.asarray, dict(features))
  outputs = functions.load_stablehlo(folder)(batch)
  for got, want in zip(outputs, jax.jit(function)(batch), strict=True):
    if not np.allclose(got.astype(np.float32), want.astype(np.float32), atol=1e-3, rtol=1e-3):
      raise ValueError("the outputs of the exported model differ from the original's")
