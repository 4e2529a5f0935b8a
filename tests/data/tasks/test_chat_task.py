"""`data.chat_task` trains on the assistant's turns, in rows of decoders and in pairs of encoder-decoders."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import transformers_chats
from transformers_chats import CONVERSATIONS

from rosetta_t5 import data
from rosetta_t5.data.tensorflow_import import import_seqio

SHAREGPT = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "A model.\n"}]


@pytest.fixture
def vocabulary(tmp_path: pathlib.Path) -> Any:
  transformers_chats.write_chat_folder("headers", tmp_path / "model")
  return data.tokenizer_vocabulary(str(tmp_path / "model"), shift=1)


@pytest.fixture
def rows(tmp_path: pathlib.Path) -> str:
  file = tmp_path / "rows.jsonl"
  records = [{"messages": CONVERSATIONS["long"]}, {"conversations": SHAREGPT, "id": 7}]
  records += [{"messages": CONVERSATIONS["question"]}, {"text": "no conversation"}]
  file.write_text("\n".join(map(json.dumps, records)))
  return str(file)


def batch_of(
  task: str, lengths: dict[str, int], size: int, pack: bool = False, epochs: int | None = 1
) -> dict[str, Any]:
  seqio = import_seqio()
  cfg = data.DatasetConfig(task, lengths, "train", size, False, 0, pack=pack)
  has_inputs = "inputs" in lengths
  converter = seqio.EncDecFeatureConverter if has_inputs else seqio.DecoderFeatureConverter
  return next(data.get_dataset(cfg, 0, 1, converter, num_epochs=epochs).as_numpy_iterator())


@pytest.mark.slow
@pytest.mark.parametrize("pack", [False, True])
def test_a_decoders_row_is_a_conversation_and_its_loss_is_the_assistants(
  pack: bool, vocabulary: Any, rows: str
) -> None:
  task = data.chat_task(rows, vocabulary=vocabulary, validation_percent=0.0)
  batch = batch_of(task, {"targets": 256}, 1 if pack else 2, pack)
  recorded = json.loads(transformers_chats.RECORDED.read_text())["headers"]
  # The start token of a decoder takes the place of the begin token.
  texts = [[n + 1 for n in recorded[key]["ids"][1:]] for key in ("long", "answered")]
  targets, weights = batch["decoder_target_tokens"], batch["decoder_loss_weights"]
  expected = [[*texts[0], *texts[1]]] if pack else texts
  for row, tokens in zip(targets, expected, strict=True):
    assert row[row > 0].tolist() == tokens
  answers = ["<think>\nhm\n</think>\n\nć 👩‍👩‍👧‍👦!", "<think>x</think>\n\n  yes", "A model."]
  trained = [n for answer in answers for n in vocabulary.encode(f"{answer}<|eot_id|>")]
  assert targets[weights > 0].tolist() == trained
  starts = (batch["decoder_input_tokens"] == 0) & (targets > 0)
  assert starts.sum() == 2
  if pack:
    assert np.unique(batch["decoder_segment_ids"]).tolist() == [0, 1, 2]


@pytest.mark.slow
def test_an_encoder_decoder_reads_the_conversation_and_writes_the_turn(
  vocabulary: Any, rows: str
) -> None:
  task = data.chat_task(rows, vocabulary=vocabulary, objective="seq2seq", validation_percent=0.0)
  batch = batch_of(task, {"inputs": 80, "targets": 40}, 3)
  encode, eos = vocabulary.encode, vocabulary.eos_id
  answers = ["<think>\nhm\n</think>\n\nć 👩‍👩‍👧‍👦!", "<think>x</think>\n\n  yes", "A model."]
  for row, answer in zip(batch["decoder_target_tokens"], answers, strict=True):
    # The token that ends turns is the folder's end token, which is not repeated.
    assert row[row > 0].tolist() == encode(f"{answer}<|eot_id|>")
    assert row[row > 0][-1] == eos
  prompt = encode("<|start_header_id|>assistant<|end_header_id|>\n\n")
  for row in batch["encoder_input_tokens"]:
    assert row[row > 0][-len(prompt) :].tolist() == prompt  # The end of a long prompt is kept.
  assert batch["encoder_input_tokens"][0][0] == encode("<|begin_of_text|>")[0]
  assert (batch["encoder_input_tokens"][1] > 0).all()


@pytest.mark.slow
def test_rows_that_are_cut_before_the_first_answer_are_left_out(vocabulary: Any, rows: str) -> None:
  task = data.chat_task(rows, vocabulary=vocabulary, validation_percent=0.0, name="cut")
  length = len(vocabulary.encode(CONVERSATIONS["long"][0]["content"])) + 60
  batch = batch_of(task, {"targets": length}, 1)
  assert batch["decoder_loss_weights"].any(axis=1).all()


@pytest.mark.slow
def test_mixtures_of_conversations_keep_the_weights(vocabulary: Any, rows: str) -> None:
  names = [
    data.chat_task(rows, vocabulary=vocabulary, validation_percent=0.0, name=name)
    for name in ("one", "other")
  ]
  batch = batch_of(data.mixture(names, rates="equal"), {"targets": 256}, 4, epochs=None)
  shares = (batch["decoder_loss_weights"] > 0).sum(1) / (batch["decoder_target_tokens"] > 0).sum(1)
  assert ((shares > 0) & (shares < 0.9)).all()


@pytest.mark.slow
def test_a_second_call_returns_the_task_and_refused_rows_stop_the_run_if_asked(
  vocabulary: Any, rows: str, tmp_path: pathlib.Path
) -> None:
  assert data.chat_task(rows, vocabulary=vocabulary) == data.chat_task(rows, vocabulary=vocabulary)
  task = data.chat_task(rows, vocabulary=vocabulary, on_bad_example="refuse")
  with pytest.raises(ValueError, match=r"rows\.jsonl, line 3: no turn of the assistant"):
    batch_of(task, {"targets": 256}, 4, epochs=None)
