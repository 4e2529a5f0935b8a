"""Batches with token ids out of range, or without targets, are refused."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from rosetta_t5.data.pipeline.datasets import check_has_target, check_ids, token_limit

LIMIT = 384


def batch(**features: Any) -> dict[str, np.ndarray]:
  tokens = np.array([[5, 6, 0], [383, 0, 0]], np.int32)
  return {"encoder_input_tokens": tokens, "decoder_target_tokens": tokens, **features}


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.int16])
def test_ids_in_the_vocabulary_pass(dtype: Any) -> None:
  check_ids({name: x.astype(dtype) for name, x in batch().items()}, "the task 'a'", LIMIT)


@pytest.mark.parametrize(("value", "shown"), [(384, "384"), (-7, "-7"), (2**33 + 5, "8589934597")])
@pytest.mark.parametrize("name", ["encoder_input_tokens", "decoder_target_tokens"])
def test_an_id_outside_the_vocabulary_is_refused_with_its_location(
  value: int, shown: str, name: str
) -> None:
  wrong = np.array([[5, 6], [7, value]])
  with pytest.raises(ValueError, match="from 0 to 383") as caught:
    check_ids(batch(**{name: wrong}), "the task 'a'", LIMIT)
  assert str(caught.value) == (
    f"the task 'a' has the value {shown} in {name} (row 1, position 1 of a batch): it must be from 0 to "
    "383, because the model's vocabulary has 384 ids (its network's vocab_size). Correct the task's "
    "vocabulary (-1 is the id of a piece that it lacks, usually the end token) or its preprocessors"
  )


def test_a_model_that_states_no_vocabulary_refuses_only_negative_ids() -> None:
  limit = token_limit(types.SimpleNamespace(network_config=None))
  assert limit is None
  check_ids(batch(decoder_target_tokens=np.array([[10**6]])), "data", limit)
  with pytest.raises(
    ValueError, match=r"has the value -1 in decoder_target_tokens .* from 0 to 2147483647"
  ):
    check_ids(batch(decoder_target_tokens=np.array([[-1]])), "data", limit)


def test_other_integers_may_be_negative_but_must_fit_into_32_bits() -> None:
  check_ids({"offsets": np.array([-5, 2**31 - 1])}, "data", LIMIT)
  with pytest.raises(ValueError, match=r"2147483648 in offsets .* integers have 32 bits"):
    check_ids({"offsets": np.array([2**31])}, "data", LIMIT)


def test_one_target_is_enough() -> None:
  check_has_target(batch(), "data")
  check_has_target({"x": np.zeros(3)}, "data")  # a model with other features


@pytest.mark.parametrize(
  ("features", "feature"),
  [
    ({"decoder_loss_weights": np.zeros((2, 3), np.int32)}, "decoder_loss_weights"),
    ({"decoder_target_tokens": np.zeros((2, 3), np.int32)}, "decoder_target_tokens"),
  ],
)
def test_a_batch_without_targets_is_refused(features: dict, feature: str) -> None:
  with pytest.raises(
    ValueError, match=f"the task 'a' has no target .* 2 rows have only 0 in {feature}"
  ):
    check_has_target(batch(**features), "the task 'a'")
