"""Writes the tokenizer's files that Transformers needs beside a model that was trained here.

Our decoders have seen a start token before every text, which Transformers does not add by default, and its
GPTs do not read SentencePiece's .model files. A SentencePiece model is therefore also written as a
tokenizer of the library `tokenizers`, which gives the same ids.
"""

import json
from collections.abc import Mapping
from typing import Any

from etils import epath
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

from rosetta_t5.checkpoints.formats.hugging_face.folder import SENTENCEPIECE, is_decoder
from rosetta_t5.checkpoints.formats.hugging_face.name_tables import PADDING_IS_TOKEN_0
from rosetta_t5.data.vocabularies.sentencepiece_models import load_sentencepiece
from rosetta_t5.files import read_json_object

# The classes of protocol buffers are created at run time, so mypy does not know their attributes.
_proto: Any = sentencepiece_model_pb2
_Piece = _proto.ModelProto.SentencePiece
_SPACE = "▁"
_PADDING = 0
_SENTINELS = 100  # that T5's vocabularies have
# The name of a start token that is not in vocab.json, because training has made it a token of its own.
_START = "<|startoftext|>"
_CONFIG = "tokenizer_config.json"


def complete_tokenizer(root: epath.Path, config: Mapping[str, Any]) -> dict[str, Any]:
  """Adds the tokenizer files that a folder still needs.

  For a decoder that was trained with the spiece.model in the folder, all other files are replaced: they
  are often those of a T5, which add an end token and no start token. For a T5 with nothing but spiece.model,
  tokenizer.json is written, because Transformers' T5Tokenizer misreads models that are unlike T5's.

  Args:
    root: a folder with GPT-2's vocab.json and merges.txt, with spiece.model, or with neither.
    config: the content of the model's config.json.

  Returns:
    The entries of config.json that must change.

  Raises:
    ValueError: Transformers does not support the SentencePiece model.
  """
  starts_texts = bool(config.get(PADDING_IS_TOKEN_0))
  is_complete = any((root / name).exists() for name in (_CONFIG, "tokenizer.json"))
  if (root / SENTENCEPIECE).exists():
    keeps_files = is_decoder(config) or is_complete or config.get("pad_token_id")
    return _write_sentencepiece(root, config) if starts_texts or not keeps_files else {}
  if (root / "vocab.json").exists() and not is_complete and not starts_texts:
    _write_byte_pairs(root, config)
  return {}


def _write_sentencepiece(root: epath.Path, config: Mapping[str, Any]) -> dict[str, Any]:
  file, starts_texts = root / SENTENCEPIECE, is_decoder(config)
  file.write_bytes(load_sentencepiece(file).serialized_model_proto())  # in which id 0 is padding
  model = _proto.ModelProto.FromString(file.read_bytes())
  end = model.trainer_spec.eos_id if model.trainer_spec.eos_id >= 0 else None
  try:
    if starts_texts:
      tokenizer = make_tokenizer(model, start=_PADDING)
    else:
      has_room = config["vocab_size"] >= len(model.pieces) + _SENTINELS
      is_without = has_room and "extra_id_" not in model.pieces[-1].piece
      tokenizer = make_tokenizer(model, end=end, sentinels=_SENTINELS if is_without else 0)
  except Exception as error:  # tokenizers raises no narrower type
    raise ValueError(f"{file}: {error}") from error
  for name in ("special_tokens_map.json", "added_tokens.json"):
    (root / name).unlink(missing_ok=True)
  tokenizer.save(str(root / "tokenizer.json"), pretty=False)
  ids = {"pad_token": _PADDING, "eos_token": end}
  ids |= {"bos_token": _PADDING} if starts_texts else {"unk_token": model.trainer_spec.unk_id}
  about = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "model_input_names": ["input_ids", "attention_mask"],
    **{name: model.pieces[id_].piece for name, id_ in ids.items() if id_ is not None},
  }
  (root / _CONFIG).write_text(json.dumps(about, indent=2))
  return {"eos_token_id": end}


def _write_byte_pairs(root: epath.Path, config: Mapping[str, Any]) -> None:
  """Writes the start token; if it is not in vocab.json, generation_config.json suppresses it too."""
  pieces = {id_: piece for piece, id_ in read_json_object(root / "vocab.json").items()}
  end_id = config["eos_token_id"]
  start_id = config.get("bos_token_id", end_id)
  start, end = pieces.get(start_id, _START), pieces.get(end_id)
  about = {
    "tokenizer_class": "GPT2Tokenizer",
    "bos_token": start,
    "eos_token": end,
    "unk_token": end,
    "add_bos_token": True,
    "added_tokens_decoder": {str(start_id): {"content": start, "special": True}},
  }
  (root / _CONFIG).write_text(json.dumps(about, indent=2))
  if start_id not in (*pieces, end_id):
    tokens = {"bos_token_id": start_id, "eos_token_id": end_id, "suppress_tokens": [start_id]}
    (root / "generation_config.json").write_text(json.dumps(tokens, indent=2))


def make_tokenizer(
  model: Any, start: int | None = None, end: int | None = None, sentinels: int = 0
) -> Tokenizer:
  """Returns a tokenizer that encodes and decodes as SentencePiece does.

  Args:
    model: a `sentencepiece_model_pb2.ModelProto`.
    start: the token that is put before every text, if any.
    end: the token that is put after every text, if any.
    sentinels: the number of tokens <extra_id_0>, <extra_id_1>, … to add, the last ids in descending order.

  Raises:
    ValueError: the model is not a unigram model, which is SentencePiece's default and T5's.
  """
  trainer, spec = model.trainer_spec, model.normalizer_spec
  if trainer.model_type != _proto.TrainerSpec.UNIGRAM or trainer.treat_whitespace_as_suffix:
    raise ValueError(
      "Transformers reads a SentencePiece model only if its model_type is unigram and "
      "treat_whitespace_as_suffix is false. Without --tokenizer the vocabulary is not written"
    )
  tokenizer = Tokenizer(_make_unigram(model))
  tokenizer.normalizer = normalizers.Sequence(_make_normalizers(spec))
  tokenizer.decoder = decoders.Sequence(_make_decoders(model))
  first, last = ([model.pieces[id_].piece] if id_ is not None else [] for id_ in (start, end))
  tokenizer.post_processor = processors.TemplateProcessing(
    single=[*first, "$A", *last],
    pair=[*first, "$A", *last, "$B", *last],
    special_tokens=[(model.pieces[id_].piece, id_) for id_ in (start, end) if id_ is not None],
  )
  special = [
    AddedToken(piece.piece, normalized=False, special=True)
    for number, piece in enumerate(model.pieces)
    if piece.type == _Piece.CONTROL or number == start
  ]
  names = [f"<extra_id_{number}>" for number in reversed(range(sentinels))]
  flags = {"normalized": False, "special": True, "lstrip": True, "rstrip": True}
  tokenizer.add_special_tokens([*special, *(AddedToken(name, **flags) for name in names)])
  return tokenizer


def _make_unigram(model: Any) -> models.Unigram:
  scores = {piece.piece: piece.score for piece in model.pieces}
  # SentencePiece gives user-defined symbols a bonus, so that they are never split.
  symbols = [piece.piece for piece in model.pieces if piece.type == _Piece.USER_DEFINED]
  best = max(scores.values())
  scores |= {symbol: len(symbol.encode()) * best - 0.1 for symbol in symbols}
  trainer = model.trainer_spec
  return models.Unigram(list(scores.items()), trainer.unk_id, trainer.byte_fallback)


def _make_normalizers(spec: Any) -> list[normalizers.Normalizer]:
  """Returns SentencePiece's steps, in its order."""
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


def _make_decoders(model: Any) -> list[decoders.Decoder]:
  trainer = model.trainer_spec
  unknown = model.pieces[trainer.unk_id].piece
  return [
    decoders.Replace(unknown, trainer.unk_surface),
    decoders.Replace(_SPACE, " "),
    *([decoders.ByteFallback()] if trainer.byte_fallback else []),
    decoders.Fuse(),
    *([decoders.Strip(" ", left=1)] if model.normalizer_spec.add_dummy_prefix else []),
  ]
