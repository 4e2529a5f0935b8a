"""GPT-2's vocabulary: its merges, its ids, and decoding in Python and TensorFlow."""

from __future__ import annotations

import json
import pathlib
import pickle

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from rosetta_t5.data.tensorflow_import import import_tensorflow
from rosetta_t5.data.vocabularies.task_vocabularies import (
  GPT2_END,
  gpt2_vocabulary,
  tokenizer_vocabulary,
)


@pytest.fixture
def gpt2(tmp_path: pathlib.Path) -> tuple[str, str]:
  """A small BPE vocabulary in GPT-2's files: bytes, some merges, the end token."""
  characters = sorted(ByteLevel.alphabet())
  merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("l", "l"), ("'", "ll")]
  pieces = [*characters, *("".join(pair) for pair in merges), GPT2_END]
  (tmp_path / "vocab.json").write_text(json.dumps({piece: n for n, piece in enumerate(pieces)}))
  lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
  (tmp_path / "merges.txt").write_text("\n".join(lines))
  return str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")


def test_gpt2s_merges_are_applied_by_rank_and_id_0_is_left_for_padding(
  gpt2: tuple[str, str],
) -> None:
  vocabulary = gpt2_vocabulary(*gpt2, extra_ids=5)
  ids = json.loads(pathlib.Path(gpt2[0]).read_text())
  pieces = {number + 1: piece for piece, number in ids.items()}
  tokens = vocabulary.encode("the thell'll the")
  assert [pieces[t] for t in tokens] == ["the", "Ġthe", "ll", "'ll", "Ġthe"]
  assert tokens == [258, 259, 260, 261, 259]
  assert vocabulary.eos_id == ids["<|endoftext|>"] + 1
  assert vocabulary.vocab_size == len(ids) + 1 + 5
  assert 0 not in vocabulary.encode("".join(map(chr, range(300))))


def test_gpt2s_vocabulary_decodes_every_text_it_encodes_in_python_and_tensorflow(
  gpt2: tuple[str, str],
) -> None:
  vocabulary = gpt2_vocabulary(*gpt2)
  tf = import_tensorflow()
  for text in ("the  cat\n\n ", "naïve 日本 1234 don't", "\t\x00"):
    assert vocabulary.decode(vocabulary.encode(text)) == text
    tokens = vocabulary.encode_tf(tf.constant(text))
    assert tokens.numpy().tolist() == vocabulary.encode(text)
    assert vocabulary.decode_tf(tokens).numpy().decode() == text
    several = vocabulary.decode_tf(tf.stack([tokens, tokens])).numpy()
    assert [decoded.decode() for decoded in several] == [text, text]
  assert vocabulary.decode([*vocabulary.encode("the cat"), vocabulary.eos_id]) == "the cat"
  assert pickle.loads(pickle.dumps(vocabulary)) == vocabulary


def test_files_of_another_format_are_refused_as_gpt2s_vocabulary(gpt2: tuple[str, str]) -> None:
  with pytest.raises(ValueError, match=r"cannot be read as a tokenizer\.json, or as GPT-2's"):
    gpt2_vocabulary(gpt2[1], gpt2[0]).encode("a")


def test_an_unknown_token_0_of_a_tokenizer_is_not_padding(tmp_path: pathlib.Path) -> None:
  ids = {"<unk>": 0, "<s>": 1, "</s>": 2, "red": 3}
  tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
  tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  vocabulary = tokenizer_vocabulary(str(tmp_path / "tokenizer.json"), "</s>")
  assert vocabulary.encode("red Q red") == [3, 1, 3]
  assert vocabulary.decode([3, 0, 0]) == "red"
