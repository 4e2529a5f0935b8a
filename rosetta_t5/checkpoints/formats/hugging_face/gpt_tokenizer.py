"""Writes tokenizer files that make Transformers put the start token before a decoder's texts.

Our decoders have seen a start token before every text, which Transformers does not add by default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from rosetta_t5.checkpoints.formats.hugging_face.gpt_reader import KEEPS_IDS
from rosetta_t5.telemetry.json_files import expect_content, read_json_object

SENTENCEPIECE = "spiece.model"
# The name of the start token if training has made it a token of its own.
_START = "<|startoftext|>"
_PADDING = 0


def write_gpt_tokenizer(root: epath.Path, config: Mapping[str, Any]) -> dict[str, Any]:
  """Adds the tokenizer files that a folder still needs.

  If there is a spiece.model, all other files are replaced: they are often those of a T5, which add
  an end token and no start token.

  Args:
    root: a folder with GPT-2's vocab.json and merges.txt, with spiece.model, or with neither.

  Returns:
    The entries of config.json that must change.

  Raises:
    ValueError: Transformers does not support the SentencePiece model.
  """
  if config.get(KEEPS_IDS) and (root / SENTENCEPIECE).exists():
    return _write_sentencepiece(root)
  is_complete = (root / "tokenizer_config.json").exists() or (root / "tokenizer.json").exists()
  if (root / "vocab.json").exists() and not is_complete:
    _write_byte_pairs(root, config)
  return {}


def _write_sentencepiece(root: epath.Path) -> dict[str, Any]:
  """Writes the model as tokenizer.json, because Transformers' GPTs do not read the .model file."""
  # Reading checkpoints must not import SentencePiece.
  from rosetta_t5.checkpoints.formats.hugging_face import sentencepiece_tokenizer

  file = root / SENTENCEPIECE
  try:
    model = sentencepiece_tokenizer.read_model(file.read_bytes())
    tokenizer = sentencepiece_tokenizer.make_tokenizer(model, _PADDING)
  except Exception as error:  # tokenizers raises no narrower type
    raise ValueError(f"{file}: {error}") from error
  end = model.trainer_spec.eos_id if model.trainer_spec.eos_id >= 0 else None
  for name in ("special_tokens_map.json", "added_tokens.json"):
    (root / name).unlink(missing_ok=True)
  tokenizer.save(str(root / "tokenizer.json"), pretty=False)
  ids = {"bos_token": _PADDING, "pad_token": _PADDING, "eos_token": end}
  _write_json(
    root / "tokenizer_config.json",
    {
      "tokenizer_class": "PreTrainedTokenizerFast",
      "clean_up_tokenization_spaces": False,
      **{name: model.pieces[id_].piece for name, id_ in ids.items() if id_ is not None},
    },
  )
  return {"eos_token_id": end}


def _write_byte_pairs(root: epath.Path, config: Mapping[str, Any]) -> None:
  """Writes which token starts a text, and that a start token of its own is never generated."""
  ids = read_json_object(root / "vocab.json")
  with expect_content(root / "vocab.json", "the number of each token"):
    pieces = {id_: piece for piece, id_ in ids.items()}
  end = pieces.get(config["eos_token_id"])
  start_id = config.get("bos_token_id", config["eos_token_id"])
  start = pieces.get(start_id, _START)
  added = {"content": start, "special": True, "normalized": False}
  added |= {"lstrip": False, "rstrip": False, "single_word": False}
  _write_json(
    root / "tokenizer_config.json",
    {
      "tokenizer_class": "GPT2Tokenizer",
      "bos_token": start,
      "eos_token": end,
      "unk_token": end,
      "add_bos_token": True,
      "added_tokens_decoder": {str(start_id): added},
    },
  )
  if start_id not in pieces:
    kept = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    _write_json(root / "generation_config.json", {**kept, "suppress_tokens": [start_id]})


def _write_json(file: epath.Path, content: Mapping[str, Any]) -> None:
  file.write_text(json.dumps(content, indent=2) + "\n")
