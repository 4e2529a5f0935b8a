"""Vocabularies of gin files and tasks: makes them from tokenizers, compares them with the model's, and decodes."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

from rosetta_t5.data.dataset_config import DatasetConfig, find_task_or_mixture
from rosetta_t5.data.local_copies import local_path
from rosetta_t5.data.reading.files import digest_of
from rosetta_t5.data.tensorflow_import import seqio, tf
from rosetta_t5.data.vocabularies.tokenizer_folder import TOKENIZER, read_tokenizer_folder
from rosetta_t5.networks.other_networks import setting_of

GPT2_END = "<|endoftext|>"


def get_vocabulary(cfg: DatasetConfig) -> tuple[seqio.Vocabulary, seqio.Vocabulary]:
  """Returns the vocabularies of a task's inputs and targets.

  A task that lacks one of these features must have one vocabulary for all of its features. Pass-through
  vocabularies, which hold tokens instead of text, are ignored if there are others.

  Raises:
    ValueError: the task has no vocabulary, or several but no "inputs" and "targets".
  """
  features = find_task_or_mixture(cfg).output_features
  if "inputs" in features and "targets" in features:
    return features["inputs"].vocabulary, features["targets"].vocabulary
  vocabularies = [f.vocabulary for f in features.values() if hasattr(f, "vocabulary")]
  tokenizing = [v for v in vocabularies if not isinstance(v, seqio.PassThroughVocabulary)]
  found = tokenizing or vocabularies
  if not found or not all(same_vocabulary(found[0], other) for other in found):
    raise ValueError(
      f"The features {sorted(features)} of the task '{cfg.name}' must have the same vocabulary, or be "
      "named 'inputs' and 'targets', so that the model's vocabulary is unambiguous."
    )
  return found[0], found[0]


def same_vocabulary(a: seqio.Vocabulary, b: seqio.Vocabulary) -> bool:
  """Returns whether two vocabularies give the same ids. Those with files are compared by content.

  A tokenizer.json that was made of a SentencePiece model has its pieces under the same ids.
  """
  if a == b:
    return True
  first: Any = getattr(a, "tokenizer", None)
  second: Any = getattr(b, "tokenizer", None)
  if hasattr(first, "id_to_token"):
    first, second = second, first
  if not hasattr(first, "id_to_piece"):
    return False
  if hasattr(second, "id_to_piece"):
    return _pieces(first) == _pieces(second)
  if not hasattr(second, "id_to_token") or a.eos_id != b.eos_id:
    return False
  pieces = enumerate(piece for piece, _ in _pieces(first))
  return all(piece in ("", second.id_to_token(number)) for number, piece in pieces)


def _pieces(tokenizer: Any) -> list[tuple[str, float]]:
  """Returns a model's pieces and scores. Sentinels are replaced by one value, since no text has them."""
  numbers = range(tokenizer.get_piece_size())
  pieces = [(tokenizer.id_to_piece(n), tokenizer.get_score(n)) for n in numbers]
  return [
    ("", 0.0) if piece.removeprefix("▁").startswith("<extra_id_") else (piece, score)
    for piece, score in pieces
  ]


def vocabulary_digests(model: Any) -> dict[str, str]:
  """Returns digests of the contents of a model's vocabularies, by side.

  Vocabularies without files, such as those of bytes, have none. Extra ids are left out.
  """
  digests = {}
  for side in ("input", "output"):
    tokenizer: Any = getattr(getattr(model, f"{side}_vocabulary", None), "tokenizer", None)
    if hasattr(tokenizer, "id_to_piece"):
      tokens = [piece for piece in _pieces(tokenizer) if piece[0]]
      digests[side] = digest_of(repr(tokens).encode())
    elif hasattr(tokenizer, "to_str"):
      digests[side] = digest_of(tokenizer.to_str().encode())
  return digests


def verify_matching_vocabs(cfg: DatasetConfig, model: Any) -> None:
  """Checks that the model's vocabularies are those of the task.

  Raises:
    ValueError: the vocabularies differ, the model's embedding table has fewer rows than the
      vocabulary has tokens, or its padding is not token 0.
  """
  vocabularies = get_vocabulary(cfg)
  sides = ("input", model.input_vocabulary), ("output", model.output_vocabulary)
  for wanted, (side, given) in zip(vocabularies, sides, strict=True):
    if not same_vocabulary(wanted, given):
      raise ValueError(
        f"The task '{cfg.name}' and the model have different {side} vocabularies. "
        f"Task: {_describe(wanted)}. Model: {_describe(given)}. Set VOCABULARY (the model's "
        f"{side}_vocabulary) to the task's, or choose another MIXTURE_OR_TASK_NAME."
      )
  config = model.network_config
  if pad_id := setting_of(config, "pad_id"):
    raise ValueError(
      f"network.{type(config).__name__}.pad_id = {pad_id}, but rows of the task '{cfg.name}' are padded "
      "with 0, as SeqIO does: set it to 0, or set verify_matching_vocabs_fn = None and make batches of your own"
    )
  rows, needed = setting_of(config, "vocab_size"), max(v.vocab_size for v in vocabularies)
  if rows is not None and rows < needed:
    raise ValueError(
      f"The vocabulary of the task '{cfg.name}' has {needed} tokens (with its extra ids), but the "
      f"model's embedding table has only {rows} rows. Set network.{type(config).__name__}.vocab_size = "
      f"{needed + -needed % 128} (the next multiple of 128)."
    )


def _describe(vocabulary: seqio.Vocabulary) -> str:
  """Describes a vocabulary in one line. `str` of some vocabularies loads a file that may be missing."""
  path = getattr(vocabulary, "sentencepiece_model_file", None)
  size = f"{vocabulary.vocab_size} tokens, {vocabulary.extra_ids} of them extra ids"
  return f"{type(vocabulary).__name__}({f'{path}: ' if path else ''}{size})"


def round_vocab_size_to_multiple(vocabulary: seqio.Vocabulary, divisor: int = 128) -> int:
  """Returns a vocabulary's size rounded up to a multiple of `divisor`, for an embedding table."""
  size = vocabulary.vocab_size
  return size + -size % divisor


@functools.cache
def load_tokenizer(*files: str) -> Any:
  """Returns the `tokenizers.Tokenizer` of a tokenizer.json, which neither truncates nor pads, or of GPT-2's two files.

  A tokenizer.json has the tokens that other files in its folder add.

  Args:
    *files: tokenizer.json; or vocab.json and merges.txt. Each is a local path, or a gs:// path with a copy.

  Raises:
    ValueError: a file does not exist or has another format.
  """
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers

  paths = [local_path(file) for file in files]
  try:
    if len(paths) == 1:
      tokenizer = Tokenizer.from_file(paths[0])
      tokenizer.no_truncation()
      tokenizer.no_padding()
      read_tokenizer_folder(os.path.dirname(paths[0])).add_tokens(tokenizer)
    else:
      tokenizer = Tokenizer(models.BPE.from_file(*paths))
      tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
      tokenizer.decoder = decoders.ByteLevel()
  except Exception as error:  # tokenizers raises no narrower type
    raise ValueError(
      f"{' and '.join(files)} cannot be read as a tokenizer.json, or as GPT-2's vocab.json and merges.txt: "
      f"{error}"
    ) from error
  return tokenizer


def gpt2_vocabulary(vocab_file: str, merges_file: str, extra_ids: int = 0) -> seqio.Vocabulary:
  """Returns GPT-2's vocabulary; for gin: `VOCABULARY = @data.gpt2_vocabulary()`.

  Args:
    vocab_file: vocab.json, a local path or a gs:// path with a local copy.
    merges_file: merges.txt.
    extra_ids: the number of sentinels for span corruption, which are the last ids.
  """
  from rosetta_t5.data.vocabularies.tokenizer_vocabulary import TokenizerVocabulary

  return TokenizerVocabulary((vocab_file, merges_file), GPT2_END, 1, extra_ids)


def tokenizer_vocabulary(
  file: str, eos_token: str | None = None, shift: int | None = None, extra_ids: int = 0
) -> seqio.Vocabulary:
  """Returns the vocabulary of a tokenizer.json; for gin: `VOCABULARY = @data.tokenizer_vocabulary()`.

  Its sentinels for span corruption are the tokens <extra_id_0>, <extra_id_1>, … if these are the last ids
  in descending order, as in T5's. Texts are tokenized in Python, so it cannot be part of a SavedModel.

  Args:
    file: tokenizer.json, or a folder with it, a local path.
    eos_token: the token that ends a text, such as "</s>"; None for that of the folder's other files.
    shift: 1 if the tokenizer's token 0 is not padding: all ids are then one higher. None for 1 if
      config.json beside it is a decoder's and has another `pad_token_id`, or if token 0 is text; else 0.
    extra_ids: the number of sentinels after its last id, if the tokenizer has none of its own.

  Raises:
    ValueError: a folder has no tokenizer.json.
  """
  from rosetta_t5.data.vocabularies.tokenizer_vocabulary import TokenizerVocabulary

  if os.path.isdir(file):
    file = os.path.join(file, TOKENIZER)
    if not os.path.exists(file):
      raise ValueError(
        f"There is no {file}: have Transformers write it, AutoTokenizer.from_pretrained(FOLDER)"
        ".save_pretrained(FOLDER)"
      )
  vocabulary = TokenizerVocabulary((file,), eos_token, shift, 0)
  if extra_ids and not vocabulary.named_sentinels():
    vocabulary = TokenizerVocabulary((file,), eos_token, shift, extra_ids)
  return vocabulary


def decode_tokens(vocabulary: seqio.Vocabulary, tokens: Sequence[Any]) -> Any:
  """Decodes tokens up to the first end token. Returns bytes, or an array of them for several rows.

  TensorFlow decodes them, as for T5X's prediction files, because a vocabulary's own `decode` may
  represent invalid characters in another way.

  Args:
    vocabulary: a SeqIO vocabulary.
    tokens: ids, [T] or [N, T].
  """
  return vocabulary.decode_tf(tf.constant(tokens)).numpy()
