"""SentencePiece models: loaded so that id 0 is padding, trained with T5's ids, and what texts lose in them."""

import contextlib
import dataclasses
import io
import itertools
import os
import pathlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from absl import logging

from rosetta_t5 import terminal
from rosetta_t5.data.local_copies import announced_extra_ids, local_path

# The ids that T5's vocabularies have, as flags of SentencePiece's spm_train.
T5_IDS = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
_FLAGS = " ".join(f"--{name}={value}" for name, value in T5_IDS.items())
_WHITE_SPACE = re.compile("[\n\t]|(?<= ) +")  # A run of spaces is counted without its first space.
_LOST, _UNKNOWN = "lost ", "unknown "  # before the character that is counted
_LOST_WHITE_SPACE = "lost white space"
_SHOWN = 15  # number of characters
# In T5's vocabulary, books lose 1% of their characters as white space, and source code 6% to 21%.
_MAX_WHITE_SPACE = 0.05
_MAX_CHANGED = 0.25  # fraction of the texts whose other characters may change
KEEP_WHITE_SPACE = (
  "--normalization_rule_name identity --remove_extra_whitespaces false "
  "--allow_whitespace_only_pieces true"
)


def _load(model: bytes) -> Any:
  import sentencepiece

  return sentencepiece.SentencePieceProcessor(model_proto=model, num_threads=1)


def load_sentencepiece(path: str | os.PathLike[str]) -> Any:
  """Returns the `SentencePieceProcessor` of a .model file, as `reserve_padding` changes it.

  Raises:
    ValueError: the file is not a SentencePiece model, or has no id for padding.
  """
  with contextlib.suppress(RuntimeError):
    processor = _load(pathlib.Path(path).read_bytes())
    if processor.get_piece_size():  # An empty file is loaded as a model without pieces.
      return reserve_padding(processor, os.fspath(path))
  raise ValueError(f"{path} is not a SentencePiece model, or is damaged: give another file")


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
  model = tokenizer.serialized_model_proto()
  return dataclasses.replace(context, tokenizer=tokenizer, sp_model=model)


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
  from sentencepiece import sentencepiece_model_pb2

  if processor.is_control(0) and processor.eos_id() != 0:
    return processor
  free = next((id_ for id_ in (processor.pad_id(), processor.bos_id()) if id_ > 0), None)
  # The classes of protocol buffers are created at run time, so mypy does not know their attributes.
  proto: Any = sentencepiece_model_pb2
  model = proto.ModelProto.FromString(processor.serialized_model_proto())
  spec = model.trainer_spec
  if processor.unk_id() != 0 or (free is None and not spec.byte_fallback):
    raise ValueError(
      f"{name} has {processor.id_to_piece(0)!r} at id 0, which means padding here: use a vocabulary with "
      f"T5's ids ({_FLAGS} of spm_train; rosetta-t5 vocab train sets them)"
    )
  if free is None:
    # Bytes replace unknown characters, so this piece is never anything but padding.
    spec.unk_surface = ""
    return _load(model.SerializeToString())
  logging.log_first_n(
    logging.WARNING,
    f"{name} has the unknown piece at id 0, which means padding here: unknown pieces get the id {free} "
    f"({processor.id_to_piece(free)}) instead. rosetta-t5 vocab train avoids this with {_FLAGS}",
    1,
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


def count_last_sentinels(vocabulary: Any) -> int:
  """Returns how many of a vocabulary's last ids are sentinels; span corruption uses the last one first."""
  ids = sentinel_ids(vocabulary)
  return len(ids) if ids[:1] == [vocabulary.vocab_size - 1] else 0


def count_extra_pieces(processor: Any) -> int:
  """Returns how many of a processor's last pieces are sentinels."""
  pieces = map(processor.id_to_piece, reversed(range(processor.get_piece_size())))
  return sum(1 for _ in itertools.takewhile(lambda piece: "<extra_id_" in piece, pieces))


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


def count_lost(text: str, vocabulary: Any) -> Counter[str]:
  """Returns how much of each kind a text has, and how much of it is lost; the counts of texts can be added.

  Args:
    text: the text; white space at its ends does not count.
    vocabulary: anything that encodes texts to ids and decodes them.
  """
  text = text.strip()
  decoded = vocabulary.decode(vocabulary.encode(text))
  characters = _lost_characters(text, decoded)
  counts = Counter(texts=1, changed=int(bool(characters)), characters=len(text))
  decoded = decoded.replace(" ⁇ ", "")  # an unknown piece, as SentencePiece decodes it
  before, after = (sum(map(len, _WHITE_SPACE.findall(part))) for part in (text, decoded))
  counts += Counter({_LOST_WHITE_SPACE: before - after})
  return counts + Counter({_LOST + repr(c): number for c, number in characters.items()})


def _lost_characters(text: str, decoded: str) -> Counter[str]:
  """Returns how often each character, except spaces, is lost or replaced.

  If none is, but the text changes, the characters that are added or, if it is only reordered, all.
  """
  before, after = ("".join(part.split()) for part in (text, decoded))
  if before == after:
    return Counter()
  counts = Counter(before), Counter(after)
  return counts[0] - counts[1] or counts[1] - counts[0] or counts[0]


def count_unknown(text: str, tokenizer: Any) -> Counter[str]:
  """Returns how often each character is in an unknown piece.

  Args:
    text: the text.
    tokenizer: a `SentencePieceProcessor`, or a SeqIO vocabulary; those of bytes know all characters.
  """
  tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
  if not hasattr(tokenizer, "id_to_piece"):
    return Counter()
  ids, pieces = tokenizer.encode(text), tokenizer.encode(text, out_type=str)
  unknown = "".join(p for id_, p in zip(ids, pieces, strict=True) if id_ == tokenizer.unk_id())
  return Counter(_UNKNOWN + repr(character) for character in unknown)


def describe_lost(counts: Mapping[str, int]) -> Iterator[str]:
  """Yields lines about what texts lose.

  Args:
    counts: the sum of the results of `count_lost`.
  """
  texts = counts["texts"]
  same = texts - counts.get("changed", 0)
  yield f"decode(encode(text)) equals the text, except for spaces, in {same} of {texts}"
  if text := _name_characters(counts, _LOST):
    yield f"  lost characters: {text}"
  if text := describe_unknown(counts):
    yield f"  characters without a piece, in all texts: {text}"
  if lost := counts.get(_LOST_WHITE_SPACE, 0):
    share = lost / counts["characters"]
    yield f"  lost line breaks, tabs and runs of spaces: {share:.1%} of the characters"


def describe_unknown(counts: Mapping[str, int]) -> str:
  """Returns how often the most common unknown characters occur; "" without any. See `count_unknown`."""
  return _name_characters(counts, _UNKNOWN)


def _name_characters(counts: Mapping[str, int], start: str) -> str:
  # Representations of characters begin with a quote.
  starts = (f"{start}'", f'{start}"')
  found = {n.removeprefix(start): c for n, c in counts.items() if n.startswith(starts)}
  common = Counter(found).most_common(_SHOWN)
  return ", ".join(f"{name} {count} times" for name, count in common)


def lost_text_problems(counts: Mapping[str, int]) -> Iterator[str]:
  """Yields what is too much to be lost, and what to change; see `describe_lost`."""
  texts, changed = counts["texts"], counts.get("changed", 0)
  # A vocabulary may lack some characters: T5's has no braces. If it changes many texts, it is wrong.
  if changed > _MAX_CHANGED * texts:
    yield f"the vocabulary changes {changed} of {texts} texts"
  share = counts.get(_LOST_WHITE_SPACE, 0) / max(counts["characters"], 1)
  if share > _MAX_WHITE_SPACE:
    yield (
      f"the vocabulary loses white space that is {share:.0%} of the characters, as in source code: line "
      f"breaks and indents cannot be learned. Train a vocabulary that keeps them: rosetta-t5 vocab train "
      f"{KEEP_WHITE_SPACE}"
    )
