"""Which segment of which text is example n: a function of n and the seed, in constant time."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence

import numpy as np

from rosetta_t5.data.prepared.corruption import random_keys
from rosetta_t5.data.prepared.token_stream import TokenStream

_WINDOW = 1000  # number of consecutive examples in which each source has exactly its share


@dataclasses.dataclass(frozen=True)
class Segments:
  """A token stream cut into segments of equal length; each epoch has its own order and first cut.

  Attributes:
    stream: the tokens.
    length: tokens of a segment.
    seed: determines the order and the first cut.
    shuffle: False keeps the segments in order, from the first token on.
  """

  stream: TokenStream
  length: int
  seed: int
  shuffle: bool

  def __post_init__(self) -> None:
    if self.stream.size < self.length:
      raise ValueError(
        f"{self.stream.folder} has {self.stream.size} tokens, fewer than the {self.length} of one "
        "example: prepare more text, or set smaller TASK_FEATURE_LENGTHS"
      )

  @property
  def count(self) -> int:
    """Segments in an epoch; with shuffling one fewer than fit, so that the first cut can vary."""
    return max(1, self.stream.size // self.length - self.shuffle)

  def start(self, number: int) -> int:
    """Returns the first token of segment `number`, counted over all epochs."""
    epoch, index = divmod(number, self.count)
    if not self.shuffle:
      return index * self.length
    spare = self.stream.size - self.count * self.length
    offset = int(random_keys(self.seed, epoch, 1)) % min(spare + 1, self.length)
    return offset + _shuffle(index, self.count, random_keys(self.seed, epoch, 2)) * self.length


class RateMixture:
  """Draws from sources without end, at fixed rates in every window of a thousand examples."""

  def __init__(self, rates: Sequence[float], seed: int):
    """Args: rates: of the sources, in any unit; seed: of the order within a window."""
    if not rates or min(rates) <= 0:
      raise ValueError(f"prepared_task.rates must be one rate above 0 for each source, got {rates}")
    self._shares = _integer_shares(rates, _WINDOW)
    self._seed = seed
    self._sources = np.repeat(np.arange(len(rates)), self._shares)
    self._ranks = np.concatenate([np.arange(share) for share in self._shares])

  def __len__(self) -> int:
    return sys.maxsize

  @property
  def shares(self) -> list[int]:
    """Each source's number of examples in a window."""
    return self._shares.tolist()

  def locate(self, number: int) -> tuple[int, int]:
    """Returns the source of example `number`, and the example's index in that source."""
    if len(self._shares) == 1:
      return 0, number
    window, index = divmod(number, _WINDOW)
    index = _shuffle(index, _WINDOW, random_keys(self._seed, window, 3))
    source = int(self._sources[index])
    return source, window * int(self._shares[source]) + int(self._ranks[index])

  def examples_before(self, number: int, source: int) -> float:
    """Returns how many of a source's examples precede `number`, to within one window's share."""
    return number * self._shares[source] / self._shares.sum()


class ProportionalMixture:
  """Draws every example of the sources once, each source's in order, evenly mixed: for evaluation."""

  def __init__(self, counts: Sequence[int], limit: int):
    """Args: counts: number of examples of each source; limit: examples to draw at most."""
    total = min(limit, sum(counts))
    # Among the first `total` examples no source exceeds its proportion by more than one.
    parts = [min(count, total * count // sum(counts) + 1) for count in counts]
    sources = np.repeat(np.arange(len(counts)), parts)
    ranks = np.concatenate([np.arange(part) for part in parts])
    order = np.lexsort((sources, (ranks + 0.5) / np.asarray(counts)[sources]))[:total]
    self._sources, self._ranks = sources[order], ranks[order]

  def __len__(self) -> int:
    return len(self._ranks)

  def locate(self, number: int) -> tuple[int, int]:
    """Returns the source of example `number`, and the example's index in that source."""
    return int(self._sources[number]), int(self._ranks[number])


def _shuffle(index: int, count: int, key: np.ndarray) -> int:
  """Returns the image of `index` under a random permutation of range(count)."""
  from grain.experimental import index_shuffle

  return index_shuffle(index, count - 1, int(key) % (1 << 32), 4)


def _integer_shares(rates: Sequence[float], total: int) -> np.ndarray:
  """Distributes `total` by the largest-remainder method; every share is at least 1."""
  exact = np.asarray(rates, np.float64) / math.fsum(rates) * total
  shares = np.maximum(np.floor(exact).astype(int), 1)
  for source in np.argsort(exact - shares)[::-1]:
    if shares.sum() >= total:
      break
    shares[source] += 1
  while shares.sum() > total:
    shares[np.argmax(shares)] -= 1
  return shares
