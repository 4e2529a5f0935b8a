"""How the inputs of an encoder begin and end, by the folder of their vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rosetta_t5.data.tensorflow_import import seqio, tf


def input_feature(vocabulary: Any, add_eos: bool = True, **options: Any) -> seqio.Feature:
  """Returns the feature of inputs, without an end token if the folder's tokenizer adds none to them."""
  add_eos = add_eos and getattr(vocabulary, "ends_inputs", True)
  return seqio.Feature(vocabulary, add_eos=add_eos, **options)


def begin_inputs(dataset: tf.data.Dataset, output_features: Mapping[str, Any]) -> tf.data.Dataset:
  """Puts the begin tokens of a folder's tokenizer before the inputs of its encoder, as T5Gemma needs."""
  feature = output_features.get("inputs")
  if not (begin := getattr(getattr(feature, "vocabulary", None), "begin_ids", [])):
    return dataset
  return dataset.map(
    lambda example: {**example, "inputs": tf.concat([begin, example["inputs"]], 0)},
    num_parallel_calls=tf.data.AUTOTUNE,
  )
