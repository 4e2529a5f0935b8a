"""Converts a SentencePiece model to a tokenizer of the library `tokenizers`, which gives the same ids.

Transformers reads such a tokenizer from tokenizer.json. Its tokenizers of GPT-2 and GPT-Neo do not read
a .model file.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

# The classes of protocol buffers are created at run time, so mypy does not know their attributes.
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


def make_tokenizer(
  model: Model, start: int | None = None, end: int | None = None, sentinels: int = 0
) -> Tokenizer:
  """Returns a tokenizer that encodes and decodes as SentencePiece does.

  Args:
    model: the result of `read_model`.
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


def is_t5s(model: Model) -> bool:
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
