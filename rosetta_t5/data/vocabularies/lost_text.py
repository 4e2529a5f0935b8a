"""Counts what texts lose when a vocabulary encodes and decodes them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

# A run of spaces is counted without its first space.
_WHITE_SPACE = {"line breaks": "\n", "tabs": "\t", "runs of spaces": "(?<= ) +"}
_LOST = "lost "  # before the name of what is counted
_SIZE = "lost white space"
_UNKNOWN_CHARACTER = "unknown "
_UNKNOWN = " ⁇ "  # how SentencePiece decodes an unknown piece
_SHOWN = 15  # number of characters
# In T5's vocabulary, books lose 1% of their characters as white space, and source code 6% to 21%.
_MAX_WHITE_SPACE = 0.05
_MAX_CHANGED = 0.25  # fraction of the texts whose other characters may change
KEEP_WHITE_SPACE = (
  "--normalization_rule_name identity --remove_extra_whitespaces false "
  "--allow_whitespace_only_pieces true"
)


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
  decoded = decoded.replace(_UNKNOWN, "")  # without the spaces that SentencePiece adds
  for name, pattern in _WHITE_SPACE.items():
    before, after = (re.findall(pattern, part) for part in (text, decoded))
    counts += Counter({name: len(before), _LOST + name: len(before) - len(after)})
    counts += Counter({_SIZE: sum(map(len, before)) - sum(map(len, after))})
  return counts + Counter({_LOST + repr(c): number for c, number in characters.items()})


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
  return Counter(_UNKNOWN_CHARACTER + repr(character) for character in unknown)


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
  kinds = [
    f"{lost:,} of {counts[name]:,} {name} ({lost / counts[name]:.0%})"
    for name in _WHITE_SPACE
    if (lost := counts.get(_LOST + name, 0))
  ]
  if kinds:
    share = counts.get(_SIZE, 0) / counts["characters"]
    yield f"  lost white space, {share:.1%} of the characters: {', '.join(kinds)}"


def describe_unknown(counts: Mapping[str, int]) -> str:
  """Returns how often the most common unknown characters occur; "" without any. See `count_unknown`."""
  return _name_characters(counts, _UNKNOWN_CHARACTER)


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
  share = counts.get(_SIZE, 0) / max(counts["characters"], 1)
  if share > _MAX_WHITE_SPACE:
    yield (
      f"the vocabulary loses white space that is {share:.0%} of the characters, as in source code: line "
      f"breaks and indents cannot be learned. Train a vocabulary that keeps them: rosetta-t5 vocab train "
      f"{KEEP_WHITE_SPACE}"
    )


def _lost_characters(text: str, decoded: str) -> Counter[str]:
  """Returns how often each character, except spaces, is lost or replaced.

  If none is, but the text changes, the characters that are added or, if it is only reordered, all.
  """
  before, after = ("".join(part.split()) for part in (text, decoded))
  if before == after:
    return Counter()
  counts = Counter(before), Counter(after)
  return counts[0] - counts[1] or counts[1] - counts[0] or counts[0]
