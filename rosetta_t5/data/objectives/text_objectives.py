"""Training objectives on text, as the preprocessors of SeqIO tasks.

span_corruption   Raffel et al. 2020, section 3.3.4
prefix_lm         Raffel et al. 2020, section 3.2.3: a text is cut in two, the model predicts the second part
causal_lm         the model predicts each token from those before it, for decoder-only models ("targets" alone)
seq2seq           inputs and targets are used as they are
ul2               Tay et al. 2022: a mixture of seven denoisers, each announced by a mode token
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from rosetta_t5.data.objectives.span_corruption import (
  reduce_concat_tokens,
  select_random_chunk,
  span_corruption,
  split_tokens,
)
from rosetta_t5.data.tensorflow_import import seqio, tf

OBJECTIVES = ("span_corruption", "prefix_lm", "causal_lm", "seq2seq", "ul2")


@dataclasses.dataclass(frozen=True)
class Denoiser:
  """One of UL2's denoisers.

  Attributes:
    mode: text before the inputs that announces the denoiser to the model.
    density: fraction of the tokens that the model predicts. If `mean_length` is None, it may be None
      too: the text is then cut at any position.
    mean_length: mean number of tokens in a span; None means one span at the end of the text.
  """

  mode: str
  density: float | None
  mean_length: float | None


# Table 1 of the paper: R(egular), X(treme) and S(equential) denoisers, drawn equally often.
UL2_DENOISERS: Mapping[str, Denoiser] = {
  "r3": Denoiser("[NLU]", 0.15, 3.0),
  "r8": Denoiser("[NLU]", 0.15, 8.0),
  "x3": Denoiser("[NLG]", 0.5, 3.0),
  "x8": Denoiser("[NLG]", 0.5, 8.0),
  "x64": Denoiser("[NLG]", 0.15, 64.0),
  "x64_half": Denoiser("[NLG]", 0.5, 64.0),
  "s": Denoiser("[S2S]", 0.25, None),
}


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
    "seq2seq": [],
  }
  if denoiser is not None:
    stages["ul2"] = [functools.partial(denoise_with_mode, denoiser=denoiser)]
  return [
    seqio.preprocessors.tokenize,
    seqio.CacheDatasetPlaceholder(),
    *stages[objective],
    seqio.preprocessors.append_eos_after_trim,
  ]


def prefix_lm(
  dataset: tf.data.Dataset,
  sequence_length: Mapping[str, int],
  output_features: Mapping[str, Any],
  reserved: int = 0,
  density: float | None = None,
) -> tf.data.Dataset:
  """Cuts each text in two: the inputs, and the targets that follow them.

  Args:
    dataset: examples with the feature "targets", tokens.
    sequence_length: lengths of "inputs" and "targets".
    output_features: the task's features; one position is left free for each end token.
    reserved: tokens to leave free in the inputs.
    density: mean fraction of the text that becomes the targets. The fraction is drawn uniformly
      between 0 and twice this mean; None cuts at any position.
  """
  limits = {
    name: sequence_length[name] - output_features[name].add_eos for name in ("inputs", "targets")
  }
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


def prefix_lengths(
  limits: Mapping[str, int], reserved: int, density: float | None
) -> tuple[int, int, float]:
  """Returns the maximum text length, the maximum targets length and the targets' mean share.

  Args:
    limits: maximum tokens of "inputs" and "targets", without their end tokens.
    reserved: see `prefix_lm`.
    density: see `prefix_lm`.
  """
  inputs, targets = limits["inputs"] - reserved, limits["targets"]
  return (min(inputs, targets), targets, 0.5) if density is None else (inputs, targets, density)


def causal_lm(
  dataset: tf.data.Dataset, sequence_length: Mapping[str, int], output_features: Mapping[str, Any]
) -> tf.data.Dataset:
  """Appends an end token to each document, joins the documents and cuts them into full targets."""
  feature = output_features["targets"]

  def append_end(example: Mapping[str, Any]) -> dict[str, Any]:
    tokens = example["targets"]
    return {"targets": tf.concat([tokens, [tf.cast(feature.vocabulary.eos_id, tokens.dtype)]], 0)}

  dataset = select_random_chunk(dataset).map(append_end)
  dataset = reduce_concat_tokens(dataset)
  return split_tokens(dataset, sequence_length["targets"] - feature.add_eos)


def denoise_with_mode(
  dataset: tf.data.Dataset,
  sequence_length: Mapping[str, int],
  output_features: Mapping[str, Any],
  denoiser: Denoiser,
) -> tf.data.Dataset:
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
