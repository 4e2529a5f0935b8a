"""GPT-2's byte-level BPE (Radford et al. 2019), read from vocab.json and merges.txt, for SeqIO.

Token ids are shifted by one: T5's models and feature converters use 0 for padding, so id n of vocab.json is
n + 1 here. The end of a text is <|endoftext|>.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from rosetta_t5.data.local_files.local_assets import local_path
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio, import_tensorflow

if TYPE_CHECKING:
  import seqio
  import tokenizers

END = "<|endoftext|>"


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
  return _vocabulary_class()(vocab_file, merges_file, extra_ids)


@functools.cache
def _vocabulary_class() -> Any:
  seqio: Any = import_seqio()

  class Gpt2Vocabulary(seqio.Vocabulary):
    """GPT-2's tokens with every id one higher, to leave 0 for padding."""

    def __init__(self, vocab_file: str, merges_file: str, extra_ids: int = 0):
      self._files = (vocab_file, merges_file)
      super().__init__(extra_ids=extra_ids)

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
      return load_gpt2_tokenizer(*self._files)

    @property
    def eos_id(self) -> int:
      return self.tokenizer.get_vocab()[END] + 1

    @property
    def unk_id(self) -> int | None:
      return None

    @property
    def _base_vocab_size(self) -> int:
      return max(self.tokenizer.get_vocab().values()) + 2

    def _encode(self, s: str) -> list[int]:
      return [token + 1 for token in self.tokenizer.encode(s).ids]

    def _decode(self, ids: Iterable[int]) -> str:
      return self.tokenizer.decode([int(id) - 1 for id in ids if id > 0 and id != self.eos_id])

    def _encode_tf(self, s: Any) -> Any:
      tf = import_tensorflow()

      def encode(text: bytes | np.ndarray) -> np.ndarray:
        # TensorFlow passes an array if it runs eagerly, and bytes in a graph.
        raw = text.item() if isinstance(text, np.ndarray) else text
        return np.array(self._encode(raw.decode(errors="replace")), np.int32)

      tokens = tf.numpy_function(encode, [s], tf.int32, stateful=False)
      tokens.set_shape([None])
      return tokens

    def _decode_tf(self, ids: Any) -> Any:
      tf = import_tensorflow()
      return tf.numpy_function(
        lambda rows: self._decode(rows.tolist()).encode(), [ids], tf.string, stateful=False
      )

    def __eq__(self, other: object) -> bool:
      return (
        isinstance(other, Gpt2Vocabulary)
        and self.extra_ids == other.extra_ids
        and (self._files == other._files or self.tokenizer.to_str() == other.tokenizer.to_str())
      )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
      return gpt2_vocabulary, (*self._files, self.extra_ids)

  return Gpt2Vocabulary
