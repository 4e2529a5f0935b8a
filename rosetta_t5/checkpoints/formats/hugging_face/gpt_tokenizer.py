"""Tells Transformers how a decoder's texts begin and become tokens, beside the tokenizer's own files.

Our decoders have seen a start token before every text; Transformers adds none unless it is told to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from rosetta_t5.checkpoints.formats.hugging_face.gpt_reader import KEEPS_IDS
from rosetta_t5.checkpoints.formats.hugging_face.sentencepiece_json import (
  read_model,
  tokenizer_json,
)

SENTENCEPIECE = "spiece.model"
# A decoder's first token, where training has made it one of its own.
_START = "<|startoftext|>"
_PADDING = 0


def write_gpt_tokenizer(root: epath.Path, config: Mapping[str, Any]) -> dict[str, Any]:
  """Writes what the tokenizer's files in a folder leave unsaid.

  Beside spiece.model everything is written anew: it has often come with a T5's files, which end
  texts, and begin none.

  Args:
    root: a folder with GPT-2's vocab.json and merges.txt, with spiece.model, or with neither.
    config: config.json's content.

  Returns:
    What config.json is to say otherwise.

  Raises:
    ValueError: spiece.model has no like in Transformers.
  """
  if config.get(KEEPS_IDS) and (root / SENTENCEPIECE).exists():
    return _write_sentencepiece(root)
  is_told = (root / "tokenizer_config.json").exists() or (root / "tokenizer.json").exists()
  if (root / "vocab.json").exists() and not is_told:
    _write_byte_pairs(root, config)
  return {}


def _write_sentencepiece(root: epath.Path) -> dict[str, Any]:
  """Writes the model as tokenizer.json: no class of Transformers reads it for a decoder."""
  model = read_model((root / SENTENCEPIECE).read_bytes())
  for name in ("special_tokens_map.json", "added_tokens.json"):
    (root / name).unlink(missing_ok=True)
  content = json.dumps(tokenizer_json(model, _PADDING), ensure_ascii=False)
  (root / "tokenizer.json").write_text(content + "\n", encoding="utf-8")
  names = {"bos_token": _PADDING, "pad_token": _PADDING}
  names |= {"eos_token": model.eos_id} if model.eos_id >= 0 else {}
  words = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    **{name: model.pieces[number].text for name, number in names.items()},
  }
  (root / "tokenizer_config.json").write_text(json.dumps(words, indent=2) + "\n")
  return {"eos_token_id": model.eos_id if model.eos_id >= 0 else None}


def _write_byte_pairs(root: epath.Path, config: Mapping[str, Any]) -> None:
  """Says the start of GPT-2's two files, and that what stands for padding never follows."""
  numbers = json.loads((root / "vocab.json").read_text("utf-8"))
  pieces = {number: piece for piece, number in numbers.items()}
  end = pieces.get(config["eos_token_id"])
  number = config.get("bos_token_id", config["eos_token_id"])
  start = pieces.get(number, _START)
  names = {"bos_token": start, "eos_token": end, "unk_token": end, "add_bos_token": True}
  added = {"content": start, "special": True, "normalized": False}
  added |= {"lstrip": False, "rstrip": False, "single_word": False}
  words = {
    "tokenizer_class": "GPT2Tokenizer",
    **names,
    "added_tokens_decoder": {str(number): added},
  }
  (root / "tokenizer_config.json").write_text(json.dumps(words, indent=2) + "\n")
  if number not in pieces:
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    generation = {**ids, "suppress_tokens": [number]}
    (root / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
