"""Which piece of which text is the n-th example: a function of n and the seed, in constant time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from rosetta_t5.data.prepared.corruption import keys_of
from rosetta_t5.data.prepared.token_stream import TokenStream

_WINDOW = 1000  # examples in which each source has exactly its share


@dataclasses.dataclass(frozen=True)
class Segments:
  """A stream cut into segments of one length, in another order and from another start each epoch.

  Attributes:
    stream: the tokens.
    length: of a segment.
    seed: of order and start.
    shuffle: without it segments come in order, from the first token.
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
    """Segments in an epoch. One fewer than there is room for, to start anywhere in the first."""
    return max(1, self.stream.size // self.length - self.shuffle)

  def start(self, number: int) -> int:
    """Returns where the `number`-th segment of an endless succession of epochs begins."""
    epoch, index = divmod(number, self.count)
    if not self.shuffle:
      return index * self.length
    room = self.stream.size - self.count * self.length
    offset = int(keys_of(self.seed, epoch, 1)) % min(room + 1, self.length)
    index = _shuffled(index, self.count, int(keys_of(self.seed, epoch, 2)))
    return offset + index * self.length


def _shuffled(index: int, count: int, seed: int) -> int:
  from grain.experimental import index_shuffle

  return index_shuffle(index, count - 1, seed % (1 << 32), 4)


class Schedule:
  """From an example's number to (source, its number there), so that rates hold in every window."""

  def __init__(self, rates: Sequence[float], seed: int):
    """Args: rates: of the sources, in any unit; seed: of the order within a window."""
    if not rates or min(rates) <= 0:
      raise ValueError(f"prepared_task.rates = {list(rates)}: each source needs a rate above 0")
    self._shares = _whole_shares(rates, _WINDOW)
    self._seed = seed
    self._sources = np.repeat(np.arange(len(rates)), self._shares)
    self._ranks = np.concatenate([np.arange(share) for share in self._shares])

  @property
  def shares(self) -> list[int]:
    """Each source's examples in a window of a thousand."""
    return [int(share) for share in self._shares]

  def place(self, number: int) -> tuple[int, int]:
    """Returns the source of an example, and how many of that source come before it."""
    if len(self._shares) == 1:
      return 0, number
    window, place = divmod(number, _WINDOW)
    place = _shuffled(place, _WINDOW, int(keys_of(self._seed, window, 3)))
    source = int(self._sources[place])
    return source, window * int(self._shares[source]) + int(self._ranks[place])

  def before(self, number: int, source: int) -> float:
    """Returns how many of a source's examples come before one, to within a window's share."""
    return number * self._shares[source] / self._shares.sum()


class InProportion:
  """Every example of the sources once, theirs in order, mixed evenly: for evaluation."""

  def __init__(self, counts: Sequence[int], most: int):
    """Args: counts: examples of each source; most: how many are wanted in all."""
    wanted = min(most, sum(counts))
    # No source has more than its part among the first ones, but for one.
    parts = [min(count, wanted * count // sum(counts) + 1) for count in counts]
    sources = np.repeat(np.arange(len(counts)), parts)
    ranks = np.concatenate([np.arange(part) for part in parts])
    order = np.lexsort((sources, (ranks + 0.5) / np.asarray(counts)[sources]))[:wanted]
    self._sources, self._ranks = sources[order], ranks[order]

  def __len__(self) -> int:
    return len(self._ranks)

  def place(self, number: int) -> tuple[int, int]:
    """Returns the source of an example, and how many of that source come before it."""
    return int(self._sources[number]), int(self._ranks[number])


def _whole_shares(rates: Sequence[float], total: int) -> np.ndarray:
  """Shares of `total` by largest remainder, none of them 0."""
  exact = np.asarray(rates, np.float64) / math.fsum(rates) * total
  shares = np.maximum(np.floor(exact).astype(int), 1)
  for source in np.argsort(exact - shares)[::-1]:
    if shares.sum() >= total:
      break
    shares[source] += 1
  while shares.sum() > total:
    shares[np.argmax(shares)] -= 1
  return shares
