"""GPT-2's byte-level BPE (Radford et al. 2019) from vocab.json and merges.txt, as a vocabulary of SeqIO.

Token ids are shifted: 0 is padding, as T5's models and feature converters take for granted, so id n of
vocab.json is n + 1 here; the end of a text is <|endoftext|>.
"""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rosetta_t5.data.local_files.local_assets import local_path
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio, import_tensorflow

if TYPE_CHECKING:
  import seqio

END = "<|endoftext|>"
# Contractions, words with the space before them, numbers, signs, spaces.
_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class BytePairEncoder:
  """Text to GPT-2's tokens and back, in plain Python."""

  def __init__(self, vocab_file: str, merges_file: str):
    """Reads the two files.

    Raises:
      ValueError: one is not there, or is no file of its kind.
    """
    import regex

    self._words = regex.compile(_WORDS)
    try:
      self.ids: dict[str, int] = json.loads(pathlib.Path(local_path(vocab_file)).read_text("utf-8"))
      lines = pathlib.Path(local_path(merges_file)).read_text("utf-8").splitlines()
      merges = [tuple(line.split()) for line in lines if line and not line.startswith("#version")]
      self._ranks = {(first, second): rank for rank, (first, second) in enumerate(merges)}
      self.end_id = self.ids[END]
    except (KeyError, ValueError, AttributeError) as error:
      if "vocabulary file" in str(error) or "gs://" in str(error):
        raise
      raise ValueError(
        f"{vocab_file} and {merges_file} are not GPT-2's vocab.json and merges.txt: {error!r}"
      ) from error
    self._pieces = {number: piece for piece, number in self.ids.items()}
    self._characters = _byte_characters()
    self._bytes = {character: byte for byte, character in self._characters.items()}
    self._merge = functools.lru_cache(1 << 16)(self._merge_word)

  def encode(self, text: str) -> list[int]:
    """Returns GPT-2's token ids."""
    tokens: list[int] = []
    for word in self._words.findall(text):
      tokens += self._merge("".join(self._characters[byte] for byte in word.encode()))
    return tokens

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of GPT-2's token ids; ids that it does not have are left out."""
    pieces = "".join(self._pieces.get(number, "") for number in ids if number != self.end_id)
    return bytes(self._bytes[c] for c in pieces if c in self._bytes).decode(errors="replace")

  def _merge_word(self, word: str) -> tuple[int, ...]:
    """Merges the pair of the lowest rank, wherever it stands, until there is none."""
    parts = list(word)
    while len(parts) > 1:
      pairs = itertools.pairwise(parts)
      best = min(pairs, key=lambda pair: self._ranks.get(pair, len(self._ranks)))
      if best not in self._ranks:
        break
      parts = _merged(parts, best)
    return tuple(self.ids[part] for part in parts)


def _merged(parts: Sequence[str], pair: tuple[str, str]) -> list[str]:
  merged, place = [], 0
  while place < len(parts):
    is_pair = tuple(parts[place : place + 2]) == pair
    merged.append("".join(pair) if is_pair else parts[place])
    place += 2 if is_pair else 1
  return merged


def _byte_characters() -> dict[int, str]:
  """GPT-2's visible character for each byte: itself if it is visible, else one from 256 up."""
  visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in visible]
  shifted = {byte: chr(256 + place) for place, byte in enumerate(others)}
  return {**{byte: chr(byte) for byte in visible}, **shifted}


def gpt2_vocabulary(vocab_file: str, merges_file: str, extra_ids: int = 0) -> seqio.Vocabulary:
  """Returns GPT-2's vocabulary; for gin: `VOCABULARY = @data.gpt2_vocabulary()`.

  Args:
    vocab_file: vocab.json, a path of this machine or a gs:// path that has a copy here.
    merges_file: merges.txt.
    extra_ids: sentinels for span corruption, the last ids.
  """
  return _class()(vocab_file, merges_file, extra_ids)


@functools.cache
def _class() -> Any:
  seqio: Any = import_seqio()

  class Gpt2Vocabulary(seqio.Vocabulary):
    """The encoder, each id one higher, for padding."""

    def __init__(self, vocab_file: str, merges_file: str, extra_ids: int = 0):
      self._files = (vocab_file, merges_file)
      super().__init__(extra_ids=extra_ids)

    @property
    def _encoder(self) -> BytePairEncoder:
      return _load(*self._files)

    @property
    def eos_id(self) -> int:
      return self._encoder.end_id + 1

    @property
    def unk_id(self) -> int | None:
      return None

    @property
    def _base_vocab_size(self) -> int:
      return max(self._encoder.ids.values()) + 2

    def _encode(self, s: str) -> list[int]:
      return [token + 1 for token in self._encoder.encode(s)]

    def _decode(self, ids: Iterable[int]) -> str:
      return self._encoder.decode(int(number) - 1 for number in ids)

    def _encode_tf(self, s: Any) -> Any:
      tf = import_tensorflow()

      def encode(text: bytes | np.ndarray) -> np.ndarray:
        raw = text.item() if isinstance(text, np.ndarray) else text  # an array outside of graphs
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
        and (self._files == other._files or self._content == other._content)
      )

    __hash__ = None  # type: ignore[assignment]

    @property
    def _content(self) -> Any:
      return self._encoder.ids, self._encoder._ranks

    def __reduce__(self) -> Any:
      return gpt2_vocabulary, (*self._files, self.extra_ids)

  return Gpt2Vocabulary


@functools.cache
def _load(vocab_file: str, merges_file: str) -> BytePairEncoder:
  return BytePairEncoder(vocab_file, merges_file)
