"""A SentencePiece model as Transformers' tokenizer.json, which gives the same ids.

Transformers has no class that reads a .model file for a decoder. Its tokenizer.json, of the library
`tokenizers`, says the same with other words: the model is a table of pieces, the normaliser a
sequence of steps. Neither that library nor SentencePiece is needed to write it.
"""

from __future__ import annotations

import base64
import dataclasses
import struct
from collections.abc import Sequence
from typing import Any

from rosetta_t5.checkpoints.formats.protobuf import fields

_SPACE = "▁"
# SentencePiece's numbers of fields and kinds (sentencepiece_model.proto).
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_UNIGRAM, _BPE = 1, 2
_TYPES = {_UNIGRAM: "unigram", _BPE: "bpe", 3: "word", 4: "char"}


@dataclasses.dataclass(frozen=True)
class Piece:
  """A token: its text, its score, and SentencePiece's number of its kind."""

  text: str
  score: float
  kind: int


@dataclasses.dataclass(frozen=True)
class SentencePieceModel:
  """What a .model file says.

  Attributes:
    pieces: by id.
    model_type: 1 unigram, 2 BPE, 3 words, 4 characters.
    byte_fallback: whether unknown characters become bytes.
    unk_id: the unknown token.
    eos_id: the token that ends a text; negative for none.
    unk_surface: what the unknown token is decoded as.
    space_follows: whether spaces belong to the word before them.
    rules: the name of the rules of characters, such as nmt_nfkc.
    charsmap: these rules compiled, as SentencePiece stores them.
    adds_prefix: whether a space is put before a text.
    removes_spaces: whether repeated spaces, and those at the ends, are dropped.
  """

  pieces: Sequence[Piece]
  model_type: int = _UNIGRAM
  byte_fallback: bool = False
  unk_id: int = 0
  eos_id: int = 2
  unk_surface: str = " ⁇ "
  space_follows: bool = False
  rules: str = ""
  charsmap: bytes = b""
  adds_prefix: bool = True
  removes_spaces: bool = True


def read_model(model: bytes) -> SentencePieceModel:
  """Returns what a serialized SentencePiece model says.

  Raises:
    ValueError: it has no pieces.
  """
  parts = list(fields(model))
  pieces = [_piece(value) for number, value in parts if number == _PIECES]
  if not pieces:
    raise ValueError("this is no SentencePiece model: it has no pieces")
  trainer = dict(fields(b"".join(value for number, value in parts if number == _TRAINER)))
  normalizer = dict(fields(b"".join(value for number, value in parts if number == _NORMALIZER)))
  return SentencePieceModel(
    pieces,
    model_type=trainer.get(3, _UNIGRAM),
    byte_fallback=bool(trainer.get(35, 0)),
    unk_id=_signed(trainer.get(40, 0)),
    eos_id=_signed(trainer.get(42, 2)),
    unk_surface=trainer.get(44, b" \xe2\x81\x87 ").decode(),
    space_follows=bool(trainer.get(24, 0)),
    rules=normalizer.get(1, b"").decode(),
    charsmap=normalizer.get(2, b""),
    adds_prefix=bool(normalizer.get(3, 1)),
    removes_spaces=bool(normalizer.get(4, 1)),
  )


def _piece(message: bytes) -> Piece:
  values = dict(fields(message))
  (score,) = struct.unpack("<f", values.get(2, bytes(4)))
  return Piece(values.get(1, b"").decode(), score, values.get(3, 1))


def _signed(number: int) -> int:
  return number - (1 << 64) if number >> 63 else number


def tokenizer_json(model: SentencePieceModel, start: int) -> dict[str, Any]:
  """Returns the content of a tokenizer.json that encodes and decodes as SentencePiece does.

  Args:
    model: of `read_model`.
    start: the token that is put before every text.

  Raises:
    ValueError: tokenizer.json has no words for the model.
  """
  _check(model)
  text = model.pieces[start].text
  return {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
      {"id": number, "content": piece.text, "special": True, "normalized": False}
      | {"single_word": False, "lstrip": False, "rstrip": False}
      for number, piece in enumerate(model.pieces)
      if piece.kind == _CONTROL or number == start
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
    "model": _unigram(model) if model.model_type == _UNIGRAM else _bpe(model),
  }


def _check(model: SentencePieceModel) -> None:
  kind = _TYPES.get(model.model_type, str(model.model_type))
  user_defined = any(piece.kind == _USER_DEFINED for piece in model.pieces)
  for wrong, reason in (
    (model.model_type not in (_UNIGRAM, _BPE), f"model_type is {kind}, not unigram or bpe"),
    (model.space_follows, "spaces belong to the word before them (treat_whitespace_as_suffix)"),
    (model.model_type == _BPE and user_defined, "bpe with user_defined_symbols"),
    (any(piece.kind == _UNUSED for piece in model.pieces), "some of its pieces are not to be used"),
  ):
    if wrong:
      raise ValueError(
        f"Transformers' tokenizer.json cannot say what this SentencePiece model does: {reason}. Without "
        "--tokenizer the model is written alone"
      )


def _special(text: str) -> dict[str, Any]:
  return {"SpecialToken": {"id": text, "type_id": 0}}


def _sequence(name: str) -> dict[str, Any]:
  return {"Sequence": {"id": name, "type_id": 0}}


def _normalizers(model: SentencePieceModel) -> list[dict[str, Any]]:
  """SentencePiece's steps, in its order."""
  steps: list[dict[str, Any]] = []
  if model.charsmap:
    rules = base64.b64encode(model.charsmap).decode()
    if model.rules.removesuffix("_cf").endswith("nfkc"):
      # `tokenizers` looks at no more than a letter and its mark at once, and drops further marks.
      steps.append({"type": "NFC"})
    steps.append({"type": "Precompiled", "precompiled_charsmap": rules})
  if model.removes_spaces:
    steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
    steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
  if model.adds_prefix:
    steps.append({"type": "Prepend", "prepend": _SPACE})
  return [*steps, {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]


def _decoders(model: SentencePieceModel) -> list[dict[str, Any]]:
  unknown = model.pieces[model.unk_id].text
  return [
    {"type": "Replace", "pattern": {"String": unknown}, "content": model.unk_surface},
    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
    *([{"type": "ByteFallback"}] if model.byte_fallback else []),
    {"type": "Fuse"},
    *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if model.adds_prefix else []),
  ]


def _unigram(model: SentencePieceModel) -> dict[str, Any]:
  best = max(piece.score for piece in model.pieces)
  return {
    "type": "Unigram",
    "unk_id": model.unk_id,
    "vocab": [[piece.text, _score(piece, best)] for piece in model.pieces],
    "byte_fallback": model.byte_fallback,
  }


def _score(piece: Piece, best: float) -> float:
  """Returns a piece's score; SentencePiece prefers symbols that a user has defined, by this bonus."""
  return len(piece.text.encode()) * best - 0.1 if piece.kind == _USER_DEFINED else piece.score


def _bpe(model: SentencePieceModel) -> dict[str, Any]:
  return {
    "type": "BPE",
    "dropout": None,
    "unk_token": model.pieces[model.unk_id].text,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": True,
    "byte_fallback": model.byte_fallback,
    "ignore_merges": False,
    "vocab": {piece.text: number for number, piece in enumerate(model.pieces)},
    "merges": _merges(model),
  }


def _merges(model: SentencePieceModel) -> list[list[str]]:
  """Every way to make a piece of two, in the order in which SentencePiece makes pieces: by score."""
  normal = [piece for piece in model.pieces if piece.kind == _NORMAL]
  known = {piece.text for piece in normal}
  return [
    [piece.text[:cut], piece.text[cut:]]
    for piece in sorted(normal, key=lambda piece: -piece.score)
    for cut in range(1, len(piece.text))
    if piece.text[:cut] in known and piece.text[cut:] in known
  ]
