"""Writes the tokenizer's files that Transformers needs beside a model that was trained here.

Our decoders have seen a start token before every text, which Transformers does not add by default, and its
GPTs do not read SentencePiece's .model files. A SentencePiece model is therefore also written as a
tokenizer of the library `tokenizers`, which gives the same ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from etils import epath
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

from rosetta_t5.checkpoints.formats.hugging_face.folder import SENTENCEPIECE, is_gpt
from rosetta_t5.checkpoints.formats.hugging_face.gpt import PADDING_IS_TOKEN_0
from rosetta_t5.data.vocabularies.sentencepiece_models import read_padded_model
from rosetta_t5.files import expect_content, read_json_object

# The classes of protocol buffers are created at run time, so mypy does not know their attributes.
_proto: Any = sentencepiece_model_pb2
_TrainerSpec = _proto.TrainerSpec
_Piece = _proto.ModelProto.SentencePiece
Model = Any
_SPACE = "▁"
_PADDING = 0
_SENTINELS = 100  # that T5's vocabularies have
# The name of a start token that is not in vocab.json, because training has made it a token of its own.
_START = "<|startoftext|>"


def complete_tokenizer(root: epath.Path, config: Mapping[str, Any]) -> dict[str, Any]:
  """Adds the tokenizer files that a folder still needs.

  For a decoder that was trained with the spiece.model in the folder, all other files are replaced: they
  are often those of a T5, which add an end token and no start token. For a T5, tokenizer.json is written
  if Transformers' T5Tokenizer would misread the model.

  Args:
    root: a folder with GPT-2's vocab.json and merges.txt, with spiece.model, or with neither.
    config: the content of the model's config.json.

  Returns:
    The entries of config.json that must change.

  Raises:
    ValueError: Transformers does not support the SentencePiece model.
  """
  file, has_tokenizer = root / SENTENCEPIECE, (root / "tokenizer.json").exists()
  keeps_ids = bool(config.get(PADDING_IS_TOKEN_0))
  if file.exists() and not has_tokenizer and not config.get("pad_token_id"):
    file.write_bytes(read_padded_model(file))
    if not is_gpt(config):
      return _write_t5_tokenizer(root, config)
  if file.exists() and keeps_ids:
    return _write_sentencepiece(root, starts_texts=True)
  is_complete = (root / "tokenizer_config.json").exists() or has_tokenizer
  if (root / "vocab.json").exists() and not is_complete and not keeps_ids:
    _write_byte_pairs(root, config)
  return {}


def _write_t5_tokenizer(root: epath.Path, config: Mapping[str, Any]) -> dict[str, Any]:
  model = _proto.ModelProto.FromString((root / SENTENCEPIECE).read_bytes())
  if _suits_t5_tokenizer(model):
    return {}
  pieces = len(model.pieces)
  has_sentinels = (
    "extra_id_" in model.pieces[-1].piece or config["vocab_size"] < pieces + _SENTINELS
  )
  return _write_sentencepiece(root, sentinels=0 if has_sentinels else _SENTINELS)


def _write_sentencepiece(
  root: epath.Path, starts_texts: bool = False, sentinels: int = 0
) -> dict[str, Any]:
  try:
    model = _proto.ModelProto.FromString((root / SENTENCEPIECE).read_bytes())
    end = model.trainer_spec.eos_id if model.trainer_spec.eos_id >= 0 else None
    around = {"start": _PADDING} if starts_texts else {"end": end}
    tokenizer = make_tokenizer(model, **around, sentinels=sentinels)
  except Exception as error:  # tokenizers raises no narrower type
    raise ValueError(f"{root / SENTENCEPIECE}: {error}") from error
  for name in ("special_tokens_map.json", "added_tokens.json"):
    (root / name).unlink(missing_ok=True)
  tokenizer.save(str(root / "tokenizer.json"), pretty=False)
  ids = {"pad_token": _PADDING, "eos_token": end}
  ids |= {"bos_token": _PADDING} if starts_texts else {"unk_token": model.trainer_spec.unk_id}
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


def make_tokenizer(
  model: Model, start: int | None = None, end: int | None = None, sentinels: int = 0
) -> Tokenizer:
  """Returns a tokenizer that encodes and decodes as SentencePiece does.

  Args:
    model: a `sentencepiece_model_pb2.ModelProto`.
    start: the token that is put before every text, if any.
    end: the token that is put after every text, if any.
    sentinels: the number of tokens <extra_id_0>, <extra_id_1>, … to add, the last ids in descending order.

  Raises:
    ValueError: `tokenizers` does not support the model.
  """
  _check_is_supported(model)
  is_unigram = model.trainer_spec.model_type == _TrainerSpec.UNIGRAM
  tokenizer = Tokenizer(_make_unigram(model) if is_unigram else _make_bpe(model))
  tokenizer.normalizer = normalizers.Sequence(_make_normalizers(model))
  tokenizer.decoder = decoders.Sequence(_make_decoders(model))
  first, last = ([model.pieces[id_].piece] if id_ is not None else [] for id_ in (start, end))
  added = [(model.pieces[id_].piece, id_) for id_ in (start, end) if id_ is not None]
  tokenizer.post_processor = processors.TemplateProcessing(
    single=[*first, "$A", *last], pair=[*first, "$A", *last, "$B", *last], special_tokens=added
  )
  special = [
    AddedToken(piece.piece, normalized=False, special=True)
    for number, piece in enumerate(model.pieces)
    if piece.type == _Piece.CONTROL or number == start
  ]
  names = [f"<extra_id_{number}>" for number in reversed(range(sentinels))]
  flags = {"normalized": False, "special": True, "lstrip": True, "rstrip": True}
  special += [AddedToken(name, **flags) for name in names]
  tokenizer.add_special_tokens(special)
  return tokenizer


def _suits_t5_tokenizer(model: Model) -> bool:
  """Returns whether Transformers' T5Tokenizer, which knows only models like T5's, reads a model correctly."""
  trainer, normalizer = model.trainer_spec, model.normalizer_spec
  return (
    (trainer.pad_id, trainer.eos_id, trainer.unk_id) == (0, 1, 2)
    and trainer.model_type == _TrainerSpec.UNIGRAM
    and not trainer.byte_fallback
    and bool(normalizer.precompiled_charsmap)
    and normalizer.remove_extra_whitespaces
    and normalizer.add_dummy_prefix
  )


def _check_is_supported(model: Model) -> None:
  trainer, charsmap = model.trainer_spec, model.normalizer_spec.precompiled_charsmap
  # `tokenizers` aborts the process if the first 4 bytes, the size of the map's first part, are wrong.
  first_part = int.from_bytes(charsmap[:4], "little")
  types = {piece.type for piece in model.pieces}
  is_bpe = trainer.model_type == _TrainerSpec.BPE
  kind = _TrainerSpec.ModelType.Name(trainer.model_type).lower()
  for is_wrong, reason in (
    (kind not in ("unigram", "bpe"), f"model_type must be unigram or bpe, got {kind}"),
    (trainer.treat_whitespace_as_suffix, "treat_whitespace_as_suffix must be false"),
    (is_bpe and _Piece.USER_DEFINED in types, "bpe with user_defined_symbols is not supported"),
    (_Piece.UNUSED in types, "pieces of type UNUSED are not supported"),
    (first_part % 4 or first_part > max(len(charsmap) - 4, 0), "precompiled_charsmap is damaged"),
    (not 0 <= trainer.unk_id < len(model.pieces), f"unk_id {trainer.unk_id} is not a piece"),
    (trainer.eos_id >= len(model.pieces), f"eos_id {trainer.eos_id} is not a piece"),
  ):
    if is_wrong:
      raise ValueError(
        f"this SentencePiece model cannot be written as Transformers' tokenizer.json: {reason}. "
        "Without --tokenizer the model is written without its vocabulary"
      )


def _make_normalizers(model: Model) -> list[normalizers.Normalizer]:
  """Returns SentencePiece's steps, in its order."""
  spec = model.normalizer_spec
  steps: list[normalizers.Normalizer] = []
  if spec.precompiled_charsmap:
    if spec.name.removesuffix("_cf").endswith("nfkc"):
      # `tokenizers` considers only a letter and one mark at a time, and drops further marks.
      steps.append(normalizers.NFC())
    steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
  if spec.remove_extra_whitespaces:
    steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
  if spec.add_dummy_prefix:
    steps.append(normalizers.Prepend(_SPACE))
  return [*steps, normalizers.Replace(" ", _SPACE)]


def _make_decoders(model: Model) -> list[decoders.Decoder]:
  trainer = model.trainer_spec
  unknown = model.pieces[trainer.unk_id].piece
  steps: list[decoders.Decoder] = [
    decoders.Replace(unknown, trainer.unk_surface),
    decoders.Replace(_SPACE, " "),
  ]
  if trainer.byte_fallback:
    steps.append(decoders.ByteFallback())
  steps.append(decoders.Fuse())
  if model.normalizer_spec.add_dummy_prefix:
    steps.append(decoders.Strip(" ", left=1, right=0))
  return steps


def _make_unigram(model: Model) -> models.Unigram:
  trainer = model.trainer_spec
  best = max(piece.score for piece in model.pieces)
  scores = {piece.piece: piece.score for piece in model.pieces}
  # SentencePiece gives user-defined symbols a bonus, so that they are never split.
  symbols = [piece.piece for piece in model.pieces if piece.type == _Piece.USER_DEFINED]
  scores |= {symbol: len(symbol.encode()) * best - 0.1 for symbol in symbols}
  return models.Unigram(list(scores.items()), trainer.unk_id, trainer.byte_fallback)


def _make_bpe(model: Model) -> models.BPE:
  trainer = model.trainer_spec
  return models.BPE(
    vocab={piece.piece: number for number, piece in enumerate(model.pieces)},
    merges=_merges(model),
    unk_token=model.pieces[trainer.unk_id].piece,
    fuse_unk=True,
    byte_fallback=trainer.byte_fallback,
  )


def _merges(model: Model) -> list[tuple[str, str]]:
  """Returns every pair that makes up a piece, in SentencePiece's order of merging: by score."""
  normal = [piece for piece in model.pieces if piece.type == _Piece.NORMAL]
  known = {piece.piece for piece in normal}
  return [
    (piece.piece[:cut], piece.piece[cut:])
    for piece in sorted(normal, key=lambda piece: -piece.score)
    for cut in range(1, len(piece.piece))
    if piece.piece[:cut] in known and piece.piece[cut:] in known
  ]
