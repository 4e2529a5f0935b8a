"""Loads SentencePiece models so that id 0 is padding, which no text contains, and trains them with T5's ids."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import multiprocessing
import os
import pathlib
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from absl import logging

from rosetta_t5 import terminal
from rosetta_t5.data.local_copies import announced_extra_ids, local_path

# The ids that T5's vocabularies have, as flags of SentencePiece's spm_train.
T5_IDS = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
_SMALL = 1000  # pieces; 256 bytes would be too many of a smaller vocabulary
_FLAGS = " ".join(f"--{name}={value}" for name, value in T5_IDS.items())


def _load(model: bytes) -> Any:
  import sentencepiece

  return sentencepiece.SentencePieceProcessor(model_proto=model, num_threads=1)


def _model_of(processor: Any) -> Any:
  """Returns a processor's model as a `sentencepiece_model_pb2.ModelProto`."""
  from sentencepiece import sentencepiece_model_pb2

  # The classes of protocol buffers are created at run time, so mypy does not know their attributes.
  proto: Any = sentencepiece_model_pb2
  return proto.ModelProto.FromString(processor.serialized_model_proto())


def load_sentencepiece(path: str | os.PathLike[str], extra_ids: int = 0) -> Any:
  """Returns the `SentencePieceProcessor` of a .model file, as `reserve_padding` changes it.

  Args:
    path: the file.
    extra_ids: the number of sentinels to add, as SeqIO does.

  Raises:
    ValueError: the file is not a SentencePiece model, or has no id for padding.
  """
  with contextlib.suppress(RuntimeError):
    processor = _load(pathlib.Path(path).read_bytes())
    if processor.get_piece_size():  # An empty file is loaded as a model without pieces.
      return _with_sentinels(reserve_padding(processor, os.fspath(path)), extra_ids)
  raise ValueError(f"{path} is not a SentencePiece model, or is damaged: give another file")


def read_padded_model(path: str | os.PathLike[str]) -> bytes:
  """Returns a file's model in which id 0 is padding: the file's bytes, unless `reserve_padding` changes it."""
  model = pathlib.Path(path).read_bytes()
  given = _load(model)
  padded = reserve_padding(given, os.fspath(path))
  return model if padded is given else padded.serialized_model_proto()


def load_vocabulary_model(
  load: Callable[..., Any], path: str | os.PathLike[str], extra_ids: int, *options: Any
) -> Any:
  """Loads the model of SeqIO's vocabularies from its local copy, with the extra ids that its path announces.

  The path …/cc_all.32000.100extra/sentencepiece.model announces 100 sentinels, but many copies of
  T5's model lack them. They are added here, so that span corruption and the embedding table use all
  32,100 ids.

  Args:
    load: SeqIO's function, called with the local path, the number of extra ids and the options.
    path: the model's path, which may start with gs://.
    extra_ids: the number of extra ids that the vocabulary requests; 0 means the number in the path.
    *options: passed on to `load`.

  Raises:
    ValueError: the file does not exist, is not a SentencePiece model, or has no id for padding.
  """
  file = local_path(os.fspath(path))
  processor = load_sentencepiece(file)  # This raises an error that names a damaged file.
  # A model that has sentinels gets no second ones.
  extra_ids = 0 if count_extra_pieces(processor) else extra_ids or announced_extra_ids(path)
  context = load(file, extra_ids, *options)
  tokenizer = reserve_padding(context.tokenizer, file)
  if tokenizer is context.tokenizer:
    return context
  return dataclasses.replace(
    context, tokenizer=tokenizer, sp_model=tokenizer.serialized_model_proto()
  )


def reserve_padding(processor: Any, name: str) -> Any:
  """Returns a `SentencePieceProcessor` for which id 0 is padding: mostly `processor` itself.

  Networks and feature converters take 0 for padding. In a model with `spm_train`'s defaults, and in
  MADLAD-400's, 0 is the unknown piece. It changes places with the padding piece or, without one, with <s>,
  which T5's texts do not contain. All other ids remain.

  Args:
    processor: the processor of a model.
    name: the model's file, for messages.

  Raises:
    ValueError: id 0 is a piece of text or the end token, or no other id is free for the unknown piece.
  """
  if processor.is_control(0) and processor.eos_id() != 0:
    return processor
  free = next((id_ for id_ in (processor.pad_id(), processor.bos_id()) if id_ > 0), None)
  model = _model_of(processor)
  spec = model.trainer_spec
  if processor.unk_id() != 0 or (free is None and not spec.byte_fallback):
    raise ValueError(
      f"{name} has {processor.id_to_piece(0)!r} at id 0, which means padding here, so texts would lose it: "
      f"use a vocabulary with T5's ids ({_FLAGS} of spm_train; rosetta-t5 vocab train sets them)"
    )
  if free is None:
    # Bytes replace unknown characters, so this piece is never anything but padding.
    spec.unk_surface = ""
    return _load(model.SerializeToString())
  if multiprocessing.parent_process() is None:
    logging.log_first_n(
      logging.WARNING,
      "%s has the unknown piece at id 0, which means padding here: unknown pieces get the id %d (%s) "
      "instead. A vocabulary with T5's ids avoids this: %s of spm_train; rosetta-t5 vocab train sets them",
      1,
      *(name, free, processor.id_to_piece(free), _FLAGS),
    )
  padding, unknown = model.pieces[0], model.pieces[free]
  padding.piece, padding.type = spec.pad_piece, model.SentencePiece.CONTROL
  unknown.piece, unknown.type = spec.unk_piece, model.SentencePiece.UNKNOWN
  spec.pad_id, spec.unk_id = 0, free
  spec.bos_id = -1 if free == spec.bos_id else spec.bos_id
  return _load(model.SerializeToString())


def sentinel_ids(vocabulary: Any) -> list[int]:
  """Returns the ids of the sentinels <extra_id_0>, <extra_id_1>, … of a vocabulary, in this order.

  They are the last ids, whether SeqIO adds them or the vocabulary's file has them. Only the sentinels of a
  tokenizer.json may be elsewhere.
  """
  if hasattr(vocabulary, "named_sentinels") and not vocabulary.extra_ids:
    return vocabulary.named_sentinels()
  tokenizer: Any = getattr(vocabulary, "tokenizer", None)
  is_model = hasattr(tokenizer, "id_to_piece")
  count = count_extra_pieces(tokenizer) if is_model else vocabulary.extra_ids
  return [vocabulary.vocab_size - 1 - number for number in range(count)]


def count_extra_pieces(processor: Any) -> int:
  """Returns how many of a processor's last pieces are sentinels."""
  pieces = map(processor.id_to_piece, reversed(range(processor.get_piece_size())))
  return sum(1 for _ in itertools.takewhile(lambda piece: "<extra_id_" in piece, pieces))


def _with_sentinels(processor: Any, count: int) -> Any:
  if not count or count_extra_pieces(processor):
    return processor
  model = _model_of(processor)
  user_defined = model.SentencePiece.USER_DEFINED
  for number in reversed(range(count)):
    model.pieces.add(piece=f"▁<extra_id_{number}>", score=0.0, type=user_defined)
  return _load(model.SerializeToString())


def lossless_options(vocab_size: int) -> dict[str, str]:
  """Returns SentencePiece's options with which a vocabulary of this size loses no character of its text."""
  if vocab_size < _SMALL:
    return {"character_coverage": "1.0"}
  return {
    "byte_fallback": "true",
    "required_chars": string.digits + string.ascii_letters + string.punctuation,
  }


def train_sentencepiece(
  lines: Iterable[str], vocab_size: int, options: Mapping[str, str] | None = None
) -> bytes:
  """Returns a serialized unigram model of `vocab_size` pieces: 0 padding, 1 end, 2 unknown.

  The same lines give the same model. Extra ids (sentinels) are added when the model is loaded.

  Args:
    lines: texts without line breaks, of at most 4,000 characters.
    vocab_size: the number of pieces.
    options: further options of SentencePiece's trainer, by name.

  Raises:
    ValueError: the text does not have enough different pieces, or SentencePiece refuses an option.
  """
  import sentencepiece

  model = io.BytesIO()
  settings: dict[str, Any] = {
    "model_type": "unigram",
    "vocab_size": vocab_size,
    "num_threads": 2,  # A fixed number, because each thread's sums of scores decide ties.
    "max_sentence_length": 4 * 4000,  # bytes; longer lines are ignored
    "minloglevel": 2,
    **T5_IDS,
  }
  try:
    with terminal.progress_bar("training the vocabulary"):
      sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, **{**settings, **(options or {})}
      )
  except (RuntimeError, ValueError) as error:
    reason = str(error).rpartition("] ")[2]  # without the position in SentencePiece's source
    raise ValueError(
      f"No SentencePiece vocabulary of {vocab_size} pieces can be trained on this text: "
      f"{reason or 'there is none.'} Use more text, another size (vocab train --size) or other options"
    ) from None
  return model.getvalue()
