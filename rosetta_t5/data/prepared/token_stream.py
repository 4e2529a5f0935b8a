"""The tokens of prepared splits, as long streams with random access, and the order in which they are read.

An example's number and the seed determine its segment of a stream, in constant time.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import pathlib
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rosetta_t5 import manifest as file_manifest
from rosetta_t5.data.prepared.batch_objectives import random_keys
from rosetta_t5.data.prepared.shard_job import MANIFEST, VOCABULARY, token_type
from rosetta_t5.data.vocabularies.sentencepiece_models import load_sentencepiece
from rosetta_t5.files import read_json_object

_WINDOW = 1000  # number of consecutive examples among which each source has exactly its share


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns the manifest of a prepared folder.

  Raises:
    ValueError: the folder has no manifest, because it is incomplete or is not prepared data; or the
      manifest is damaged.
  """
  path = pathlib.Path(folder) / MANIFEST
  if path.exists():
    file_manifest.verify(folder, {MANIFEST}.__contains__)
    return read_json_object(path)
  done = len(list(path.parent.glob("shards/*.json")))
  state = f"only {done} shards are complete" if done else "the folder is not prepared data"
  raise ValueError(
    f"There is no {path}: {state}. Prepare it: rosetta-t5 prepare --input FILES --vocab MODEL "
    f"--out {folder}"
  )


def losses_of_folders(folders: Iterable[str | os.PathLike[str]]) -> collections.Counter[str]:
  """Returns what texts lost when the folders were prepared; older folders do not say it. See `count_lost`."""
  losses = (collections.Counter(read_manifest(folder).get("losses", {})) for folder in folders)
  return sum(losses, collections.Counter())


class TokenStream:
  """All tokens of a split, one document after the other.

  Attributes:
    folder: the prepared folder.
    manifest: the folder's manifest.
    size: number of tokens.
    digest: a hash of all tokens.
  """

  def __init__(self, folder: str | os.PathLike[str], split: str):
    """Reads the manifest; shards and their indices are opened when they are needed.

    Raises:
      ValueError: the folder is not prepared data or lacks the split; or a shard is missing, or its
        size differs from the manifest.
    """
    self.folder = pathlib.Path(folder)
    self._split = split
    self.manifest = read_manifest(folder)
    file_manifest.verify(folder)
    splits = {name: entry["shards"] for name, entry in self.manifest["splits"].items()}
    shards = splits.get(split)
    if not shards:
      existing = ", ".join(repr(name) for name in splits if splits[name])
      raise ValueError(f"{folder} has no split '{split}'; it has {existing}")
    dtype = token_type(self.manifest["vocabulary"]["pieces"])
    self._shards = [_Shard(self.folder, dtype, shard) for shard in shards]
    self._starts = np.cumsum([0, *(shard["tokens"] for shard in shards)])
    self.size = int(self._starts[-1])
    digests = "".join(shard["sha256_of_tokens"] for shard in shards)
    self.digest = hashlib.sha256(digests.encode()).hexdigest()

  def __reduce__(self) -> Any:
    """Makes another process that receives the stream open the files itself."""
    return TokenStream, (self.folder, self._split)

  @property
  def vocabulary(self) -> str:
    """The path of the vocabulary with which the folder was prepared."""
    return str(self.folder / VOCABULARY)

  def encode(self, text: str) -> list[int]:
    """Tokenizes a text with the vocabulary."""
    return load_sentencepiece(self.vocabulary).encode(text)

  def read(self, starts: Sequence[int], count: int) -> np.ndarray:
    """Returns `count` tokens from each start on, as int32 [len(starts), count].

    Raises:
      ValueError: a record is damaged.
    """
    rows = [list(self._parts(start, count)) for start in starts]
    wanted: dict[int, set[int]] = collections.defaultdict(set)
    for shard, records, _ in itertools.chain.from_iterable(rows):
      wanted[shard].update(records)
    tokens = {shard: self._shards[shard].read(sorted(records)) for shard, records in wanted.items()}

    def join(shard: int, records: range, part: slice) -> np.ndarray:
      return np.concatenate([tokens[shard][record] for record in records])[part]

    joined = [np.concatenate([join(*part) for part in parts]) for parts in rows]
    return np.stack(joined).astype(np.int32)

  def _parts(self, start: int, count: int) -> Iterator[tuple[int, range, slice]]:
    """Yields where `count` tokens are stored: in each shard the records, and the slice of these."""
    while count > 0:
      shard = int(np.searchsorted(self._starts, start, side="right")) - 1
      ends = self._shards[shard].ends
      offset = start - int(self._starts[shard])
      size = min(count, int(self._starts[shard + 1]) - start)
      first, last = np.searchsorted(ends, [offset + 1, offset + size])
      skip = offset - int(ends[first - 1])
      yield shard, range(int(first) - 1, int(last)), slice(skip, skip + size)
      start, count = start + size, count - size


class _Shard:
  """An ArrayRecord file of tokens with its index; both are opened when they are first needed."""

  def __init__(self, folder: pathlib.Path, dtype: np.dtype, entry: Mapping[str, Any]):
    self._path, self._dtype, size = folder / entry["file"], dtype, entry["bytes"]
    if not self._path.exists():
      raise ValueError(_damaged_text(self._path, "it is missing"))
    if (found := self._path.stat().st_size) != size:
      raise ValueError(_damaged_text(self._path, f"{found} bytes instead of {size}"))
    self._lock = threading.Lock()

  @functools.cached_property
  def ends(self) -> np.ndarray:
    """0, and the position in the shard's tokens at which each record ends; mapped into memory."""
    return np.load(self._path.with_suffix(".ends.npy"), mmap_mode="r")

  @functools.cached_property
  def _reader(self) -> Any:
    from array_record.python import array_record_module

    options = "readahead_buffer_size:0,max_parallelism:0"
    return array_record_module.ArrayRecordReader(str(self._path), options)

  def read(self, numbers: Sequence[int]) -> dict[int, np.ndarray]:
    """Reads several records in one call of the reader, which is much faster than one by one."""
    try:
      with self._lock:  # The reader is not thread-safe, because it has a position.
        records = self._reader.read(list(numbers))
    except (RuntimeError, ValueError, IndexError) as error:
      reason = str(error).splitlines()[0][:200]
      raise ValueError(_damaged_text(self._path, reason)) from error
    return {n: np.frombuffer(r, self._dtype) for n, r in zip(numbers, records, strict=True)}


def _damaged_text(path: pathlib.Path, reason: str) -> str:
  return (
    f"The prepared shard {path} is damaged ({reason}). To repair it, delete the file and repeat the "
    "command that prepared it; the other shards are kept."
  )


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
