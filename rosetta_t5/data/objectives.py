"""Training objectives on text, as the preprocessors of SeqIO tasks.

span_corruption   Raffel et al. 2020, sections 3.1.4 and 3.3.4
prefix_lm         Raffel et al. 2020, section 3.2.3: a text is cut in two, the model predicts the second part
causal_lm         the model predicts each token from those before it, for decoder-only models ("targets" alone)
seq2seq           inputs and targets are used as they are
ul2               Tay et al. 2022: a mixture of denoisers, each announced by a mode text such as [NLU]

For span corruption, a text's tokens are cut into spans that are alternately kept and dropped. The input has
the kept tokens and one sentinel for each dropped span. The target has the dropped tokens and one sentinel for
each kept span. The random draws are those of T5's own preprocessors in the same order, so the same seed gives
the same examples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from absl import logging

from rosetta_t5.argument_types import PositiveNumber, Rate
from rosetta_t5.data.denoisers import Denoiser
from rosetta_t5.data.tensorflow_import import seqio, tf
from rosetta_t5.data.vocabularies.encoder_inputs import begin_inputs
from rosetta_t5.data.vocabularies.sentencepiece_models import count_last_sentinels

Dataset: TypeAlias = "tf.data.Dataset"
Lengths: TypeAlias = Mapping[str, int]
Features: TypeAlias = Mapping[str, Any]
# The number of tokens of a document that an epoch uses at most: a random chunk of a longer document.
_MAX_CHUNK_LENGTH = 65536
_JOINED_DOCUMENTS = 128
OBJECTIVES = ("span_corruption", "prefix_lm", "causal_lm", "seq2seq", "ul2")


def objective_preprocessors(
  objective: str, denoiser: Denoiser | None = None
) -> list[Callable[..., Any]]:
  """Returns the preprocessors that turn texts into training examples.

  The texts are the feature "targets", or both features for seq2seq.

  Args:
    objective: one of OBJECTIVES.
    denoiser: one of UL2's denoisers, which "ul2" requires; None for the other objectives.
  """
  stages: dict[str, list[Callable[..., Any]]] = {
    "span_corruption": [span_corruption],
    "prefix_lm": [prefix_lm],
    "causal_lm": [causal_lm],
    "seq2seq": [begin_inputs],
  }
  if denoiser is not None:
    stages["ul2"] = [functools.partial(denoise_with_mode, denoiser=denoiser)]
  first = [seqio.preprocessors.tokenize, seqio.CacheDatasetPlaceholder()]
  return [*first, *stages[objective], seqio.preprocessors.append_eos_after_trim]


def prefix_lm(
  dataset: Dataset,
  sequence_length: Lengths,
  output_features: Features,
  reserved: int = 0,
  density: float | None = None,
) -> Dataset:
  """Cuts each text in two: the inputs, and the targets that follow them.

  Args:
    dataset: examples with the feature "targets", tokens.
    sequence_length: lengths of "inputs" and "targets".
    output_features: the task's features; one position is left free for each end token.
    reserved: tokens to leave free in the inputs.
    density: mean fraction of the text that becomes the targets. The fraction is drawn uniformly
      between 0 and twice this mean; None cuts at any position.
  """
  limits = {n: sequence_length[n] - output_features[n].add_eos for n in ("inputs", "targets")}
  text_length, max_targets, mean_share = prefix_lengths(limits, reserved, density)
  dataset = split_tokens(select_random_chunk(dataset), text_length)
  dataset = dataset.filter(lambda example: tf.size(example["targets"]) > 1)

  @seqio.map_over_dataset(num_seeds=1)
  def cut(example: Mapping[str, Any], seed: Any) -> dict[str, Any]:
    tokens = example["targets"]
    share = tf.random.stateless_uniform([], seed, maxval=2 * mean_share)
    length = tf.cast(tf.round(share * tf.cast(tf.size(tokens), tf.float32)), tf.int32)
    length = tf.clip_by_value(length, 1, tf.minimum(tf.size(tokens) - 1, max_targets))
    return {"inputs": tokens[:-length], "targets": tokens[-length:]}

  return cut(dataset)


def prefix_lengths(limits: Lengths, reserved: int, density: float | None) -> tuple[int, int, float]:
  """Returns the maximum text length, the maximum targets length and the targets' mean share.

  Args:
    limits: maximum tokens of "inputs" and "targets", without their end tokens.
    reserved: see `prefix_lm`.
    density: see `prefix_lm`.
  """
  inputs, targets = limits["inputs"] - reserved, limits["targets"]
  return (min(inputs, targets), targets, 0.5) if density is None else (inputs, targets, density)


def causal_lm(dataset: Dataset, sequence_length: Lengths, output_features: Features) -> Dataset:
  """Appends an end token to each document, joins the documents and cuts them into full targets."""
  feature = output_features["targets"]

  def append_end(example: Mapping[str, Any]) -> dict[str, Any]:
    tokens = example["targets"]
    return {"targets": tf.concat([tokens, [tf.cast(feature.vocabulary.eos_id, tokens.dtype)]], 0)}

  dataset = reduce_concat_tokens(select_random_chunk(dataset).map(append_end))
  return split_tokens(dataset, sequence_length["targets"] - feature.add_eos)


def denoise_with_mode(
  dataset: Dataset, sequence_length: Lengths, output_features: Features, denoiser: Denoiser
) -> Dataset:
  """Applies one of UL2's denoisers, and puts the tokens of its mode before the inputs."""
  mode = output_features["inputs"].vocabulary.encode(denoiser.mode)
  if denoiser.mean_length is None:
    dataset = prefix_lm(dataset, sequence_length, output_features, len(mode), denoiser.density)
  else:
    assert denoiser.density is not None
    dataset = span_corruption(
      dataset,
      sequence_length,
      output_features,
      mean_noise_span_length=denoiser.mean_length,
      noise_density=denoiser.density,
      reserved_for_packing=len(mode),
    )

  def prepend_mode(example: Mapping[str, Any]) -> dict[str, Any]:
    inputs = example["inputs"]
    return {**example, "inputs": tf.concat([tf.constant(mode, inputs.dtype), inputs], 0)}

  return dataset.map(prepend_mode, num_parallel_calls=tf.data.AUTOTUNE)


def span_corruption(
  dataset: Dataset,
  sequence_length: Lengths,
  output_features: Features,
  mean_noise_span_length: PositiveNumber = 3.0,
  noise_density: Rate = 0.15,
  reserved_for_packing: int = 0,
) -> Dataset:
  """Converts tokens ("targets") to corrupted inputs, and to targets of the dropped spans.

  Documents are joined and cut so that inputs and targets, including their end tokens, are as long as
  the lengths allow. No padding remains, so packing is unnecessary.

  Args:
    dataset: examples with the feature "targets", tokens without an end token.
    sequence_length: lengths of "inputs" and "targets".
    output_features: the task's features; the vocabulary's last ids are the sentinels.
    mean_noise_span_length: mean number of tokens in a dropped span.
    noise_density: fraction of the tokens that is dropped.
    reserved_for_packing: the number of tokens to leave free in the input.

  Raises:
    ValueError: the targets do not fit.
  """
  inputs_length = sequence_length["inputs"] - reserved_for_packing
  tokens_length = segment_length(
    inputs_length, sequence_length["targets"], noise_density, mean_noise_span_length
  )
  _, num_spans = noise_and_spans(tokens_length, noise_density, mean_noise_span_length)
  num_sentinels = count_last_sentinels(output_features["targets"].vocabulary)
  warn_of_missing_sentinels(tokens_length, num_spans, num_sentinels)
  dataset = split_tokens(reduce_concat_tokens(select_random_chunk(dataset)), tokens_length)
  return denoise(dataset, output_features, noise_density, mean_noise_span_length)


def segment_length(
  inputs_length: int, targets_length: int, noise_density: float, mean_noise_span_length: float
) -> int:
  """Returns the number of tokens that a text must have to fill inputs of `inputs_length`.

  Raises:
    ValueError: the targets of such a text are longer than `targets_length`.
  """
  tokens, targets = random_spans_helper(inputs_length, noise_density, mean_noise_span_length)
  if targets_length < targets:
    raise ValueError(
      f"Span corruption of {inputs_length} input tokens (noise density {noise_density}, mean span "
      f"{mean_noise_span_length}) makes targets of {targets} tokens, but TASK_FEATURE_LENGTHS has "
      f"'targets': {targets_length}. Set it to at least {targets}."
    )
  return tokens


def random_spans_helper(
  inputs_length: int, noise_density: float = 0.15, mean_noise_span_length: float = 3.0
) -> tuple[int, int]:
  """Returns the number of tokens that fill an input of `inputs_length`, and the resulting target length.

  The lengths of input and target include one sentinel per span and the end token. T5's input length of
  512 takes 568 tokens and gives targets of 114. Unlike T5's formula, this one counts the one span of
  texts of which less than half a span is dropped.
  """

  def corrupted_lengths(tokens: int) -> tuple[int, int]:
    noise, spans = noise_and_spans(tokens, noise_density, mean_noise_span_length)
    return tokens - noise + spans + 1, noise + spans + 1

  tokens = inputs_length - 1
  while corrupted_lengths(tokens + 1)[0] <= inputs_length:
    tokens += 1
  inputs, targets = corrupted_lengths(tokens)
  if noise_density == 0.5 and targets > inputs:
    # At a density of one half, T5 keeps the two lengths equal.
    return tokens - 1, targets - 1
  return tokens, targets


def noise_and_spans(length: int, noise_density: float, mean_span_length: float) -> tuple[int, int]:
  """Returns how many tokens of a row are dropped, and in how many spans; both are at least 1."""
  noise = min(max(round(length * noise_density), 1), length - 1)
  return noise, max(round(noise / mean_span_length), 1)


@functools.cache  # so that it warns once
def warn_of_missing_sentinels(num_tokens: int, num_spans: int, num_sentinels: int) -> None:
  """Warns if a text of so many tokens has more dropped spans than the vocabulary has sentinels."""
  if num_spans > num_sentinels:
    logging.warning(
      f"Rows of {num_tokens} tokens have {num_spans} dropped spans, but the vocabulary has only "
      f"{num_sentinels} sentinels (extra_ids): its last pieces replace the missing ones, as in T5"
    )


def select_random_chunk(dataset: Dataset) -> Dataset:
  """Keeps "targets" alone, and only a random chunk of documents with more than 65,536 tokens."""

  @seqio.map_over_dataset(num_seeds=1)
  def select(example: Mapping[str, Any], seed: Any) -> dict[str, Any]:
    tokens = example["targets"]
    chunks = -(-tf.size(tokens) // _MAX_CHUNK_LENGTH)
    _, seed = tf.unstack(tf.random.split(seed))  # T5 uses the second part.
    index = tf.random.stateless_uniform([], seed, maxval=chunks, dtype=tf.int32)
    return {"targets": tokens[index * _MAX_CHUNK_LENGTH :][:_MAX_CHUNK_LENGTH]}

  return select(_drop_empty(dataset))


def reduce_concat_tokens(dataset: Dataset) -> Dataset:
  """Joins every 128 documents into one, so that few short segments remain after cutting."""

  def join(tokens: Any) -> dict[str, Any]:
    return {"targets": tf.boolean_mask(tokens, tokens != 0)}

  tokens = dataset.map(lambda example: example["targets"], num_parallel_calls=tf.data.AUTOTUNE)
  batches = tokens.padded_batch(_JOINED_DOCUMENTS, [None])
  return batches.map(join, num_parallel_calls=tf.data.AUTOTUNE)


def split_tokens(dataset: Dataset, max_tokens_per_segment: int) -> Dataset:
  """Cuts each document into segments of `max_tokens_per_segment` tokens; the last may be shorter."""

  @seqio.map_over_dataset(num_seeds=1)
  def add_starts(example: Mapping[str, Any], seed: Any) -> tuple[Mapping[str, Any], Any]:
    # T5 draws a seed here and does not use it. Without this draw, the masks would have other seeds.
    del seed
    return example, tf.range(0, tf.size(example["targets"]), max_tokens_per_segment)

  def segments(example: Mapping[str, Any], starts: Any) -> Any:
    cuts = tf.data.Dataset.from_tensor_slices(starts)
    return cuts.map(lambda s: {"targets": example["targets"][s:][:max_tokens_per_segment]})

  return add_starts(_drop_empty(dataset)).flat_map(segments)


def denoise(
  dataset: Dataset, output_features: Features, noise_density: float, mean_span_length: float
) -> Dataset:
  """Drops random spans of "targets": the kept tokens become the input, the dropped tokens the target."""
  vocabulary = output_features["targets"].vocabulary
  if "inputs" in output_features and output_features["inputs"].vocabulary != vocabulary:
    raise ValueError(
      "Span corruption makes the inputs from the tokens of the targets: both features must have the same "
      f"vocabulary, got {output_features['inputs'].vocabulary} and {vocabulary}"
    )

  @seqio.map_over_dataset(num_seeds=1)
  def corrupt(example: Mapping[str, Any], seed: Any) -> dict[str, Any]:
    tokens = example["targets"]
    seeds = tf.unstack(tf.random.split(seed, 6))  # T5 splits into six and uses two.
    mask = random_spans_noise_mask(tf.size(tokens), noise_density, seeds[:2], mean_span_length)
    return {
      **example,
      "inputs": noise_span_to_unique_sentinel(tokens, mask, vocabulary),
      "targets": noise_span_to_unique_sentinel(tokens, ~mask, vocabulary),
    }

  return corrupt(dataset)


def random_spans_noise_mask(
  length: Any, noise_density: float, seeds: Sequence[Any], mean_noise_span_length: float = 3.0
) -> Any:
  """Returns a boolean mask [length] that is True in random spans to drop.

  It drops round(length * noise_density) tokens in round(dropped / mean_noise_span_length) spans, with a
  minimum of one token and one span. Kept and dropped spans alternate, starting with a kept span. All
  such masks are equally likely.
  """
  total = tf.maximum(length, 2)  # for one kept and one dropped token; cut to `length` at the end
  dropped = tf.cast(tf.round(tf.cast(total, tf.float32) * noise_density), tf.int32)
  dropped = tf.clip_by_value(dropped, 1, total - 1)
  spans = tf.round(tf.cast(dropped, tf.float32) / mean_noise_span_length)
  spans = tf.maximum(tf.cast(spans, tf.int32), 1)
  dropped_lengths = _random_parts(dropped, spans, seeds[0])
  kept_lengths = _random_parts(total - dropped, spans, seeds[1])
  lengths = tf.reshape(tf.stack([kept_lengths, dropped_lengths], axis=1), [-1])
  return tf.repeat(tf.tile([False, True], [spans]), lengths)[:length]


def _random_parts(total: Any, parts: Any, seed: Any) -> Any:
  """Splits `total` into `parts` random positive integers by drawing parts - 1 cut positions."""
  is_cut = seqio.stateless_shuffle(tf.range(total - 1) < parts - 1, seed)
  cuts = tf.cast(tf.where(is_cut)[:, 0], tf.int32) + 1
  ends = tf.concat([cuts, [total]], axis=0)
  return ends - tf.concat([[0], cuts], axis=0)


def noise_span_to_unique_sentinel(tokens: Any, noise_mask: Any, vocabulary: Any) -> Any:
  """Replaces each run of masked tokens with one sentinel, counting down from the vocabulary's last id.

  Args:
    tokens: int [length].
    noise_mask: bool [length].
    vocabulary: the vocabulary whose last ids are the sentinels.
  """
  before = tf.concat([[False], noise_mask[:-1]], axis=0)
  is_first = noise_mask & ~before
  sentinels = vocabulary.vocab_size - tf.cumsum(tf.cast(is_first, tokens.dtype))
  return tf.boolean_mask(tf.where(is_first, sentinels, tokens), ~(noise_mask & before))


def _drop_empty(dataset: Dataset) -> Dataset:
  return dataset.filter(lambda example: tf.size(example["targets"]) > 0)
