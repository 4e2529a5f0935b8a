"""The TensorFlow around an exported model: from text to features, from tokens to text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio, import_tensorflow

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
    batch_size: examples a batch; None for any number.
    output_features: the `seqio.Feature` of inputs and targets.
    task_feature_lengths: their tokens.
    tokenized_inputs: whether tokens [B, L] come in place of texts [B].
    input_tensor_name: the argument's name.
    split_separator: what parts a text into input and target, for scores; None for no target.
    bucket_keys: lengths to pad to, by feature, in place of the one length.
  """
  tf, seqio = import_tensorflow(), import_seqio()

  def one(text: Any, name: str) -> Any:
    feature, length = output_features[name], task_feature_lengths[name]
    tokens = text if tokenized_inputs else feature.vocabulary.encode_tf(text)
    if feature.add_eos:
      tokens = tf.concat([tokens[: length - 1], [feature.vocabulary.eos_id]], axis=0)
    tokens = tokens[:length]
    return tf.ensure_shape(tf.pad(tokens, [[0, length - tf.shape(tokens)[0]]]), [length])

  def batch_of(texts: Any, name: str) -> Any:
    spec = tf.TensorSpec([task_feature_lengths[name]], tf.int32)
    tokens = tf.map_fn(functools.partial(one, name=name), texts, fn_output_signature=spec)
    buckets = sorted((bucket_keys or {}).get(name, ()))
    return _cut_to_bucket(tf, tokens, buckets) if buckets else tokens

  def preprocess(texts: Any) -> Mapping[str, Any]:
    if tokenized_inputs:
      inputs, targets = texts, tf.zeros_like(texts)
    elif split_separator is None:
      inputs, targets = texts, tf.zeros_like(texts)  # of strings: empty ones
    else:
      parts = tf.strings.split(texts, sep=split_separator, maxsplit=1)
      pairs = parts.to_tensor(shape=[None, 2])
      inputs, targets = pairs[:, 0], pairs[:, 1]
    targets_BT = batch_of(targets, "targets")
    shifted = tf.map_fn(seqio.feature_converters.autoregressive_inputs, targets_BT)
    return {
      "encoder_input_tokens": batch_of(inputs, "inputs"),
      "decoder_target_tokens": targets_BT,
      "decoder_input_tokens": shifted,
      "decoder_loss_weights": seqio.feature_converters.non_padding_position(targets_BT),
    }

  shape = [batch_size, task_feature_lengths["inputs"]] if tokenized_inputs else [batch_size]
  dtype = tf.int32 if tokenized_inputs else tf.string
  return preprocess, (tf.TensorSpec(shape, dtype, name=input_tensor_name),)


def _cut_to_bucket(tf: Any, tokens_BL: Any, buckets: Sequence[int]) -> Any:
  """Returns the tokens, cut to the shortest bucket that holds the longest row."""
  longest = tf.reduce_max(tf.reduce_sum(tf.cast(tokens_BL != 0, tf.int32), axis=-1))
  index = tf.minimum(tf.searchsorted(buckets, [longest])[0], len(buckets) - 1)
  return tokens_BL[:, : tf.constant(buckets)[index]]


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
    batch_size: examples a batch, which must be known: None is refused.
    output_features: of the task; not looked at.
    task_feature_lengths: tokens of each feature.
    tokenized_inputs: not possible here.
    model: gives the feature converter.
    task_name: the task, whose preprocessors run.
    serialized_examples: whether serialised tf.train.Examples come; else texts, as of a
      TextLineDataSource.
    run_precache: whether preprocessors run that stand before the task's cache.
    input_tensor_name: the argument's name.

  Raises:
    ValueError: the batch size is None, or tokenized_inputs is set.
  """
  del output_features
  tf, seqio = import_tensorflow(), import_seqio()
  if tokenized_inputs or batch_size is None:
    raise ValueError(
      "create_preprocessor_from_task runs a task's preprocessors on raw examples, a fixed number at a "
      "time: set BATCH_SIZE (export_lib.save.batch_size), and tokenized_inputs = False"
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
  """Returns what reads one serialised example with the features of the task's source."""
  spec = task.source.get_dataset(sorted(task.splits)[0]).element_spec
  kinds = {
    name: tf.io.FixedLenFeature(x.shape, x.dtype)
    if x.shape.is_fully_defined()
    else tf.io.FixedLenSequenceFeature(x.shape[1:], x.dtype, allow_missing=True)
    for name, x in spec.items()
  }
  return functools.partial(tf.io.parse_single_example, features=kinds)


def create_postprocessor(
  vocab: Any,
  inference_mode: Any,
  decode_outputs: bool = True,
  output_feature_names: Sequence[str] | None = None,
) -> Callable[..., Any]:
  """Returns a function from the model's results to what is served.

  Args:
    vocab: turns tokens into text.
    inference_mode: 'predict' gives (texts, scores), else the results as they are.
    decode_outputs: False leaves tokens as they are.
    output_feature_names: names for the results, which then come as a dict.
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
  """Returns the shapes that stay open, for jax2tf; None where the signature leaves none open.

  Args:
    input_signature: of the preprocessor.
    preprocessor: makes the features.
    create_fake_input_fn: makes an input for a signature; None for zeros, one example.
    overrides: shapes by feature that win.
  """
  tf = import_tensorflow()
  is_open = not all(spec.shape.is_fully_defined() for spec in input_signature)
  if not is_open and not overrides:
    return None

  def zeros(signature: Sequence[Any]) -> list[Any]:
    return [tf.zeros([size or 1 for size in spec.shape], spec.dtype) for spec in signature]

  features = preprocessor(*(create_fake_input_fn or zeros)(input_signature))
  return {**dict.fromkeys(features, "b, ..." if is_open else None), **(overrides or {})}
