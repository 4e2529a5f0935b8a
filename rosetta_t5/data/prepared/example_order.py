"""Maps an example's number and the seed to a segment of a token stream, in constant time."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence

import numpy as np

from rosetta_t5.data.prepared.corruption import random_keys
from rosetta_t5.data.prepared.token_stream import TokenStream

_WINDOW = 1000  # number of consecutive examples among which each source has exactly its share


@dataclasses.dataclass(frozen=True)
class Segments:
  """A token stream that is cut into segments of equal length, differently in each epoch.

  Attributes:
    stream: the tokens.
    length: number of tokens in a segment.
    seed: determines the order of the segments, and the token at which the first one starts.
    shuffle: False keeps the segments in order; the first one starts at the first token.
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
    """The number of segments in an epoch.

    With shuffling it is one fewer than the stream could hold, so that the first start can vary.
    """
    return max(1, self.stream.size // self.length - self.shuffle)

  def start(self, number: int) -> int:
    """Returns the position of the first token of segment `number`, counted over all epochs."""
    epoch, index = divmod(number, self.count)
    if not self.shuffle:
      return index * self.length
    spare = self.stream.size - self.count * self.length
    offset = int(random_keys(self.seed, epoch, 1)) % min(spare + 1, self.length)
    return offset + _shuffle(index, self.count, random_keys(self.seed, epoch, 2)) * self.length


class RateMixture:
  """Draws examples endlessly from several sources; each has its exact share of every 1000 examples.

  Attributes:
    shares: each source's number of examples among 1000.
  """

  def __init__(self, rates: Sequence[float], seed: int):
    """Builds a mixture.

    Args:
      rates: the sources' rates, in any unit.
      seed: determines the order of the sources.

    Raises:
      ValueError: a rate is not positive.
    """
    if not rates or min(rates) <= 0:
      raise ValueError(f"prepared_task.rates must be one rate above 0 for each source, got {rates}")
    self.shares = _integer_shares(rates, _WINDOW)
    self._seed = seed
    self._sources, self._ranks = _sources_and_ranks(self.shares)

  def __len__(self) -> int:
    return sys.maxsize

  def locate(self, number: int) -> tuple[int, int]:
    """Returns the source of example `number`, and the example's index in that source."""
    if len(self.shares) == 1:
      return 0, number
    window, index = divmod(number, _WINDOW)
    index = _shuffle(index, _WINDOW, random_keys(self._seed, window, 3))
    source = int(self._sources[index])
    return source, window * self.shares[source] + int(self._ranks[index])

  def examples_before(self, number: int, source: int) -> float:
    """Returns how many of a source's examples precede `number`, to within one window's share."""
    return number * self.shares[source] / _WINDOW


class ProportionalMixture:
  """Draws each example of several sources once, for evaluation.

  The sources are mixed evenly, and the examples of each source are in order.
  """

  def __init__(self, counts: Sequence[int], limit: int):
    """Builds a mixture.

    Args:
      counts: each source's number of examples.
      limit: the largest number of examples to draw.
    """
    total = min(limit, sum(counts))
    # Among the first `total` examples no source exceeds its proportion by more than one.
    parts = [min(count, total * count // sum(counts) + 1) for count in counts]
    sources, ranks = _sources_and_ranks(parts)
    order = np.lexsort((sources, (ranks + 0.5) / np.asarray(counts)[sources]))[:total]
    self._sources, self._ranks = sources[order], ranks[order]

  def __len__(self) -> int:
    return len(self._ranks)

  def locate(self, number: int) -> tuple[int, int]:
    """Returns the source of example `number`, and the example's index in that source."""
    return int(self._sources[number]), int(self._ranks[number])


def _sources_and_ranks(counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
  """Returns two arrays: each example's source, and its index in that source."""
  ranks = [np.arange(count) for count in counts]
  return np.repeat(np.arange(len(counts)), counts), np.concatenate(ranks)


def _shuffle(index: int, count: int, key: np.ndarray) -> int:
  """Returns the image of `index` under a random permutation of range(count)."""
  from grain.experimental import index_shuffle

  return index_shuffle(index, count - 1, int(key) % (1 << 32), 4)


def _integer_shares(rates: Sequence[float], total: int) -> list[int]:
  """Distributes `total` by the largest-remainder method; every share is at least 1."""
  exact = np.asarray(rates, np.float64) / math.fsum(rates) * total
  shares = np.maximum(np.floor(exact).astype(int), 1)
  missing = max(total - shares.sum(), 0)
  shares[np.argsort(exact - shares)[::-1][:missing]] += 1
  while shares.sum() > total:
    shares[np.argmax(shares)] -= 1
  return shares.tolist()
