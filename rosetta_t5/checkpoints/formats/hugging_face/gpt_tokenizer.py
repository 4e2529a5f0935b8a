"""Writes tokenizer files that make Transformers put the start token before a decoder's texts.

Our decoders have seen a start token before every text, which Transformers does not add by default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from rosetta_t5.checkpoints.formats.hugging_face.gpt import PADDING_IS_TOKEN_0
from rosetta_t5.files import expect_content, read_json_object

SENTENCEPIECE = "spiece.model"
# The name of a start token that is not in vocab.json, because training has made it a token of its own.
_START = "<|startoftext|>"
_PADDING = 0
_SENTINELS = 100  # that T5's vocabularies have


def write_gpt_tokenizer(root: epath.Path, config: Mapping[str, Any]) -> dict[str, Any]:
  """Adds the tokenizer files that a folder still needs.

  For a model that was trained with the spiece.model in the folder, all other files are replaced: they
  are often those of a T5, which add an end token and no start token.

  Args:
    root: a folder with GPT-2's vocab.json and merges.txt, with spiece.model, or with neither.
    config: the content of the model's config.json.

  Returns:
    The entries of config.json that must change.

  Raises:
    ValueError: Transformers does not support the SentencePiece model.
  """
  if config.get(PADDING_IS_TOKEN_0) and (root / SENTENCEPIECE).exists():
    return _write_sentencepiece(root)
  is_complete = (root / "tokenizer_config.json").exists() or (root / "tokenizer.json").exists()
  if (root / "vocab.json").exists() and not is_complete:
    _write_byte_pairs(root, config)
  return {}


def write_t5_tokenizer(root: epath.Path, config: Mapping[str, Any]) -> dict[str, Any]:
  """Writes tokenizer.json beside a folder's spiece.model if Transformers' T5Tokenizer would misread that.

  Args:
    root: the folder.
    config: the content of the model's config.json.

  Returns:
    The entries of config.json that must change.

  Raises:
    ValueError: Transformers does not support the SentencePiece model.
  """
  # Reading checkpoints must not import SentencePiece.
  from rosetta_t5.checkpoints.formats.hugging_face import sentencepiece_tokenizer

  model = sentencepiece_tokenizer.read_model((root / SENTENCEPIECE).read_bytes())
  pieces = len(model.pieces)
  has_sentinels = (
    "extra_id_" in model.pieces[-1].piece or config["vocab_size"] < pieces + _SENTINELS
  )
  if sentencepiece_tokenizer.is_t5s(model):
    return {}
  return _write_sentencepiece(root, is_gpt=False, sentinels=0 if has_sentinels else _SENTINELS)


def _write_sentencepiece(
  root: epath.Path, is_gpt: bool = True, sentinels: int = 0
) -> dict[str, Any]:
  """Writes the model as tokenizer.json, because Transformers' GPTs do not read the .model file."""
  # Reading checkpoints must not import SentencePiece.
  from rosetta_t5.checkpoints.formats.hugging_face import sentencepiece_tokenizer

  file = root / SENTENCEPIECE
  try:
    model = sentencepiece_tokenizer.read_model(file.read_bytes())
    end = model.trainer_spec.eos_id if model.trainer_spec.eos_id >= 0 else None
    around = {"start": _PADDING} if is_gpt else {"end": end}
    tokenizer = sentencepiece_tokenizer.make_tokenizer(model, **around, sentinels=sentinels)
  except Exception as error:  # tokenizers raises no narrower type
    raise ValueError(f"{file}: {error}") from error
  for name in ("special_tokens_map.json", "added_tokens.json"):
    (root / name).unlink(missing_ok=True)
  tokenizer.save(str(root / "tokenizer.json"), pretty=False)
  ids = {"pad_token": _PADDING, "eos_token": end}
  ids |= {"bos_token": _PADDING} if is_gpt else {"unk_token": model.trainer_spec.unk_id}
  _write_json(
    root / "tokenizer_config.json",
    {
      "tokenizer_class": "PreTrainedTokenizerFast",
      "clean_up_tokenization_spaces": False,
      "model_input_names": ["input_ids", "attention_mask"],
      **{name: model.pieces[id_].piece for name, id_ in ids.items() if id_ is not None},
    },
  )
  return {"eos_token_id": end}


def _write_byte_pairs(root: epath.Path, config: Mapping[str, Any]) -> None:
  """Writes the start token; if it is not in vocab.json, generation_config.json suppresses it too."""
  ids = read_json_object(root / "vocab.json")
  with expect_content(root / "vocab.json", "the number of each token"):
    pieces = {id_: piece for piece, id_ in ids.items()}
  end = pieces.get(config["eos_token_id"])
  start_id = config.get("bos_token_id", config["eos_token_id"])
  start = pieces.get(start_id, _START)
  flags = dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)
  _write_json(
    root / "tokenizer_config.json",
    {
      "tokenizer_class": "GPT2Tokenizer",
      "bos_token": start,
      "eos_token": end,
      "unk_token": end,
      "add_bos_token": True,
      "added_tokens_decoder": {str(start_id): {"content": start, "special": True, **flags}},
    },
  )
  if start_id not in (*pieces, config["eos_token_id"]):
    kept = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    _write_json(root / "generation_config.json", {**kept, "suppress_tokens": [start_id]})


def _write_json(file: epath.Path, content: Mapping[str, Any]) -> None:
  file.write_text(json.dumps(content, indent=2) + "\n")
