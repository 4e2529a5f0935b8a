"""A SentencePiece model that is written as tokenizer.json gives the same ids and texts."""

from __future__ import annotations

import io
import json
import pathlib
import unicodedata

import pytest
import sentencepiece
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import Tokenizer

from rosetta_t5.checkpoints.formats.hugging_face.folder import write
from rosetta_t5.checkpoints.formats.hugging_face.tokenizer_files import make_tokenizer
from rosetta_t5.data.tensorflow_import import import_seqio

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
  pages = sorted((pathlib.Path(__file__).parents[2] / "docs").glob("*.md"))
  text = "\n".join(page.read_text() for page in pages)
  return [line for line in text.splitlines() if line and "─" not in line][:600]


def train(lines: list[str], **options: object) -> bytes:
  model = io.BytesIO()
  ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(lines), model_writer=model, minloglevel=2, **(ids | options)
  )
  return model.getvalue()


def find_differences(model: bytes, texts: list[str]) -> list[str]:
  """Returns the texts that the two encode differently; decoding must be the same."""
  theirs = Tokenizer.from_str(make_tokenizer(ModelProto.FromString(model), start=0).to_str())
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


@pytest.mark.one_quick_variant
@pytest.mark.parametrize(
  "options",
  [
    {},
    {"byte_fallback": True},
    {"normalization_rule_name": "nmt_nfkc_cf"},
    {"normalization_rule_name": "identity", "add_dummy_prefix": False}
    | {"remove_extra_whitespaces": False},
    {"split_by_whitespace": False},
    {"user_defined_symbols": ["<sep>", "the "]},
  ],
)
def test_ids_and_texts_equal_those_of_sentencepiece(lines, options):
  model = train(lines, vocab_size=800, **options)
  assert len(find_differences(model, lines[:600])) <= 3
  assert (
    find_differences(model, [*ODD, *(f"  {line}  {line.upper()} " for line in lines[:100])]) == []
  )


@pytest.mark.slow
def test_t5_vocabulary_gives_its_ids_of_books(shared: pathlib.Path):
  texts = []
  for book in sorted((shared / "data" / "books").glob("*.md")):
    texts += book.read_text().split("\n")[:200]
  model = (shared / "data" / "t5_vocab" / "spiece.model").read_bytes()
  assert {text.strip() for text in find_differences(model, texts)} <= {"-------"}
  assert find_differences(model, ODD) == []


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("options", [{"model_type": "bpe"}, {"treat_whitespace_as_suffix": True}])
def test_models_that_tokenizer_json_cannot_express_are_refused(lines, options):
  model = ModelProto.FromString(train(lines, vocab_size=400, **options))
  with pytest.raises(ValueError, match=r"model_type is unigram .* Without --tokenizer"):
    make_tokenizer(model, start=0)


@pytest.mark.parametrize(
  "options",
  [
    {"pad_id": -1, "unk_id": 0, "bos_id": 1, "eos_id": 2},  # spm_train's defaults
    {
      "byte_fallback": True,
      "normalization_rule_name": "identity",
      "remove_extra_whitespaces": False,
    },
  ],
)
def test_a_t5_folder_encodes_as_its_tasks_also_with_a_vocabulary_unlike_t5s(
  lines, options, tmp_path
):
  model = tmp_path / "my.model"
  model.write_bytes(train(lines, vocab_size=1500, **options))
  config = {"model_type": "t5", "vocab_size": 1664, "pad_token_id": 0, "eos_token_id": 1}
  write(tmp_path, {}, config, model)
  ours = import_seqio().SentencePieceVocabulary(str(model), extra_ids=100).tokenizer
  theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  for text in ("a <extra_id_0> list or <extra_id_99> item", "日本 is\n    unknown", *lines[:50]):
    assert theirs.encode(text).ids == [*ours.encode(text), ours.eos_id()]
  assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == ours.eos_id()
  names = json.loads((tmp_path / "tokenizer_config.json").read_text())
  assert [theirs.token_to_id(names[f"{name}_token"]) for name in ("pad", "eos", "unk")] == [
    *(0, ours.eos_id(), ours.unk_id())
  ]


def test_the_tokenizer_that_a_folder_already_has_is_kept(lines, tmp_path):
  (tmp_path / "source").mkdir()
  (tmp_path / "source/spiece.model").write_bytes(train(lines, vocab_size=400))
  (tmp_path / "source/tokenizer_config.json").write_text("{}")
  config = {"model_type": "t5", "vocab_size": 512, "pad_token_id": 0}
  write(tmp_path, {}, config, tmp_path / "source")
  assert not (tmp_path / "tokenizer.json").exists()
  assert (tmp_path / "tokenizer_config.json").read_text() == "{}"
