"""Text is prepared with the tokenizer.json of a folder, and its tokens are those of the vocabulary."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from inline_executor import InlineExecutor
from transformers_tokenizers import lines, write_folder

from rosetta_t5 import data
from rosetta_t5.data.prepared import prepared_task
from rosetta_t5.data.prepared.prepare import prepare
from rosetta_t5.data.prepared.shards import TokenStream


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("case", ["qwen", "llama"])
def test_prepared_rows_begin_with_a_start_token_only_if_the_folders_texts_do(
  case: str, pack: bool, tmp_path: pathlib.Path
) -> None:
  write_folder(case, tmp_path / "model")
  (tmp_path / "texts.txt").write_text("\n".join(map(str.strip, lines(100))))
  arguments = str(tmp_path / "texts.txt"), str(tmp_path / "model"), tmp_path / "prepared"
  prepare(*arguments, validation_percent=0.0, executor=InlineExecutor())
  task = prepared_task(str(tmp_path / "prepared"), "causal_lm")
  cfg = data.DatasetConfig(task, {"targets": 8}, "train", 4, False, 0, pack=pack)
  batch = task.batch_sequence(cfg, 0, 1, 0)[0]
  texts = TokenStream(tmp_path / "prepared", "train").read([0, 8, 16, 24], 8)
  end = np.zeros_like(texts[:, :1])
  expected = {
    "llama": (np.hstack([end, texts[:, :-1]]), texts),
    "qwen": (np.hstack([texts[:, :-1], end]), np.hstack([texts[:, 1:], end])),
  }[case]
  np.testing.assert_array_equal(batch["decoder_input_tokens"], expected[0])
  np.testing.assert_array_equal(batch["decoder_target_tokens"], expected[1])
  np.testing.assert_array_equal(batch["decoder_loss_weights"], expected[1] > 0)
  if pack:
    np.testing.assert_array_equal(batch["decoder_segment_ids"], expected[1] > 0)
    positions = np.arange(8) * (expected[1] > 0)
    np.testing.assert_array_equal(batch["decoder_positions"], positions)


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("case", ["qwen", "t5"])
def test_prepared_tokens_and_batches_are_those_of_the_folders_vocabulary(
  case: str, tmp_path: pathlib.Path
) -> None:
  write_folder(case, tmp_path / "model")
  texts = [line.strip() for line in lines(300) if line.strip() and "\n" not in line.strip()]
  (tmp_path / "texts.txt").write_text("\n".join(texts))
  out = tmp_path / "prepared"
  prepare(
    str(tmp_path / "texts.txt"),
    str(tmp_path / "model"),
    out,
    append_end=case == "qwen",
    validation_percent=0.0,
    executor=InlineExecutor(),
  )
  (tmp_path / "model").rename(tmp_path / "moved")
  objective = {"qwen": "causal_lm", "t5": "span_corruption"}[case]
  task = prepared_task(str(out), objective)
  vocabulary = task.output_features["targets"].vocabulary
  end = [vocabulary.eos_id] if case == "qwen" else []
  records = [text for text in (tmp_path / "texts.txt").read_text().split("\n") if text.strip()]
  expected = [token for text in records for token in [*vocabulary.encode(text), *end]]
  assert TokenStream(out, "train").read([0], len(expected))[0].tolist() == expected
  lengths = {"targets": 64} if case == "qwen" else {"inputs": 64, "targets": 32}
  cfg = data.DatasetConfig(task, lengths, "train", 4, False, 0)
  batch = task.batch_sequence(cfg, 0, 1, 0)[0]
  assert batch["decoder_target_tokens"].max() < vocabulary.vocab_size
  if case == "qwen":  # whose end token is not 1
    pairs = prepared_task(str(out), "prefix_lm", extra_ids=0)
    cfg = data.DatasetConfig(pairs, {"inputs": 64, "targets": 64}, "train", 4, False, 0)
    rows = pairs.batch_sequence(cfg, 0, 1, 0)[0]["decoder_target_tokens"]
    assert [row[row > 0][-1] for row in rows] == end * 4
  if case == "t5":
    sentinels = vocabulary.named_sentinels()
    assert sentinels[0] == vocabulary.vocab_size - 1
    assert (batch["encoder_input_tokens"] == sentinels[0]).sum() == 4
    np.testing.assert_array_equal((batch["decoder_target_tokens"] == vocabulary.eos_id).sum(1), 1)
