"""A SentencePiece model that is written as tokenizer.json gives the same ids and texts."""

from __future__ import annotations

import io
import itertools
import pathlib
import unicodedata

import pytest
import sentencepiece
from tokenizers import Tokenizer

from rosetta_t5.checkpoints.formats.hugging_face.sentencepiece_tokenizer import (
  make_tokenizer,
  read_model,
)
from rosetta_t5.data.local_files.stdlib_corpus import stdlib_paragraphs

VIETNAMESE = "Tất cả mọi người sinh ra đều được tự do"
OTHERS = "모든 인간은 태어날 때부터 ἄνδρα μοι ἔννεπε ᾧ क़ ख़ שּׁ"
ODD = [
  *("", " ", "   ", "  a", "a  ", "  a   b  "),
  *("a\tb\r\nc", "a\u00a0b\u3000c", "▁a ▁b", "\ufeffx\x00y"),
  *("ﬁne ①② ｆｕｌｌ ½ ℃", "Straße İ ǆ", "日本語 テキスト", "😀 👩‍👩‍👧", "“quoted” – ’s …"),
  *(
    unicodedata.normalize(form, word)
    for word in f"{VIETNAMESE} {OTHERS}".split()
    for form in ("NFC", "NFD")
  ),
]


@pytest.fixture(scope="module")
def lines() -> list[str]:
  return list(itertools.islice(stdlib_paragraphs(), 1500))


def train(lines: list[str], **options: object) -> bytes:
  model = io.BytesIO()
  ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(lines), model_writer=model, minloglevel=2, **(ids | options)
  )
  return model.getvalue()


def find_differences(model: bytes, texts: list[str]) -> list[str]:
  """Returns the texts that the two encode differently; decoding must be the same."""
  theirs = Tokenizer.from_str(make_tokenizer(read_model(model), start=0).to_str())
  ours = sentencepiece.SentencePieceProcessor(model_proto=model)
  found = []
  for text in texts:
    ids = ours.encode(text)
    assert theirs.decode([0, *ids]) == ours.decode(ids)
    if theirs.encode(text).ids != [0, *ids]:
      # The order of equally likely pieces depends on rounding.
      assert sorted(theirs.encode(text).ids) == sorted([0, *ids]), text
      found.append(text)
  return found


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"byte_fallback": True},
    {"model_type": "bpe"},
    {"model_type": "bpe", "byte_fallback": True},
    {"normalization_rule_name": "nmt_nfkc_cf"},
    {"normalization_rule_name": "identity", "add_dummy_prefix": False}
    | {"remove_extra_whitespaces": False},
    {"split_by_whitespace": False},
    {"user_defined_symbols": ["<sep>", "the "]},
  ],
)
def test_ids_and_texts_equal_those_of_sentencepiece(lines, options):
  model = train(lines, vocab_size=1500, **options)
  assert len(find_differences(model, lines[:600])) <= 3
  assert (
    find_differences(model, [*ODD, *(f"  {line}  {line.upper()} " for line in lines[:100])]) == []
  )


def test_t5_vocabulary_gives_its_ids_of_books(shared: pathlib.Path):
  texts = []
  for book in sorted((shared / "data" / "books").glob("*.md")):
    texts += book.read_text().split("\n")[:200]
  model = (shared / "data" / "t5_vocab" / "spiece.model").read_bytes()
  assert {text.strip() for text in find_differences(model, texts)} <= {"-------"}
  assert find_differences(model, ODD) == []


@pytest.mark.parametrize(
  ("options", "text"),
  [
    ({"model_type": "char"}, "model_type must be unigram or bpe, got char"),
    ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix must be false"),
    (
      {"model_type": "bpe", "user_defined_symbols": ["x y"]},
      "bpe with user_defined_symbols is not supported",
    ),
  ],
)
def test_models_that_tokenizer_json_cannot_express_are_refused(lines, options, text):
  size = {} if options.get("model_type") == "char" else {"vocab_size": 400}
  with pytest.raises(
    ValueError, match=f"cannot be written as Transformers' tokenizer.json: {text}"
  ):
    make_tokenizer(read_model(train(lines, **size, **options)), start=0)


@pytest.mark.parametrize("content", [b"", b"not a protocol buffer"])
def test_a_file_that_is_not_a_sentencepiece_model_is_refused(content):
  with pytest.raises(ValueError, match="not a SentencePiece model: "):
    read_model(content)
