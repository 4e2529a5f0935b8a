"""Tokenizers of the library `tokenizers` for SeqIO: tokenizer.json, and GPT-2's vocab.json and merges.txt.

Padding is token 0 in T5's models and feature converters. A tokenizer whose token 0 is text, such as GPT-2's
byte-level BPE (Radford et al. 2019), therefore has every id one higher here (`shift`).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from rosetta_t5.data.local_copies import local_path

if TYPE_CHECKING:
  import seqio
  import tokenizers

END = "<|endoftext|>"


@functools.cache
def load_tokenizer(file: str) -> tokenizers.Tokenizer:
  """Returns the tokenizer of a tokenizer.json, which neither truncates nor pads.

  Raises:
    ValueError: the file does not exist or has another format.
  """
  from tokenizers import Tokenizer

  path = local_path(file)
  try:
    tokenizer = Tokenizer.from_file(path)
  except Exception as error:  # tokenizers raises no narrower type
    raise ValueError(f"{file} is not a tokenizer.json: {error}") from error
  tokenizer.no_truncation()
  tokenizer.no_padding()
  return tokenizer


@functools.cache
def load_gpt2_tokenizer(vocab_file: str, merges_file: str) -> tokenizers.Tokenizer:
  """Returns GPT-2's tokenizer, with the ids of vocab.json.

  Args:
    vocab_file: vocab.json, a local path or a gs:// path with a local copy.
    merges_file: merges.txt.

  Raises:
    ValueError: a file does not exist or has another format.
  """
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers

  paths = local_path(vocab_file), local_path(merges_file)
  message = f"{vocab_file} and {merges_file} are not GPT-2's vocab.json and merges.txt"
  try:
    tokenizer = Tokenizer(models.BPE.from_file(*paths))
  except Exception as error:  # tokenizers raises no narrower type
    raise ValueError(f"{message}: {error}") from error
  if max(tokenizer.get_vocab().values(), default=0) > np.iinfo(np.int32).max:
    raise ValueError(f"{message}: the numbers of tokens must have 32 bits")
  if tokenizer.token_to_id(END) is None:
    raise ValueError(f"{message}: there is no token {END}")
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  return tokenizer


def gpt2_vocabulary(vocab_file: str, merges_file: str, extra_ids: int = 0) -> seqio.Vocabulary:
  """Returns GPT-2's vocabulary; for gin: `VOCABULARY = @data.gpt2_vocabulary()`.

  Args:
    vocab_file: vocab.json, a local path or a gs:// path with a local copy.
    merges_file: merges.txt.
    extra_ids: the number of sentinels for span corruption, which are the last ids.
  """
  return _class()((vocab_file, merges_file), END, 1, extra_ids)


def tokenizer_vocabulary(file: str, eos_token: str, shift: int = 0) -> seqio.Vocabulary:
  """Returns the vocabulary of a tokenizer.json; for gin: `VOCABULARY = @data.tokenizer_vocabulary()`.

  Its sentinels for span corruption are the tokens <extra_id_0>, <extra_id_1>, … if these are the last ids
  in descending order, as in T5's. Texts are tokenized in Python, so it cannot be part of a SavedModel.

  Args:
    file: tokenizer.json, a local path.
    eos_token: the token that ends a text, such as "</s>".
    shift: 1 if the tokenizer's token 0 is not padding: all ids are then one higher.
  """
  return _class()((file,), eos_token, shift, 0)


def _class() -> Any:
  # It imports SeqIO.
  from rosetta_t5.data.vocabularies.tokenizer_class import TokenizerVocabulary

  return TokenizerVocabulary
