"""The TensorFlow functions around an exported model: from text to features, and back to text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow

Preprocessor = Callable[..., Mapping[str, Any]]


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
    bucket_keys: for each feature, the lengths to which a batch can be padded: the shortest that fits
      is used. Other features are padded to their length in `task_feature_lengths`.

  Raises:
    ValueError: the longest bucket of a feature is not its length in `task_feature_lengths`.
  """
  tf, seqio = import_tensorflow(), import_seqio()
  all_buckets = {name: sorted(buckets) for name, buckets in (bucket_keys or {}).items() if buckets}
  for name, buckets in all_buckets.items():
    if buckets[-1] != task_feature_lengths[name]:
      raise ValueError(
        f"the longest of bucket_keys[{name!r}] must be {task_feature_lengths[name]}, the feature's "
        f"length in task_feature_lengths, got {buckets}"
      )

  def encode(text: Any, name: str) -> Any:
    feature, length = output_features[name], task_feature_lengths[name]
    tokens = text if tokenized_inputs else feature.vocabulary.encode_tf(text)
    if feature.add_eos:
      tokens = tf.concat([tokens[: length - 1], [feature.vocabulary.eos_id]], axis=0)
    tokens = tokens[:length]
    return tf.ensure_shape(tf.pad(tokens, [[0, length - tf.shape(tokens)[0]]]), [length])

  def encode_batch(texts: Any, name: str) -> Any:
    spec = tf.TensorSpec([task_feature_lengths[name]], tf.int32)
    tokens = tf.map_fn(functools.partial(encode, name=name), texts, fn_output_signature=spec)
    return _truncate_to_bucket(tf, tokens, all_buckets[name]) if name in all_buckets else tokens

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


def _truncate_to_bucket(tf: Any, tokens_BL: Any, buckets: Sequence[int]) -> Any:
  """Truncates the tokens to the shortest bucket that is as long as the longest row."""
  longest = tf.reduce_max(tf.reduce_sum(tf.cast(tokens_BL != 0, tf.int32), axis=-1))
  return tokens_BL[:, : tf.constant(buckets)[tf.searchsorted(buckets, [longest])[0]]]


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
  input_tensor_name: str = "inputs",
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
  del output_features
  tf, seqio = import_tensorflow(), import_seqio()
  if tokenized_inputs or batch_size is None:
    raise ValueError(
      "create_preprocessor_from_task applies a task's preprocessors to a fixed number of raw "
      "examples: set BATCH_SIZE (export_lib.save.batch_size) and tokenized_inputs = False"
    )
  task = seqio.TaskRegistry.get(task_name)
  converter = model.FEATURE_CONVERTER_CLS(pack=False)
  parse = _parser(tf, task) if serialized_examples else lambda example: example

  def preprocess(examples: Any) -> Mapping[str, Any]:
    dataset = tf.data.Dataset.from_tensor_slices(examples).map(parse)
    if run_precache:
      dataset = task.preprocess_precache(dataset)
    dataset = task.preprocess_postcache(dataset, sequence_length=task_feature_lengths)
    dataset = seqio.utils.trim_dataset(dataset, task_feature_lengths, task.output_features)
    dataset = converter(dataset, task_feature_lengths)
    return dataset.batch(batch_size, drop_remainder=True).get_single_element()

  return preprocess, (tf.TensorSpec([batch_size], tf.string, name=input_tensor_name),)


def _parser(tf: Any, task: Any) -> Callable[[Any], Any]:
  """Returns a function that parses one serialized example of the task's source."""
  spec = task.source.get_dataset(sorted(task.splits)[0]).element_spec
  features = {
    name: tf.io.FixedLenFeature(x.shape, x.dtype)
    if x.shape.is_fully_defined()
    else tf.io.FixedLenSequenceFeature(x.shape[1:], x.dtype, allow_missing=True)
    for name, x in spec.items()
  }
  return functools.partial(tf.io.parse_single_example, features=features)


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
  tf = import_tensorflow()
  is_size_unknown = not all(spec.shape.is_fully_defined() for spec in input_signature)
  if not is_size_unknown and not overrides:
    return None

  def zeros(signature: Sequence[Any]) -> list[Any]:
    return [tf.zeros([size or 1 for size in spec.shape], spec.dtype) for spec in signature]

  features = preprocessor(*(create_fake_input_fn or zeros)(input_signature))
  return {**dict.fromkeys(features, "b, ..." if is_size_unknown else None), **(overrides or {})}
