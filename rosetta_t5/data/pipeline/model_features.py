"""The features of a model's batches, as SeqIO's converters make them and as a task and its vocabulary need them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rosetta_t5.data.tasks.chat_task import WEIGHTS
from rosetta_t5.data.tensorflow_import import tf, without_autograph

Features = Mapping[str, Any]


class TaskFeatureConverter:
  """A SeqIO feature converter that also supports weights of tokens and rows without a start token.

  A task may have a weight for each token of its targets. SeqIO's converters pack, shift and pad tokens without
  such weights, so tokens of weight 0 are negative while the converter runs. The decoder of a folder whose tokenizer begins no
  text with a token, such as Qwen's, reads texts without a start token.
  """

  def __init__(self, converter: Any, output_features: Features):
    """Wraps a converter; `output_features` are those of the task."""
    self._converter = converter
    vocabulary = getattr(output_features.get("targets"), "vocabulary", None)
    self._has_start = getattr(vocabulary, "starts_rows", True)

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):
      raise AttributeError(name)
    return getattr(self._converter, name)

  def __call__(
    self, dataset: tf.data.Dataset, task_feature_lengths: Mapping[str, int] | None
  ) -> tf.data.Dataset:
    """Returns the dataset with the model's features."""
    has_weights = WEIGHTS in dataset.element_spec
    dataset = dataset.map(_sign_tokens) if has_weights else dataset
    convert = self._converter
    if not getattr(convert, "pack", True):
      convert = without_autograph(convert, convert)
    dataset = convert(dataset, task_feature_lengths=task_feature_lengths)
    dataset = dataset.map(_read_signs) if has_weights else dataset
    is_decoder = not any(name.startswith("encoder") for name in dataset.element_spec)
    return dataset.map(_drop_start) if is_decoder and not self._has_start else dataset


def _sign_tokens(example: Features) -> Features:
  tokens = example["targets"]
  is_trained = example[WEIGHTS][: tf.size(tokens)] > 0
  return {**example, "targets": tf.where(is_trained, tokens, -tokens)}


def _read_signs(features: Features) -> Features:
  weights = tf.cast(features["decoder_target_tokens"] > 0, tf.int32)
  return {**{name: tf.abs(x) for name, x in features.items()}, "decoder_loss_weights": weights}


def _drop_start(features: Features) -> Features:
  """Makes the first token the first input; where a packed row's next text started, there is padding."""
  moved = {name: tf.concat([x[1:], tf.zeros_like(x[:1])], 0) for name, x in features.items()}
  is_read = tf.cast(moved["decoder_input_tokens"] > 0, tf.int32)
  for name in {"decoder_target_tokens", "decoder_loss_weights"} & {*moved}:
    moved[name] *= is_read
  if "decoder_positions" in moved:
    moved["decoder_positions"] = tf.maximum(moved["decoder_positions"] - 1, 0)
  return moved
