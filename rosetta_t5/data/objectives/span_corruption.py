"""T5's span corruption as SeqIO preprocessors (Raffel et al. 2020, sections 3.1.4 and 3.3.4).

A text's tokens are cut into spans, kept and dropped in turn. The input keeps the first kind and
has one sentinel for each dropped span; the target has the dropped tokens, with the sentinels where
tokens were kept. The random draws are those of T5's own preprocessors, in their order: the same
seed gives the same examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio, import_tensorflow

if TYPE_CHECKING:
  import seqio
  import tensorflow as tf

# The longest part of one document that is used in one epoch, in tokens.
_LONGEST_CHUNK = 65536


def span_corruption(
  dataset: tf.data.Dataset,
  sequence_length: Mapping[str, int],
  output_features: Mapping[str, seqio.Feature],
  mean_noise_span_length: float = 3.0,
  noise_density: float = 0.15,
  input_feature_key: str = "inputs",
  merge_examples_to_reduce_padding: bool = True,
  reserved_for_packing: int | None = None,
  passthrough_feature_keys: Sequence[str] | None = None,
) -> tf.data.Dataset:
  """Turns tokens ("targets") into corrupted inputs and their missing spans.

  Documents are joined and cut so that inputs and targets, end tokens included, are as long as the
  lengths allow: no padding is left, and packing has nothing to win.

  Args:
    dataset: examples with the feature "targets", tokens without an end token.
    sequence_length: lengths of "inputs" and "targets".
    output_features: the task's features; the vocabulary's last ids are the sentinels.
    mean_noise_span_length: mean tokens of a dropped span.
    noise_density: part of the tokens that is dropped.
    input_feature_key: the corrupted feature's name.
    merge_examples_to_reduce_padding: join documents; otherwise each is cut for itself.
    reserved_for_packing: tokens to leave free in the input.
    passthrough_feature_keys: features to keep as they are; only for documents that are not joined.

  Raises:
    ValueError: the targets do not fit, or features are to be kept while documents are joined.
  """
  if merge_examples_to_reduce_padding and passthrough_feature_keys:
    raise ValueError(
      f"span_corruption cannot keep the features {list(passthrough_feature_keys)} while it joins "
      "documents: set merge_examples_to_reduce_padding=False."
    )
  inputs_length = sequence_length[input_feature_key] - (reserved_for_packing or 0)
  tokens_length = segment_length(
    inputs_length, sequence_length["targets"], noise_density, mean_noise_span_length
  )
  keep = passthrough_feature_keys or ()
  dataset = select_random_chunk(dataset, _LONGEST_CHUNK, passthrough_feature_keys=keep)
  if merge_examples_to_reduce_padding:
    dataset = reduce_concat_tokens(dataset)
  dataset = split_tokens(dataset, tokens_length, passthrough_feature_keys=keep)
  return denoise(
    dataset, output_features, noise_density, mean_noise_span_length, input_feature_key, keep
  )


def segment_length(
  inputs_length: int,
  targets_length: int,
  noise_density: float = 0.15,
  mean_noise_span_length: float = 3.0,
) -> int:
  """Returns how many tokens a text must have to fill inputs of `inputs_length`.

  Raises:
    ValueError: its targets are longer than `targets_length`.
  """
  tokens, targets = random_spans_helper(inputs_length, noise_density, mean_noise_span_length)
  if targets_length < targets:
    raise ValueError(
      f"Span corruption of {inputs_length} input tokens (noise density {noise_density}, mean span "
      f"{mean_noise_span_length}) makes targets of {targets} tokens, but TASK_FEATURE_LENGTHS gives "
      f"them {targets_length}: set 'targets' to at least {targets}."
    )
  return tokens


def random_spans_helper(
  inputs_length: int, noise_density: float = 0.15, mean_noise_span_length: float = 3.0
) -> tuple[int, int]:
  """Returns how many tokens fill an input of `inputs_length`, and the target's length then.

  Both counts of input and target include one sentinel a span and the end token. T5's 512 gives
  568 tokens and targets of 114.
  """

  def corrupted_lengths(tokens: int) -> tuple[int, int]:
    noise = round(tokens * noise_density)
    spans = round(noise / mean_noise_span_length)
    return tokens - noise + spans + 1, noise + spans + 1

  tokens = inputs_length - 1
  while corrupted_lengths(tokens + 1)[0] <= inputs_length:
    tokens += 1
  inputs, targets = corrupted_lengths(tokens)
  if noise_density == 0.5 and targets > inputs:
    # Half and half: T5 keeps the two lengths equal, since the input's was the one chosen.
    return tokens - 1, targets - 1
  return tokens, targets


def select_random_chunk(
  dataset: tf.data.Dataset,
  max_length: int,
  feature_key: str = "targets",
  passthrough_feature_keys: Sequence[str] = (),
) -> tf.data.Dataset:
  """Keeps one random chunk of each document that is longer than `max_length` tokens."""
  tf, seqio = import_tensorflow(), import_seqio()

  @seqio.map_over_dataset(num_seeds=1)
  def chunk(example: Mapping[str, Any], seed: Any) -> dict[str, Any]:
    tokens = example[feature_key]
    chunks = -(-tf.size(tokens) // max_length)
    _, seed = tf.unstack(tf.random.split(seed))
    which = tf.random.stateless_uniform([], seed, maxval=chunks, dtype=tf.int32)
    kept = {key: example[key] for key in passthrough_feature_keys}
    return {feature_key: tokens[which * max_length :][:max_length], **kept}

  return chunk(_drop_empty(dataset, feature_key))


def reduce_concat_tokens(
  dataset: tf.data.Dataset, feature_key: str = "targets", batch_size: int = 128, **_: Any
) -> tf.data.Dataset:
  """Joins each `batch_size` documents into one, so that cutting leaves few short ends."""
  tf = import_tensorflow()

  def join(tokens: Any) -> dict[str, Any]:
    return {feature_key: tf.boolean_mask(tokens, tokens != 0)}

  tokens = dataset.map(lambda example: example[feature_key], num_parallel_calls=tf.data.AUTOTUNE)
  return tokens.padded_batch(batch_size, [None]).map(join, num_parallel_calls=tf.data.AUTOTUNE)


def split_tokens(
  dataset: tf.data.Dataset,
  max_tokens_per_segment: int,
  feature_key: str = "targets",
  passthrough_feature_keys: Sequence[str] = (),
  **_: Any,
) -> tf.data.Dataset:
  """Cuts each document into segments of `max_tokens_per_segment`; the last may be shorter."""
  tf, seqio = import_tensorflow(), import_seqio()

  @seqio.map_over_dataset(num_seeds=1)
  def starts(example: Mapping[str, Any], seed: Any) -> tuple[Mapping[str, Any], Any]:
    del seed  # Unused; T5 draws one here, and without it the masks would get other seeds than T5's.
    return example, tf.range(0, tf.size(example[feature_key]), max_tokens_per_segment)

  def segments(example: Mapping[str, Any], starts: Any) -> Any:
    def cut(start: Any) -> dict[str, Any]:
      kept = {key: example[key] for key in passthrough_feature_keys}
      return {feature_key: example[feature_key][start:][:max_tokens_per_segment], **kept}

    return tf.data.Dataset.from_tensor_slices(starts).map(cut)

  return starts(_drop_empty(dataset, feature_key)).flat_map(segments)


def split_tokens_to_inputs_length(
  dataset: tf.data.Dataset,
  sequence_length: Mapping[str, int],
  output_features: Mapping[str, seqio.Feature],
  **options: Any,
) -> tf.data.Dataset:
  """Cuts documents to the length of "inputs", with room for its end token."""
  length = sequence_length["inputs"] - output_features["inputs"].add_eos
  return split_tokens(dataset, length, **options)


def split_tokens_to_targets_length(
  dataset: tf.data.Dataset,
  sequence_length: Mapping[str, int],
  output_features: Mapping[str, seqio.Feature],
  **options: Any,
) -> tf.data.Dataset:
  """Cuts documents to the length of "targets", with room for its end token."""
  length = sequence_length["targets"] - output_features["targets"].add_eos
  return split_tokens(dataset, length, **options)


def denoise(
  dataset: tf.data.Dataset,
  output_features: Mapping[str, seqio.Feature],
  noise_density: float = 0.15,
  mean_noise_span_length: float = 3.0,
  input_feature_key: str = "inputs",
  passthrough_feature_keys: Sequence[str] = (),
) -> tf.data.Dataset:
  """Drops random spans of "targets": what is left is the input, what was dropped the target."""
  tf, seqio = import_tensorflow(), import_seqio()
  vocabulary = output_features["targets"].vocabulary
  of_inputs = output_features.get(input_feature_key)
  if of_inputs is not None and of_inputs.vocabulary != vocabulary:
    raise ValueError(
      f"Span corruption makes inputs from the targets' tokens, but '{input_feature_key}' has the "
      f"vocabulary {of_inputs.vocabulary} and 'targets' has {vocabulary}: give both the same."
    )

  @seqio.map_over_dataset(num_seeds=1)
  def corrupt(example: Mapping[str, Any], seed: Any) -> dict[str, Any]:
    tokens = example["targets"]
    seeds = tf.unstack(tf.random.split(seed, 6))  # Six as in T5, which gives four to no purpose.
    mask = random_spans_noise_mask(
      tf.size(tokens), noise_density, seeds[:2], mean_noise_span_length
    )
    kept = {key: example[key] for key in passthrough_feature_keys}
    return {
      input_feature_key: noise_span_to_unique_sentinel(tokens, mask, vocabulary),
      "targets": noise_span_to_unique_sentinel(tokens, ~mask, vocabulary),
      **kept,
    }

  return corrupt(dataset)


def random_spans_noise_mask(
  length: Any, noise_density: float, seeds: Sequence[Any], mean_noise_span_length: float = 3.0
) -> Any:
  """Returns a boolean mask [length] of random dropped spans.

  There are round(length * noise_density) dropped tokens in round(dropped / mean) spans, at least
  one each. Kept and dropped spans alternate, a kept one first; all ways to do so are equally
  likely.
  """
  tf = import_tensorflow()
  if noise_density == 0.0:
    return tf.zeros([length], tf.bool)
  total = tf.maximum(length, 2)  # One kept, one dropped token at least; cut to `length` below.
  dropped = tf.cast(tf.round(tf.cast(total, tf.float32) * noise_density), tf.int32)
  dropped = tf.clip_by_value(dropped, 1, total - 1)
  spans = tf.round(tf.cast(dropped, tf.float32) / mean_noise_span_length)
  spans = tf.maximum(tf.cast(spans, tf.int32), 1)
  dropped_lengths = _random_parts(dropped, spans, seeds[0])
  kept_lengths = _random_parts(total - dropped, spans, seeds[1])
  lengths = tf.reshape(tf.stack([kept_lengths, dropped_lengths], axis=1), [-1])
  return tf.repeat(tf.tile([False, True], [spans]), lengths)[:length]


def _random_parts(total: Any, parts: Any, seed: Any) -> Any:
  """Cuts `total` into `parts` positive numbers: parts - 1 of the total - 1 places are drawn."""
  tf, seqio = import_tensorflow(), import_seqio()
  is_cut = seqio.stateless_shuffle(tf.range(total - 1) < parts - 1, seed)
  cuts = tf.cast(tf.where(is_cut)[:, 0], tf.int32) + 1
  ends = tf.concat([cuts, [total]], axis=0)
  return ends - tf.concat([[0], cuts], axis=0)


def noise_span_to_unique_sentinel(tokens: Any, noise_mask: Any, vocabulary: Any) -> Any:
  """Replaces each run of masked tokens by one sentinel: the vocabulary's last id, then downwards.

  Args:
    tokens: int [length].
    noise_mask: bool [length].
    vocabulary: its last ids serve as sentinels.
  """
  tf = import_tensorflow()
  before = tf.concat([[False], noise_mask[:-1]], axis=0)
  is_first = noise_mask & ~before
  sentinels = vocabulary.vocab_size - tf.cumsum(tf.cast(is_first, tokens.dtype))
  return tf.boolean_mask(tf.where(is_first, sentinels, tokens), ~(noise_mask & before))


def _drop_empty(dataset: tf.data.Dataset, feature_key: str) -> tf.data.Dataset:
  return dataset.filter(lambda example: import_tensorflow().size(example[feature_key]) > 0)
