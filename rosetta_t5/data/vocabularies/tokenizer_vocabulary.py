"""The class of vocabularies that a tokenizer of the library `tokenizers` defines.

This module imports SeqIO, so `task_vocabularies` imports it when it is first used.
"""

import functools
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from rosetta_t5.data.local_copies import local_path
from rosetta_t5.data.tensorflow_import import seqio, tf
from rosetta_t5.data.vocabularies import tokenizer_folder
from rosetta_t5.data.vocabularies.task_vocabularies import load_tokenizer
from rosetta_t5.data.vocabularies.tokenizer_folder import TokenizerFolder

_SENTINEL = "<extra_id_{}>"


class TokenizerVocabulary(seqio.Vocabulary):
  """The tokens of a tokenizer, with every id `shift` higher.

  Padding is token 0 in T5's models and feature converters. A tokenizer whose token 0 is text, such as GPT-2's
  byte-level BPE (Radford et al. 2019), therefore needs a shift of 1.

  Texts are encoded without begin and end tokens: SeqIO appends the end token, and `begin_ids` and
  `ends_inputs` say what Transformers adds to inputs.
  """

  def __init__(
    self, files: tuple[str, ...], eos_token: str | None, shift: int | None, extra_ids: int
  ):
    self._files, self._eos_token = files, eos_token
    self._given_shift, self._added_ids = shift, extra_ids
    super().__init__(extra_ids=extra_ids)

  def __getstate__(self) -> dict[str, Any]:
    """Returns what `__init__` has set, and nothing that was read from files since."""
    names = ("_files", "_eos_token", "_given_shift", "_added_ids", "_extra_ids")
    return {name: getattr(self, name) for name in names}

  @property
  def tokenizer(self) -> Any:
    """The loaded tokenizer, without the shift."""
    return load_tokenizer(*self._files)

  @functools.cached_property
  def folder(self) -> TokenizerFolder:
    """What the other files in the tokenizer's folder say."""
    return tokenizer_folder.read_tokenizer_folder(os.path.dirname(local_path(self._files[0])))

  @functools.cached_property
  def shift(self) -> int:
    """How much higher than the tokenizer's the ids are."""
    given = self._given_shift
    return self.folder.shift(self.tokenizer) if given is None else given

  @property
  def eos_id(self) -> int:
    """The id of the end token."""
    token = self._eos_token or self.folder.end_token(self.tokenizer)
    if (number := self._id(token)) is None:
      raise ValueError(
        f"there is no token {token!r} (eos_token) in {self._files}: set data.tokenizer_vocabulary.eos_token"
      )
    return number

  @property
  def end_ids(self) -> set[int]:
    """The ids of all tokens with which texts of the folder's model may end."""
    return {self.eos_id, *(number + self.shift for number in self.folder.end_ids)}

  @property
  def bos_id(self) -> int | None:
    """The id of the begin token; None if the folder names none."""
    return self._id(self.folder.named.get("bos_token"))

  @property
  def unk_id(self) -> int | None:
    """The id of the unknown token; None if the folder names none but the end token, as Qwen's do."""
    number = self._id(self.folder.named.get("unk_token"))
    return (number or self._unknown) if number not in (None, self.eos_id) else None

  def _id(self, token: str | None) -> int | None:
    number = None if token is None else self.tokenizer.token_to_id(token)
    return None if number is None else number + self.shift

  @functools.cached_property
  def _surrounding_ids(self) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer's post-processor puts before and after every text, without the shift."""
    encoding = self.tokenizer.encode("a")
    start = encoding.special_tokens_mask.index(0)
    end = len(encoding) - encoding.special_tokens_mask[::-1].index(0)
    return encoding.ids[:start], encoding.ids[end:]

  @property
  def begin_ids(self) -> list[int]:
    """The ids that begin the inputs of the folder's encoder; [] for a decoder, whose rows begin with a start token."""
    has_encoder = self.folder.is_encoder_decoder
    return [n + self.shift for n in self._surrounding_ids[0]] if has_encoder else []

  @property
  def starts_rows(self) -> bool:
    """Whether a decoder's rows begin with a start token: not if the folder's tokenizer puts none before texts."""
    is_folder = len(self._files) == 1 and self.folder.is_encoder_decoder is False
    return not is_folder or bool(self._surrounding_ids[0])

  @property
  def ends_inputs(self) -> bool:
    """Whether inputs end with the end token, as the folder's tokenizer ends texts; true without a model's folder."""
    return self.folder.is_encoder_decoder is None or bool(self._surrounding_ids[1])

  @property
  def extra_ids(self) -> int:
    """The number of sentinels that are the last ids."""
    return self._added_ids or len(self._last_sentinels)

  @property
  def _base_vocab_size(self) -> int:
    return self._size - len(self._last_sentinels)

  @functools.cached_property
  def _size(self) -> int:
    return max(self.tokenizer.get_vocab().values()) + 1 + self.shift

  @functools.cached_property
  def _last_sentinels(self) -> list[int]:
    found = self.named_sentinels()
    return found if found == [self._size - 1 - n for n in range(len(found))] else []

  def named_sentinels(self) -> list[int]:
    """Returns the ids of <extra_id_0>, <extra_id_1>, …, wherever they are."""
    ids: list[int] = []
    while (number := self.tokenizer.token_to_id(_SENTINEL.format(len(ids)))) is not None:
      ids.append(number + self.shift)
    return ids

  @functools.cached_property
  def _hidden(self) -> set[int]:
    """The ids that decoded texts leave out: padding and special tokens, except sentinels."""
    added = self.tokenizer.get_added_tokens_decoder()
    special = {number + self.shift for number, token in added.items() if token.special}
    return {0, self.eos_id, *special} - {*self.named_sentinels()}

  @functools.cached_property
  def _unknown(self) -> int:
    """The id of unknown pieces where their own is 0, which means padding here; as `reserve_padding` does."""
    ids = (self.tokenizer.token_to_id(name) for name in ("<pad>", "<s>"))
    return next(filter(None, ids), 0)

  def _encode(self, s: str) -> list[int]:
    return self._shifted(self.tokenizer.encode(s, add_special_tokens=False).ids)

  def _shifted(self, ids: Iterable[int]) -> list[int]:
    return [number + self.shift or self._unknown for number in ids]

  def encode_spans(
    self, text: str, spans: Iterable[tuple[int, int]]
  ) -> tuple[list[int], list[int]]:
    """Returns a text's ids, and 1 for each that has a character of a span (first, end), else 0."""
    encoding = self.tokenizer.encode(text, add_special_tokens=False)
    # The offsets of white space may be empty, at its end.
    tokens = [(min(start, end - 1), end) for start, end in encoding.offsets]
    inside = [any(start < last and first < end for first, last in spans) for start, end in tokens]
    return self._shifted(encoding.ids), list(map(int, inside))

  def _decode(self, ids: Iterable[int]) -> str:
    shown = [int(id) - self.shift for id in ids if id not in self._hidden]
    return self.tokenizer.decode(shown, skip_special_tokens=False)

  def _encode_tf(self, s: Any) -> Any:
    def encode(text: bytes | np.ndarray) -> np.ndarray:
      # TensorFlow passes an array if it runs eagerly, and bytes in a graph.
      raw = text.item() if isinstance(text, np.ndarray) else text
      return np.array(self._encode(raw.decode(errors="replace")), np.int32)

    tokens = tf.numpy_function(encode, [s], tf.int32, stateful=False)
    tokens.set_shape([None])
    return tokens

  def _decode_tf(self, ids: Any) -> Any:
    def decode(ids: np.ndarray) -> Any:
      if ids.ndim == 1:
        return self._decode(ids.tolist()).encode()
      return np.array([decode(row) for row in ids], object)

    return tf.numpy_function(decode, [ids], tf.string, stateful=False)

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, TokenizerVocabulary):
      return False
    names = ("eos_id", "shift", "_added_ids")
    is_same = self._files == other._files or self.tokenizer.to_str() == other.tokenizer.to_str()
    return is_same and all(getattr(self, name) == getattr(other, name) for name in names)

  __hash__ = None  # type: ignore[assignment]
