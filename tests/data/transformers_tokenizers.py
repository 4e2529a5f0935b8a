"""Tokenizers of today's families with small vocabularies, in folders as they are published.

`transformers_tokenizers.json` has digests of what Transformers makes of `lines()` with them. To record them
anew, run this file where Transformers and SentencePiece are installed.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import random
import tempfile
from collections.abc import Iterable
from typing import Any

from tokenizers import (
  AddedToken,
  Regex,
  Tokenizer,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
  trainers,
)

RECORDED = pathlib.Path(__file__).with_name("transformers_tokenizers.json")
# The first and the last letter of ten scripts.
SCRIPTS = ["az", "ая", "αω", "את", "بي", "कह", "กฮ", "가힣", "一龥", "ぁヺ"]
MARKS = "\u0301\u0308\u0327\u093e\u0e31\u05b0\u064e"  # those that NFC composes and others
EMOJI = ["😀", "👩‍👩‍👧‍👦", "👍🏽", "🏳️‍🌈", "🇫🇷", "❤️", "1️⃣"]
CODE = [
  "def f(x, *, y=None):\n\treturn x**2 + 0x1F // y  # naïve",
  'for (int i = 0; i < 10; ++i) {\r\n    printf("%d\\n", a[i]);\r\n}',
  "SELECT * FROM t WHERE a >= 3.14e-10 AND b != 'it''s';",
  "<div class='x'>&nbsp;</div>   <!-- we'll -->",
  "https://example.org/a_b?c=d&e=%20#f",
]
ENDS = [
  "'s",
  "'LL",
  "n't",
  "!!!",
  "…",
  " ,",
  "\n\n",
  "   ",
  "\t",
  " 1234567",
  "½",
  "²",
  "\u00a0",
  "ﬁ",
]
_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = [f"<|{x}|>" for x in ("begin_of_text", "end_of_text", "start_header_id")]
LLAMA += [f"<|{x}|>" for x in ("end_header_id", "eot_id")]
QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GEMMA = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]


def lines(count: int = 10_000, special: Iterable[str] = ()) -> list[str]:
  """Returns lines of ten scripts, code and emoji; every fiftieth has a special token, if any are given."""
  draw = random.Random(0)
  special = list(special)

  def word(first: str, last: str) -> str:
    # Most letters are among the first ones, so that a small vocabulary has pieces of them.
    end = ord(last) if draw.random() < 0.1 else min(ord(last), ord(first) + 25)
    letters = [chr(draw.randint(ord(first), end)) for _ in range(draw.randint(1, 4))]
    text = "".join(letters) + (draw.choice(MARKS) if draw.random() < 0.1 else "")
    text = draw.choice([text, text, text.upper(), text.capitalize()])
    return text + (draw.choice([*ENDS, *EMOJI]) if draw.random() < 0.2 else "")

  made = []
  for number in range(count):
    letters = SCRIPTS[number % len(SCRIPTS)]
    # Few different words, so that there are merges to learn.
    words = [word(*letters) for _ in range(4)]
    line = " ".join(draw.choice(words) for _ in range(draw.randint(1, 12)))
    if number % 10 == 9:
      line = draw.choice([f"{draw.choice(CODE)} {line}", f"  {line}", f"{line} {line}\n"])
    if special and number % 50 == 7:
      line = f"{draw.choice(special)}{line} {draw.choice(special)}  {draw.choice(special)}\n"
    made.append(line)
  return made


def _byte_level(special: list[str], digits: str, **options: Any) -> Tokenizer:
  tokenizer = Tokenizer(models.BPE(**options))
  split = pre_tokenizers.Split(Regex(_SPLIT.replace("DIGITS", digits)), "isolated")
  byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
  tokenizer.decoder = decoders.ByteLevel()
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
  tokenizer.train_from_iterator(lines(2000), trainer)
  tokenizer.add_special_tokens([AddedToken(x, normalized=False, special=True) for x in special])
  return tokenizer


def _llama() -> tuple[Tokenizer, dict[str, Any]]:
  tokenizer = _byte_level(LLAMA, r"\p{N}{1,3}", ignore_merges=True)
  begin = LLAMA[0], tokenizer.token_to_id(LLAMA[0])
  template = processors.TemplateProcessing(single=f"{LLAMA[0]} $A", special_tokens=[begin])
  byte_level = processors.ByteLevel(trim_offsets=True, add_prefix_space=False, use_regex=True)
  tokenizer.post_processor = processors.Sequence([byte_level, template])
  config = {"bos_token": LLAMA[0], "eos_token": LLAMA[4], "clean_up_tokenization_spaces": True}
  ids = [tokenizer.token_to_id(LLAMA[n]) for n in (1, 4)]
  return tokenizer, config | {"tokenizer_class": "PreTrainedTokenizerFast", "model": ids}


def _qwen() -> tuple[Tokenizer, dict[str, Any]]:
  tokenizer = _byte_level(QWEN, r"\p{N}")
  tokenizer.normalizer = normalizers.NFC()
  tokenizer.post_processor = processors.ByteLevel(trim_offsets=False, add_prefix_space=False)
  config = {"add_bos_token": False, "bos_token": None, "eos_token": QWEN[2], "pad_token": QWEN[0]}
  added = {str(tokenizer.token_to_id(x)): {"content": x, "special": True} for x in QWEN}
  config |= {"added_tokens_decoder": added, "unk_token": None}
  return tokenizer, config | {"tokenizer_class": "Qwen2Tokenizer", "model": None}


def _gemma() -> tuple[Tokenizer, dict[str, Any]]:
  learned = Tokenizer(models.BPE())
  learned.normalizer = normalizers.Replace(" ", "▁")
  learned.train_from_iterator(lines(300), trainers.BpeTrainer(vocab_size=900, show_progress=False))
  model = json.loads(learned.to_str())["model"]
  runs = ["\n\n", "▁▁", "▁▁▁"]
  pieces = [*GEMMA, *runs, *(f"<0x{n:02X}>" for n in range(256)), "\n", *model["vocab"]]
  vocab = {piece: n for n, piece in enumerate(dict.fromkeys(pieces))}
  merges = [tuple(pair) for pair in model["merges"]]
  options = {"byte_fallback": True, "unk_token": GEMMA[3], "fuse_unk": True}
  tokenizer = Tokenizer(models.BPE(vocab, merges, **options))
  tokenizer.normalizer = normalizers.Replace(" ", "▁")
  tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
  parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
  tokenizer.decoder = decoders.Sequence(parts)
  tokenizer.post_processor = processors.TemplateProcessing(
    single="<bos> $A", special_tokens=[("<bos>", 2)]
  )
  tokenizer.add_special_tokens([AddedToken(x, normalized=False, special=True) for x in GEMMA])
  tokenizer.add_tokens([AddedToken(x, normalized=False) for x in runs])
  config = {"add_bos_token": True, "add_eos_token": False, "bos_token": {"content": "<bos>"}}
  config["bos_token"] = {"__type": "AddedToken", "content": "<bos>", "special": True}
  config |= {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
  return tokenizer, config | {"tokenizer_class": "GemmaTokenizer", "model": [1, 5]}


def _t5() -> tuple[Tokenizer, dict[str, Any]]:
  from sentencepiece import sentencepiece_model_pb2

  from rosetta_t5.data.vocabularies.sentencepiece_models import train_sentencepiece

  proto: Any = sentencepiece_model_pb2
  trained = [line for text in lines(4000) for line in text.splitlines()]
  model = proto.ModelProto.FromString(
    train_sentencepiece(trained, 1500, {"character_coverage": "0.98"})
  )
  names = [f"<extra_id_{n}>" for n in range(100)]
  pieces = [(piece.piece, piece.score) for piece in model.pieces]
  pieces += [(name, 0.0) for name in reversed(names)]
  tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
  tokenizer.normalizer = normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap)
  space = {"replacement": "▁", "prepend_scheme": "always", "split": True}
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**space)]
  )
  tokenizer.decoder = decoders.Metaspace(**space)
  tokenizer.post_processor = processors.TemplateProcessing(
    single="$A </s>", special_tokens=[("</s>", 1)]
  )
  special = [piece for piece, _ in pieces[:3]] + names
  tokenizer.add_special_tokens([AddedToken(x, normalized=False, special=True) for x in special])
  config = {"eos_token": "</s>", "pad_token": pieces[0][0], "unk_token": pieces[2][0]}
  config |= {"extra_ids": 100, "additional_special_tokens": names}
  return tokenizer, config | {"tokenizer_class": "T5Tokenizer", "model": 1}


MAKERS = {"llama": _llama, "qwen": _qwen, "gemma": _gemma, "t5": _t5}
MODEL_TYPES = {"qwen": "qwen2", "gemma": "gemma2"}
SPECIAL = {"llama": LLAMA, "qwen": QWEN, "gemma": GEMMA[1:3] + GEMMA[4:], "t5": ["<extra_id_7>"]}


def write_folder(case: str, folder: pathlib.Path) -> None:
  """Writes tokenizer.json, tokenizer_config.json and a part of config.json."""
  tokenizer, config = MAKERS[case]()
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(folder / "tokenizer.json"))
  ends = config.pop("model")
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  model = {"eos_token_id": ends, "is_encoder_decoder": case == "t5"}
  model |= {"pad_token_id": 0} if case in ("gemma", "t5") else {}
  (folder / "config.json").write_text(
    json.dumps(model | {"model_type": MODEL_TYPES.get(case, case)})
  )


def digest(rows: Iterable[Any]) -> str:
  return hashlib.sha256("\n".join(map(repr, rows)).encode()).hexdigest()


def record(folder: pathlib.Path, special: list[str]) -> dict[str, Any]:
  """Returns digests of what the installed Transformers makes of the lines with a folder."""
  from transformers import AutoTokenizer

  tokenizer = AutoTokenizer.from_pretrained(folder)
  rows = [tokenizer.encode(line, add_special_tokens=False) for line in lines(special=special)]
  return {
    "surrounded": tokenizer.encode("a"),
    "ids": digest(rows),
    "texts": digest(tokenizer.decode(row) for row in rows),
    "shown": digest(tokenizer.decode(row, skip_special_tokens=True) for row in plain(rows)),
  }


def plain(rows: list[Any]) -> list[Any]:
  """Returns the rows without special tokens."""
  return [row for number, row in enumerate(rows) if number % 50 != 7]


def main() -> None:
  found = {}
  for case in MAKERS:
    with tempfile.TemporaryDirectory() as folder:
      write_folder(case, pathlib.Path(folder))
      found[case] = record(pathlib.Path(folder), SPECIAL[case])
  RECORDED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
  main()
