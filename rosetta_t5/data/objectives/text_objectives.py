"""Training objectives on text, as the preprocessors of SeqIO tasks.

span_corruption   Raffel et al. 2020, section 3.3.4
prefix_lm         the same, section 3.2.3: a text cut in two, the second part follows from the first
causal_lm         each token from those before it, for decoder-only models ("targets" alone)
seq2seq           inputs and targets as they are given
ul2               Tay et al. 2022: a mixture of seven denoisers, each told by a mode's name
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rosetta_t5.data.objectives.span_corruption import (
  reduce_concat_tokens,
  select_random_chunk,
  span_corruption,
  split_tokens,
)
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio, import_tensorflow

if TYPE_CHECKING:
  import tensorflow as tf

OBJECTIVES = ("span_corruption", "prefix_lm", "causal_lm", "seq2seq", "ul2")
_LONGEST_CHUNK = 65536


@dataclasses.dataclass(frozen=True)
class Denoiser:
  """One of UL2's: spans of `mean_length` tokens that cover `density`, or all of a text's end.

  Attributes:
    mode: text before the inputs, which tells the model what is wanted.
    density: part of the tokens that is to be filled in; None for an end of any length.
    mean_length: mean tokens of a span; None makes it one span at the end.
  """

  mode: str
  density: float | None
  mean_length: float | None


# Table 1 of the paper: R(egular), X(treme) and S(equential) denoising, as often each.
UL2_DENOISERS: Mapping[str, Denoiser] = {
  "r3": Denoiser("[NLU]", 0.15, 3.0),
  "r8": Denoiser("[NLU]", 0.15, 8.0),
  "x3": Denoiser("[NLG]", 0.5, 3.0),
  "x8": Denoiser("[NLG]", 0.5, 8.0),
  "x64": Denoiser("[NLG]", 0.15, 64.0),
  "x64_half": Denoiser("[NLG]", 0.5, 64.0),
  "s": Denoiser("[S2S]", 0.25, None),
}


def preprocessors(objective: str) -> list[Callable[..., Any]]:
  """Returns what turns texts ("targets", or both features for seq2seq) into examples.

  Raises:
    ValueError: there is no such objective, or it is a mixture of several (see `ul2_preprocessors`).
  """
  if objective not in OBJECTIVES or objective == "ul2":
    raise ValueError(f"objective = {objective!r} is none of {', '.join(OBJECTIVES)}")
  make: dict[str, list[Callable[..., Any]]] = {
    "span_corruption": [span_corruption],
    "prefix_lm": [prefix_lm],
    "causal_lm": [causal_lm],
  }
  return _around(make.get(objective, []))


def ul2_preprocessors(denoiser: Denoiser) -> list[Callable[..., Any]]:
  """Returns the preprocessors of one of UL2's denoisers."""
  return _around([functools.partial(denoise_in_mode, denoiser=denoiser)])


def _around(objective: list[Callable[..., Any]]) -> list[Callable[..., Any]]:
  seqio = import_seqio()
  return [
    seqio.preprocessors.tokenize,
    seqio.CacheDatasetPlaceholder(),
    *objective,
    seqio.preprocessors.append_eos_after_trim,
  ]


def prefix_lm(
  dataset: tf.data.Dataset,
  sequence_length: Mapping[str, int],
  output_features: Mapping[str, Any],
  reserved: int = 0,
  density: float | None = None,
) -> tf.data.Dataset:
  """Cuts texts in two: inputs, and the targets that follow.

  Args:
    dataset: tokens as "targets".
    sequence_length: of "inputs" and "targets".
    output_features: the task's; an end token's place is kept free.
    reserved: tokens to leave free in the inputs.
    density: the targets' part of the text on average, drawn evenly from 0 to twice that; None
      cuts anywhere.
  """
  tf, seqio = import_tensorflow(), import_seqio()
  room = {k: sequence_length[k] - output_features[k].add_eos for k in ("inputs", "targets")}
  longest, most, mean_share = prefix_lengths(room, reserved, density)
  dataset = select_random_chunk(dataset, _LONGEST_CHUNK)
  dataset = split_tokens(dataset, longest)
  dataset = dataset.filter(lambda example: tf.size(example["targets"]) > 1)

  @seqio.map_over_dataset(num_seeds=1)
  def cut(example: Mapping[str, Any], seed: Any) -> dict[str, Any]:
    tokens = example["targets"]
    share = tf.random.stateless_uniform([], seed, maxval=2 * mean_share)
    length = tf.cast(tf.round(share * tf.cast(tf.size(tokens), tf.float32)), tf.int32)
    length = tf.clip_by_value(length, 1, tf.minimum(tf.size(tokens) - 1, most))
    return {"inputs": tokens[:-length], "targets": tokens[-length:]}

  return cut(dataset)


def prefix_lengths(
  room: Mapping[str, int], reserved: int = 0, density: float | None = None
) -> tuple[int, int, float]:
  """Returns tokens of the longest text to cut in two, of its longest end, and the end's mean share.

  Args:
    room: tokens for "inputs" and "targets", end tokens apart.
    reserved: see `prefix_lm`.
    density: see `prefix_lm`.
  """
  inputs, targets = room["inputs"] - reserved, room["targets"]
  return (min(inputs, targets), targets, 0.5) if density is None else (inputs, targets, density)


def causal_lm(
  dataset: tf.data.Dataset, sequence_length: Mapping[str, int], output_features: Mapping[str, Any]
) -> tf.data.Dataset:
  """Joins documents, an end token after each, and cuts them into full targets."""
  tf = import_tensorflow()
  feature = output_features["targets"]

  def end(example: Mapping[str, Any]) -> dict[str, Any]:
    tokens = example["targets"]
    return {"targets": tf.concat([tokens, [tf.cast(feature.vocabulary.eos_id, tokens.dtype)]], 0)}

  dataset = select_random_chunk(dataset, _LONGEST_CHUNK).map(end)
  dataset = reduce_concat_tokens(dataset)
  return split_tokens(dataset, sequence_length["targets"] - feature.add_eos)


def denoise_in_mode(
  dataset: tf.data.Dataset,
  sequence_length: Mapping[str, int],
  output_features: Mapping[str, Any],
  denoiser: Denoiser,
) -> tf.data.Dataset:
  """One of UL2's denoisers, its mode's tokens before the inputs."""
  tf = import_tensorflow()
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

  def tell(example: Mapping[str, Any]) -> dict[str, Any]:
    inputs = example["inputs"]
    return {**example, "inputs": tf.concat([tf.constant(mode, inputs.dtype), inputs], 0)}

  return dataset.map(tell, num_parallel_calls=tf.data.AUTOTUNE)
