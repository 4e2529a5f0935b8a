"""Span corruption of a whole batch at once, in numpy.

The distribution is T5's (Raffel et al. 2020, section 3.3.4), as in `objectives.span_corruption`, but the
random numbers are others: each row depends only on its own key.
"""

from __future__ import annotations

import numpy as np

from rosetta_t5.data.objectives.span_corruption import noise_and_spans

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's increment, 2**64 divided by the golden ratio


@np.errstate(over="ignore")
def splitmix64(values: np.ndarray) -> np.ndarray:
  """Hashes each uint64 with splitmix64 (Steele et al. 2014), which serves as a random generator."""
  values = values + _GOLDEN
  values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return values ^ (values >> np.uint64(31))


def random_keys(*numbers: int | np.ndarray) -> np.ndarray:
  """Returns a uint64 key for each combination of the numbers; arrays are broadcast."""
  key = np.zeros((), np.uint64)
  for number in numbers:
    key = splitmix64(key ^ splitmix64(np.asarray(number).astype(np.uint64)))
  return key


def corrupt_spans(
  tokens_BL: np.ndarray,
  keys_B: np.ndarray,
  vocab_size: int,
  noise_density: float = 0.15,
  mean_span_length: float = 3.0,
) -> tuple[np.ndarray, np.ndarray]:
  """Drops random spans and returns the inputs and the targets, without end tokens.

  Args:
    tokens_BL: int32 tokens; the rows must have no padding.
    keys_B: one uint64 key for each row.
    vocab_size: size of the vocabulary, whose last ids are the sentinels, from `vocab_size - 1` down.
    noise_density: fraction of the tokens that is dropped.
    mean_span_length: mean number of tokens in a dropped span.
  """
  batch, length = tokens_BL.shape
  noise, spans = noise_and_spans(length, noise_density, mean_span_length)
  kept_BS = _random_parts(length - noise, spans, random_keys(keys_B, 0))
  dropped_BS = _random_parts(noise, spans, random_keys(keys_B, 1))
  lengths_BT = np.stack([kept_BS, dropped_BS], axis=-1).reshape(batch, -1)
  starts_BT = np.cumsum(lengths_BT, axis=1)[:, :-1]  # the starts of all spans but the first
  is_start_BL = np.zeros((batch, length), bool)
  is_start_BL[:, 0] = True
  is_start_BL[np.arange(batch)[:, None], starts_BT] = True
  span_BL = np.cumsum(is_start_BL, axis=1) - 1
  is_noise_BL = span_BL % 2 == 1
  sentinel_BL = vocab_size - 1 - span_BL // 2

  def keep(is_kept_BL: np.ndarray) -> np.ndarray:
    """Keeps the selected tokens and replaces each other span by one sentinel."""
    mixed_BL = np.where(is_kept_BL, tokens_BL, sentinel_BL).astype(np.int32)
    # The rows remain equally long, because all have the same numbers of spans and dropped tokens.
    return mixed_BL[is_kept_BL | is_start_BL].reshape(batch, -1)

  return keep(~is_noise_BL), keep(is_noise_BL)


def _random_parts(total: int, parts: int, keys_B: np.ndarray) -> np.ndarray:
  """Splits `total` into random positive integers [B, parts]; all splits are equally likely."""
  if parts == 1:
    return np.full((len(keys_B), 1), total)
  positions = np.arange(total - 1, dtype=np.uint64)
  draws = splitmix64(keys_B[:, None] + positions * _GOLDEN)
  cuts = np.sort(np.argpartition(draws, parts - 2, axis=1)[:, : parts - 1], axis=1) + 1
  return np.diff(cuts, axis=1, prepend=0, append=total)
