"""Vocabularies of folders with a tokenizer.json give Transformers' ids and texts."""

from __future__ import annotations

import json
import pathlib
import pickle
from typing import Any

import numpy as np
import pytest
from transformers_tokenizers import (
  MAKERS,
  RECORDED,
  SPECIAL,
  digest,
  lines,
  plain,
  record,
  write_folder,
)

from rosetta_t5.data import tokenizer_vocabulary
from rosetta_t5.data.tensorflow_import import import_tensorflow

SHIFTS = {"llama": 1, "qwen": 1, "gemma": 0, "t5": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  root = tmp_path_factory.mktemp("tokenizers")
  for case in MAKERS:
    write_folder(case, root / case)
  return root


def vocabulary_of(folder: pathlib.Path) -> Any:
  return tokenizer_vocabulary(str(folder))


def made_of_lines(vocabulary: Any, shift: int, special: list[str]) -> dict[str, Any]:
  """Returns what `record` returns, with this project's vocabulary."""
  rows = [vocabulary.encode(line) for line in lines(special=special)]
  theirs = [[number - shift for number in row] for row in rows]
  before, after = vocabulary._surrounding_ids
  return {
    "surrounded": [*before, *(n - shift for n in vocabulary.encode("a")), *after],
    "ids": digest(theirs),
    "texts": digest(vocabulary.tokenizer.decode(x, skip_special_tokens=False) for x in theirs),
    "shown": digest(map(vocabulary.decode, plain(rows))),
  }


@pytest.mark.slow
@pytest.mark.parametrize("case", MAKERS)
def test_ids_and_texts_of_ten_thousand_lines_are_those_of_transformers(
  case: str, folders: pathlib.Path
) -> None:
  recorded = json.loads(RECORDED.read_text())[case]
  assert made_of_lines(vocabulary_of(folders / case), SHIFTS[case], SPECIAL[case]) == recorded


@pytest.mark.parametrize("case", MAKERS)
def test_a_folder_that_transformers_saves_again_is_the_same_vocabulary(
  case: str, folders: pathlib.Path, tmp_path: pathlib.Path, shared: pathlib.Path
) -> None:
  transformers = pytest.importorskip("transformers")
  tokenizer = transformers.AutoTokenizer.from_pretrained(folders / case)
  tokenizer.add_tokens(["newtoken"])
  tokenizer.add_special_tokens({"extra_special_tokens": ["<|new|>"]})
  tokenizer.save_pretrained(tmp_path / case)
  assert record(tmp_path / case, ["<|new|>"]) == made_of_lines(
    vocabulary_of(tmp_path / case), SHIFTS[case], ["<|new|>"]
  )
  books = [p.read_text(errors="replace") for p in sorted((shared / "data/books").rglob("*.txt"))]
  texts = [line for book in books for line in book.splitlines()][:10_000]
  vocabulary = vocabulary_of(tmp_path / case)
  for text in texts:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [n - SHIFTS[case] for n in vocabulary.encode(text)] == ids
    assert vocabulary.decode(vocabulary.encode(text)) == tokenizer.decode(ids)


def test_special_ids_and_the_rules_of_inputs_come_from_the_folder(folders: pathlib.Path) -> None:
  def ids(case: str) -> tuple[Any, ...]:
    v = vocabulary_of(folders / case)
    shown = [v.tokenizer.id_to_token(n - SHIFTS[case]) for n in (v.eos_id, v.bos_id or 0) if n > 0]
    return (*shown, v.unk_id, v.begin_ids, v.ends_inputs)

  # Of the two ends in config.json, the tokenizer's own; without one there, that of tokenizer_config.json.
  assert ids("llama") == ("<|eot_id|>", "<|begin_of_text|>", None, [], False)
  assert ids("qwen")[:2] == ("<|im_end|>", None)
  assert ids("gemma") == ("<eos>", "<bos>", 3, [], False)
  assert ids("t5") == ("</s>", 2, [], True)


def test_the_inputs_of_an_encoder_begin_and_end_as_its_folder_says(
  folders: pathlib.Path, tmp_path: pathlib.Path
) -> None:
  from rosetta_t5.data.pipeline.inference_data import (
    chat_preprocessors,
    default_preprocessors,
    get_dataset_from_natural_text_examples,
  )
  from rosetta_t5.data.vocabularies.encoder_inputs import input_feature

  for file in (folders / "gemma").iterdir():
    (tmp_path / file.name).write_bytes(file.read_bytes())
  (tmp_path / "config.json").write_text('{"is_encoder_decoder": true, "eos_token_id": 1}')
  vocabulary = tokenizer_vocabulary(str(tmp_path))
  feature = input_feature(vocabulary)
  (example,) = get_dataset_from_natural_text_examples(
    [{"input": "a b", "target": "a b"}],
    default_preprocessors(),
    {"inputs": 32, "targets": 32},
    {"inputs": feature, "targets": type(feature)(vocabulary)},
  ).as_numpy_iterator()
  (chat,) = get_dataset_from_natural_text_examples(
    [{"input": "<bos>a b c d", "target": ""}],
    chat_preprocessors(),
    {"inputs": 5, "targets": 5},
    {"inputs": feature, "targets": feature},
  ).as_numpy_iterator()
  # Of a conversation, the end is kept, and nothing is added to it.
  assert chat["inputs"].tolist() == vocabulary.encode("<bos>a b c d")[-5:]
  text = vocabulary.encode("a b")
  assert example["inputs"].tolist() == [2, *text]
  assert example["targets"].tolist() == [*text, 1]


def test_a_vocabulary_works_in_tensorflow_and_in_another_process(folders: pathlib.Path) -> None:
  tf = import_tensorflow()
  for case in MAKERS:
    vocabulary = vocabulary_of(folders / case)
    again = pickle.loads(pickle.dumps(vocabulary))
    assert again == vocabulary
    assert again != tokenizer_vocabulary(str(folders / case), "a", SHIFTS[case])
    texts = lines(40)
    dataset = tf.data.Dataset.from_tensor_slices(texts).map(again.encode_tf)
    for text, row in zip(texts, dataset.as_numpy_iterator(), strict=True):
      np.testing.assert_array_equal(row, vocabulary.encode(text))
      assert again.decode_tf(tf.constant(row)).numpy().decode() == vocabulary.decode(row.tolist())


def test_tokens_that_only_other_files_name_are_added_in_transformers_order(
  folders: pathlib.Path, tmp_path: pathlib.Path
) -> None:
  (tmp_path / "tokenizer.json").write_bytes((folders / "qwen/tokenizer.json").read_bytes())
  legacy = {"pad_token": "<pad>", "mask_token": {"content": "<mask>"}, "bos_token": "<|im_start|>"}
  (tmp_path / "special_tokens_map.json").write_text(json.dumps(legacy))
  (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
  (tmp_path / "added_tokens.json").write_text('{"second": 910, "first": 905}')
  vocabulary = tokenizer_vocabulary(str(tmp_path), QWEN_END := "<|im_end|>", 1)
  size = vocabulary_of(folders / "qwen").vocab_size
  ids = [vocabulary.encode(token) for token in ("first", "second", "<pad>", "<mask>", QWEN_END)]
  assert ids == [[size], [size + 1], [size + 2], [size + 3], [size - 1]]
  transformers = pytest.importorskip("transformers")
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  named = [theirs.encode(token) for token in ("first", "second", "<pad>", "<mask>", QWEN_END)]
  assert [[n - 1 for n in row] for row in ids] == named


def test_mistakes_in_a_tokenizers_folder_are_named(
  folders: pathlib.Path, tmp_path: pathlib.Path
) -> None:
  with pytest.raises(
    ValueError, match=r"There is no .*tokenizer\.json: have Transformers write it"
  ):
    tokenizer_vocabulary(str(tmp_path))
  with pytest.raises(ValueError, match=r"no token '</s>' \(eos_token\) .*vocabulary\.eos_token"):
    tokenizer_vocabulary(str(folders / "qwen"), "</s>", 1).eos_id  # noqa: B018
