"""The functions of an exported model: from texts to features, to results, and back to texts."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import safetensors.flax
import safetensors.numpy
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import export as jax_export

from rosetta_t5.argument_types import Positive
from rosetta_t5.data.tensorflow_import import seqio, tf
from rosetta_t5.files import verify_checksums, write_checksums
from rosetta_t5.inference.infer_fn import inference_step
from rosetta_t5.parallel import BasePartitioner

PyTree = Any
Features = Mapping[str, Any]
InferenceFn = Callable[[PyTree, Features], tuple[Any, ...]]
Preprocessor = Callable[..., Features]
_PROGRAM, _PARAMS = "program.stablehlo", "params.safetensors"


@dataclasses.dataclass(frozen=True)
class CustomInferenceMode:
  """Exports another method of a model than the two usual ones (T5X: CustomInferenceMode).

  Attributes:
    model_fn_name: the name of the method, which is called as f(params, batch).
    fetch_output: converts what it returns to the results; None for its leaves in order.
  """

  model_fn_name: str
  fetch_output: Callable[[PyTree], Any] | None = None


_MODES: dict[Any, CustomInferenceMode] = {
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
    output_len: accepted as in T5X; the number of results is that of the outputs.

  Raises:
    ValueError: the mode does not exist, or enable_xla is False.
  """
  if not enable_xla:
    raise ValueError("export_lib.save.enable_xla = False is not possible with this jax: remove it")
  mode: Any = _MODES.get(inference_mode, inference_mode)
  if not isinstance(mode, CustomInferenceMode):
    raise ValueError(
      f"export_lib.save.inference_mode must be 'predict', 'score' or a CustomInferenceMode, got {mode!r}"
    )

  def function(params: PyTree, features: Features) -> tuple[Any, ...]:
    batch = dict(features)
    options, decoder_params = dict(model_fn_extra_kwargs or {}), batch.pop("decoder_params", {})
    if decoding_state_callback_fn is not None:
      decoder_params = {**decoder_params, "state_callback_fn": decoding_state_callback_fn}
    if decoder_params:
      options["decoder_params"] = decoder_params
    outputs = inference_step(model, mode.model_fn_name)(params, batch, **options)
    return mode.fetch_output(outputs) if mode.fetch_output else tuple(jax.tree.leaves(outputs))

  if not enable_jax2tf:
    return function
  from jax.experimental import jax2tf

  def function_for_tensorflow(params: PyTree, features: Features) -> tuple[Any, ...]:
    with mock.patch.object(jax.lax, "top_k", _top_k_by_sorting):
      return function(params, features)

  # Decoding has no gradient.
  shapes = [None, polymorphic_shapes_inputs]
  return jax2tf.convert(function_for_tensorflow, polymorphic_shapes=shapes, with_gradient=False)


def _top_k_by_sorting(operand: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """Computes jax's top-k with a sort, because TensorFlow 2.21 cannot read the top-k of jax 0.10."""
  index = jax.lax.broadcasted_iota(jnp.int32, operand.shape, operand.ndim - 1)
  # A stable sort: equal values keep their order, as in top-k.
  negative, order = jax.lax.sort((-operand, index), dimension=-1, num_keys=1)
  return -negative[..., :k], order[..., :k]


def write_stablehlo(
  folder: epath.Path,
  function: InferenceFn,
  params: PyTree,
  features: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
  """Writes a function and its parameters for `load_stablehlo`.

  Args:
    folder: the folder of the files.
    function: the function (params, features) from `create_inference_function`.
    params: the parameters, as dicts of numpy arrays.
    features: the shapes of the features.
  """
  folder.mkdir(parents=True, exist_ok=True)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
  # For both platforms, so that a model exported on a CPU also runs on a GPU.
  exported = jax_export.export(jax.jit(function), platforms=["cpu", "cuda"])(shapes, dict(features))
  (folder / _PROGRAM).write_bytes(exported.serialize())
  safetensors.numpy.save_file(flatten_dict(params, sep="/"), folder / _PARAMS)
  write_checksums(folder, [_PROGRAM, _PARAMS])


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
  verify_checksums(path)
  exported = jax_export.deserialize(bytearray((path / _PROGRAM).read_bytes()))
  params = unflatten_dict(safetensors.flax.load_file(path / _PARAMS), sep="/")
  call = jax.jit(exported.call)
  return lambda features: call(params, dict(features))


def create_preprocessor(
  batch_size: int | None,
  output_features: Mapping[str, Any],
  task_feature_lengths: Mapping[str, int],
  tokenized_inputs: bool = False,
  *,
  input_tensor_name: str = "text_batch",
  split_separator: str | None = None,
  bucket_keys: Mapping[str, list[int]] | None = None,
) -> tuple[Preprocessor, Sequence[Any]]:
  """Returns a function from a batch of texts to an encoder-decoder's features, and its signature.

  Args:
    batch_size: the number of examples in a batch; None for any number.
    output_features: the `seqio.Feature` of inputs and targets.
    task_feature_lengths: the numbers of tokens of these features.
    tokenized_inputs: whether the inputs are tokens [B, L] instead of texts [B].
    input_tensor_name: the name of the argument.
    split_separator: separates the input from the target in a text, for scores; None for no target.
    bucket_keys: for each feature, shorter lengths to which a batch can be padded: the shortest that fits
      is used, or else the feature's length in `task_feature_lengths`.
  """

  def encode(text: Any, name: str) -> Any:
    feature, length = output_features[name], task_feature_lengths[name]
    tokens = text if tokenized_inputs else feature.vocabulary.encode_tf(text)
    if feature.add_eos:
      tokens = tf.concat([tokens[: length - 1], [feature.vocabulary.eos_id]], axis=0)
    tokens = tokens[:length]
    return tf.ensure_shape(tf.pad(tokens, [[0, length - tf.shape(tokens)[0]]]), [length])

  def encode_batch(texts: Any, name: str) -> Any:
    spec = tf.TensorSpec([task_feature_lengths[name]], tf.int32)
    tokens_BL = tf.map_fn(functools.partial(encode, name=name), texts, fn_output_signature=spec)
    if not (buckets := (bucket_keys or {}).get(name)):
      return tokens_BL
    lengths = tf.constant(sorted({*buckets, task_feature_lengths[name]}))
    longest = tf.reduce_max(tf.reduce_sum(tf.cast(tokens_BL != 0, tf.int32), axis=-1))
    return tokens_BL[:, : lengths[tf.searchsorted(lengths, [longest])[0]]]

  def preprocess(texts: Any) -> Mapping[str, Any]:
    if tokenized_inputs or split_separator is None:
      inputs, targets = texts, tf.zeros_like(texts)  # Padding tokens, or empty strings.
    else:
      parts = tf.strings.split(texts, sep=split_separator, maxsplit=1)
      pairs = parts.to_tensor(shape=[None, 2])
      inputs, targets = pairs[:, 0], pairs[:, 1]
    targets_BT = encode_batch(targets, "targets")
    shifted = tf.map_fn(seqio.feature_converters.autoregressive_inputs, targets_BT)
    return {
      "encoder_input_tokens": encode_batch(inputs, "inputs"),
      "decoder_target_tokens": targets_BT,
      "decoder_input_tokens": shifted,
      "decoder_loss_weights": seqio.feature_converters.non_padding_position(targets_BT),
    }

  shape = [batch_size, task_feature_lengths["inputs"]] if tokenized_inputs else [batch_size]
  dtype = tf.int32 if tokenized_inputs else tf.string
  return preprocess, (tf.TensorSpec(shape, dtype, name=input_tensor_name),)


def create_preprocessor_from_task(
  batch_size: int | None,
  output_features: Mapping[str, Any],
  task_feature_lengths: Mapping[str, int],
  tokenized_inputs: bool = False,
  *,
  model: Any,
  task_name: str,
  serialized_examples: bool = True,
  run_precache: bool = False,
  input_tensor_name: str = "text_batch",
) -> tuple[Preprocessor, Sequence[Any]]:
  """Returns a function from a batch of a task's raw examples to the model's features.

  Args:
    batch_size: the number of examples in a batch, which cannot be None.
    output_features: ignored; the task has its own.
    task_feature_lengths: the number of tokens of each feature.
    tokenized_inputs: must be False.
    model: the model, whose feature converter is used.
    task_name: the task whose preprocessors are used.
    serialized_examples: whether the inputs are serialized tf.train.Examples; else they are texts, as
      of a TextLineDataSource.
    run_precache: whether the preprocessors before the task's cache are used too.
    input_tensor_name: the name of the argument.

  Raises:
    ValueError: the batch size is None, or tokenized_inputs is set.
  """
  if tokenized_inputs or batch_size is None:
    raise ValueError(
      "create_preprocessor_from_task applies a task's preprocessors to a fixed number of raw "
      "examples: set BATCH_SIZE (export_lib.save.batch_size) and tokenized_inputs = False"
    )
  task = seqio.TaskRegistry.get(task_name)
  converter = model.FEATURE_CONVERTER_CLS(pack=False)
  # How one serialized example of the task's source is parsed.
  features = (
    {
      name: tf.io.FixedLenFeature(x.shape, x.dtype)
      if x.shape.is_fully_defined()
      else tf.io.FixedLenSequenceFeature(x.shape[1:], x.dtype, allow_missing=True)
      for name, x in task.source.get_dataset(sorted(task.splits)[0]).element_spec.items()
    }
    if serialized_examples
    else {}
  )

  def preprocess(examples: Any) -> Mapping[str, Any]:
    dataset = tf.data.Dataset.from_tensor_slices(examples)
    if serialized_examples:
      dataset = dataset.map(lambda example: tf.io.parse_single_example(example, features))
    if run_precache:
      dataset = task.preprocess_precache(dataset)
    dataset = task.preprocess_postcache(dataset, sequence_length=task_feature_lengths)
    dataset = seqio.utils.trim_dataset(dataset, task_feature_lengths, task.output_features)
    dataset = converter(dataset, task_feature_lengths)
    return dataset.batch(batch_size, drop_remainder=True).get_single_element()

  return preprocess, (tf.TensorSpec([batch_size], tf.string, name=input_tensor_name),)


def create_postprocessor(
  vocab: Any,
  inference_mode: Any,
  decode_outputs: bool = True,
  output_feature_names: Sequence[str] | None = None,
) -> Callable[..., Any]:
  """Returns a function from the model's results to the outputs of the SavedModel.

  Args:
    vocab: decodes tokens to text.
    inference_mode: 'predict' returns (texts, scores); other modes return the results unchanged.
    decode_outputs: whether tokens are decoded.
    output_feature_names: names of the results, which are then returned as a dict.
  """

  def postprocess(results: Sequence[Any]) -> Any:
    values = list(results)
    if inference_mode == "predict" and decode_outputs:
      decoded = vocab.decode_tf(values[0])
      values[0] = decoded.to_tensor() if hasattr(decoded, "to_tensor") else decoded
    if output_feature_names is None:
      return tuple(values)
    return dict(zip(output_feature_names, values, strict=True))

  return postprocess


def create_batch_polymorphic_shapes(
  input_signature: Sequence[Any],
  preprocessor: Preprocessor,
  *,
  create_fake_input_fn: Callable[..., Any] | None = None,
  overrides: Mapping[str, str] | None = None,
) -> dict[str, str | None] | None:
  """Returns the features' shapes with a symbolic batch size for jax2tf; None if the size is known.

  Args:
    input_signature: the signature of the preprocessor.
    preprocessor: the function from inputs to features.
    create_fake_input_fn: returns inputs for a signature; None for one example of zeros.
    overrides: shapes by feature, which take precedence.
  """
  is_size_unknown = not all(spec.shape.is_fully_defined() for spec in input_signature)
  if not is_size_unknown and not overrides:
    return None

  def zeros(signature: Sequence[Any]) -> list[Any]:
    return [tf.zeros([size or 1 for size in spec.shape], spec.dtype) for spec in signature]

  features = preprocessor(*(create_fake_input_fn or zeros)(input_signature))
  return {**dict.fromkeys(features, "b, ..." if is_size_unknown else None), **(overrides or {})}
