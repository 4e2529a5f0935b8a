"""The rows of decoders whose tokenizer begins texts with no token have no start token."""

from __future__ import annotations

import types
from typing import Any

import pytest

from rosetta_t5.data.pipeline.model_features import TaskFeatureConverter
from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow


def row(texts: list[dict[str, list[int]]], lengths: dict[str, int], pack: bool) -> dict[str, Any]:
  seqio, tf = import_seqio(), import_tensorflow()
  signature = {name: tf.TensorSpec([None], tf.int32) for name in lengths}
  dataset = tf.data.Dataset.from_generator(lambda: iter(texts), output_signature=signature)
  vocabulary = types.SimpleNamespace(starts_rows=False)
  features = {"targets": types.SimpleNamespace(vocabulary=vocabulary)}
  convert = TaskFeatureConverter(seqio.DecoderFeatureConverter(pack=pack), features)
  batch = next(convert(dataset, lengths).as_numpy_iterator())
  return {name.removeprefix("decoder_"): x.tolist() for name, x in batch.items()}


def test_the_first_token_of_a_text_is_the_first_input() -> None:
  assert row([{"targets": [5, 6, 7]}], {"targets": 5}, pack=False) == {
    "input_tokens": [5, 6, 7, 0, 0],
    "target_tokens": [6, 7, 0, 0, 0],
    "loss_weights": [1, 1, 0, 0, 0],
  }


@pytest.mark.slow
def test_later_texts_of_a_packed_row_do_not_see_their_start_token() -> None:
  texts = [{"targets": [5, 6, 7]}, {"targets": [8, 9]}]
  assert row(texts, {"targets": 6}, pack=True) == {
    "input_tokens": [5, 6, 0, 8, 0, 0],
    "target_tokens": [6, 7, 0, 9, 0, 0],  # The network sees no position whose target is padding.
    "loss_weights": [1, 1, 0, 1, 0, 0],
    "segment_ids": [1, 1, 2, 2, 0, 0],
    "positions": [0, 1, 0, 0, 0, 0],
  }


@pytest.mark.slow
@pytest.mark.parametrize(("inputs", "marks"), [([5, 6], [1, 1, 0, 0, 0]), ([5], [1, 0, 0, 0, 0])])
def test_inputs_are_marked_without_the_start_token(inputs: list[int], marks: list[int]) -> None:
  made = row([{"inputs": inputs, "targets": [7, 8]}], {"inputs": 3, "targets": 2}, pack=False)
  assert made["causal_attention"] == marks
  text = [*inputs, 7, 8]
  assert made["input_tokens"] == [*text, *[0] * (5 - len(text))]
  weights = [0] * (len(inputs) - 1) + [1, 1]
  assert made["loss_weights"] == weights + [0] * (5 - len(weights))
