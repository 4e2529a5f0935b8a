"""Span corruption of a whole batch at once, in numpy; each row depends on its own key alone.

The distribution is T5's (Raffel et al. 2020, section 3.3.4), as in `span_corruption`, not its draws.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: np.ndarray) -> np.ndarray:
  """Returns splitmix64 of each uint64 (Steele et al. 2014): numbers that look independent."""
  with np.errstate(over="ignore"):
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return values ^ (values >> np.uint64(31))


def keys_of(*numbers: int | np.ndarray) -> np.ndarray:
  """Returns a key for each combination of numbers; arrays among them are broadcast."""
  key = np.asarray(np.uint64(0))
  for number in numbers:
    key = mix(key ^ mix(np.asarray(number).astype(np.uint64)))
  return np.asarray(key)


def noise_and_spans(length: int, noise_density: float, mean_span_length: float) -> tuple[int, int]:
  """Returns how many tokens of a row are dropped, in how many spans; at least one of each."""
  noise = min(max(round(length * noise_density), 1), length - 1)
  return noise, max(round(noise / mean_span_length), 1)


def corrupt_spans(
  tokens_BL: np.ndarray,
  keys_B: np.ndarray,
  vocab_size: int,
  noise_density: float = 0.15,
  mean_span_length: float = 3.0,
) -> tuple[np.ndarray, np.ndarray]:
  """Drops random spans: returns inputs and targets, without end tokens.

  Args:
    tokens_BL: int32; all rows are full.
    keys_B: uint64, one a row.
    vocab_size: sentinels are the ids from the last one down.
    noise_density: part of the tokens that is dropped.
    mean_span_length: tokens of a dropped span, on average.
  """
  batch, length = tokens_BL.shape
  noise, spans = noise_and_spans(length, noise_density, mean_span_length)
  parts_BS2 = np.stack(
    [
      _random_parts(length - noise, spans, keys_of(keys_B, 0)),
      _random_parts(noise, spans, keys_of(keys_B, 1)),
    ],
    axis=-1,
  )
  starts_BT = np.cumsum(parts_BS2.reshape(batch, -1), axis=1)[:, :-1]  # of all spans but the first
  rows_B1 = np.arange(batch)[:, None]
  is_start_BL = np.zeros((batch, length), bool)
  is_start_BL[:, 0] = True
  is_start_BL[rows_B1, starts_BT] = True
  span_BL = np.cumsum(is_start_BL, axis=1) - 1
  is_noise_BL = span_BL % 2 == 1
  sentinel_BL = vocab_size - 1 - span_BL // 2
  inputs = _one_side(tokens_BL, sentinel_BL, ~is_noise_BL, is_start_BL)
  return inputs, _one_side(tokens_BL, sentinel_BL, is_noise_BL, is_start_BL)


def _one_side(
  tokens_BL: np.ndarray, sentinel_BL: np.ndarray, is_own_BL: np.ndarray, is_start_BL: np.ndarray
) -> np.ndarray:
  """Keeps a side's own tokens, and a sentinel for each span of the other's."""
  mixed_BL = np.where(is_own_BL, tokens_BL, sentinel_BL).astype(np.int32)
  # All rows keep the same number, for they have the same numbers of spans and of dropped tokens.
  return mixed_BL[is_own_BL | is_start_BL].reshape(len(tokens_BL), -1)


def _random_parts(total: int, parts: int, keys_B: np.ndarray) -> np.ndarray:
  """Cuts `total` into `parts` positive numbers [B, parts]; all ways are equally likely."""
  places = np.arange(total - 1, dtype=np.uint64)
  with np.errstate(over="ignore"):
    draws = mix(keys_B[:, None] + places * _GOLDEN)
  batch = len(keys_B)
  if parts == 1:
    return np.full((batch, 1), total)
  cuts = np.sort(np.argpartition(draws, parts - 2, axis=1)[:, : parts - 1], axis=1) + 1
  edges = np.concatenate(
    [np.zeros((batch, 1), cuts.dtype), cuts, np.full((batch, 1), total, cuts.dtype)], axis=1
  )
  return np.diff(edges, axis=1)
