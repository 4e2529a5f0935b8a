"""Writes a SentencePiece model as Transformers' tokenizer.json, which gives the same ids.

Transformers has no class that reads a .model file for a decoder. The file tokenizer.json of the library
`tokenizers` can hold the same: the model is a table of pieces, and the normalizer a sequence of steps.
"""

from __future__ import annotations

import base64
from typing import Any

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

# The classes of protocol buffers are created at run time, so their attributes are unknown to mypy.
_proto: Any = sentencepiece_model_pb2
_TrainerSpec = _proto.TrainerSpec
_Piece = _proto.ModelProto.SentencePiece
Model = Any
_SPACE = "▁"


def read_model(model: bytes) -> Model:
  """Returns a serialized SentencePiece model as a `sentencepiece_model_pb2.ModelProto`.

  Raises:
    ValueError: it is not a SentencePiece model, or has no pieces.
  """
  try:
    proto = _proto.ModelProto.FromString(model)
  except DecodeError as error:
    raise ValueError(f"not a SentencePiece model: {error}") from error
  if not proto.pieces:
    raise ValueError("not a SentencePiece model: it has no pieces")
  return proto


def tokenizer_json(model: Model, start: int) -> dict[str, Any]:
  """Returns the content of a tokenizer.json that encodes and decodes as SentencePiece does.

  Args:
    model: of `read_model`.
    start: the token that is put before every text.

  Raises:
    ValueError: tokenizer.json cannot express the model.
  """
  _check_is_supported(model)
  text = model.pieces[start].piece
  is_unigram = model.trainer_spec.model_type == _TrainerSpec.UNIGRAM
  return {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
      {"id": number, "content": piece.piece, "special": True, "normalized": False}
      | {"single_word": False, "lstrip": False, "rstrip": False}
      for number, piece in enumerate(model.pieces)
      if piece.type == _Piece.CONTROL or number == start
    ],
    "normalizer": {"type": "Sequence", "normalizers": _normalizers(model)},
    "pre_tokenizer": None,
    "post_processor": {
      "type": "TemplateProcessing",
      "single": [_special(text), _sequence("A")],
      "pair": [_special(text), _sequence("A"), _sequence("B")],
      "special_tokens": {text: {"id": text, "ids": [start], "tokens": [text]}},
    },
    "decoder": {"type": "Sequence", "decoders": _decoders(model)},
    "model": _unigram(model) if is_unigram else _bpe(model),
  }


def _check_is_supported(model: Model) -> None:
  trainer = model.trainer_spec
  types = {piece.type for piece in model.pieces}
  is_bpe = trainer.model_type == _TrainerSpec.BPE
  kind = _TrainerSpec.ModelType.Name(trainer.model_type).lower()
  for is_wrong, reason in (
    (
      not is_bpe and trainer.model_type != _TrainerSpec.UNIGRAM,
      f"model_type must be unigram or bpe, got {kind}",
    ),
    (trainer.treat_whitespace_as_suffix, "treat_whitespace_as_suffix must be false"),
    (is_bpe and _Piece.USER_DEFINED in types, "bpe with user_defined_symbols is not supported"),
    (_Piece.UNUSED in types, "pieces of type UNUSED are not supported"),
  ):
    if is_wrong:
      raise ValueError(
        f"this SentencePiece model cannot be written as Transformers' tokenizer.json: {reason}. "
        "Without --tokenizer the model is written without its vocabulary"
      )


def _special(text: str) -> dict[str, Any]:
  return {"SpecialToken": {"id": text, "type_id": 0}}


def _sequence(name: str) -> dict[str, Any]:
  return {"Sequence": {"id": name, "type_id": 0}}


def _normalizers(model: Model) -> list[dict[str, Any]]:
  """Returns SentencePiece's steps, in its order."""
  spec = model.normalizer_spec
  steps: list[dict[str, Any]] = []
  if spec.precompiled_charsmap:
    rules = base64.b64encode(spec.precompiled_charsmap).decode()
    if spec.name.removesuffix("_cf").endswith("nfkc"):
      # `tokenizers` considers only a letter and one mark at a time, and drops further marks.
      steps.append({"type": "NFC"})
    steps.append({"type": "Precompiled", "precompiled_charsmap": rules})
  if spec.remove_extra_whitespaces:
    steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
    steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
  if spec.add_dummy_prefix:
    steps.append({"type": "Prepend", "prepend": _SPACE})
  return [*steps, {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]


def _decoders(model: Model) -> list[dict[str, Any]]:
  trainer, prefix = model.trainer_spec, model.normalizer_spec.add_dummy_prefix
  unknown = model.pieces[trainer.unk_id].piece
  return [
    {"type": "Replace", "pattern": {"String": unknown}, "content": trainer.unk_surface},
    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
    *([{"type": "ByteFallback"}] if trainer.byte_fallback else []),
    {"type": "Fuse"},
    *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
  ]


def _unigram(model: Model) -> dict[str, Any]:
  best = max(piece.score for piece in model.pieces)
  return {
    "type": "Unigram",
    "unk_id": model.trainer_spec.unk_id,
    "vocab": [[piece.piece, _score(piece, best)] for piece in model.pieces],
    "byte_fallback": model.trainer_spec.byte_fallback,
  }


def _score(piece: Any, best: float) -> float:
  """Returns a piece's score, with the bonus that SentencePiece gives to user-defined symbols."""
  if piece.type == _Piece.USER_DEFINED:
    return len(piece.piece.encode()) * best - 0.1
  return piece.score


def _bpe(model: Model) -> dict[str, Any]:
  trainer = model.trainer_spec
  return {
    "type": "BPE",
    "dropout": None,
    "unk_token": model.pieces[trainer.unk_id].piece,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": True,
    "byte_fallback": trainer.byte_fallback,
    "ignore_merges": False,
    "vocab": {piece.piece: number for number, piece in enumerate(model.pieces)},
    "merges": _merges(model),
  }


def _merges(model: Model) -> list[list[str]]:
  """Returns every pair that makes up a piece, in SentencePiece's order of merging: by score."""
  normal = [piece for piece in model.pieces if piece.type == _Piece.NORMAL]
  known = {piece.piece for piece in normal}
  return [
    [piece.piece[:cut], piece.piece[cut:]]
    for piece in sorted(normal, key=lambda piece: -piece.score)
    for cut in range(1, len(piece.piece))
    if piece.piece[:cut] in known and piece.piece[cut:] in known
  ]
