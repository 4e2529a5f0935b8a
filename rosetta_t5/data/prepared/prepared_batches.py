"""Prepared folders as batches: each is a function of the seed and the step, on any number of hosts.

Each host reads its rows of every global batch. A position in the data is the number of a step, so a
run can continue at any step without reading what came before it. An example's number and the seed
determine its segment of a stream of tokens, in constant time.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from clu.data import dataset_iterator
from etils import epath

from rosetta_t5.data.prepared.shards import TokenStream
from rosetta_t5.data.reading.files import list_files

HostBatch = dict[str, np.ndarray]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's increment, 2**64 divided by the golden ratio
_WINDOW = 1000  # about so many consecutive examples, among which each source has exactly its share


@dataclasses.dataclass(frozen=True)
class BatchObjective:
  """Makes a task's features from segments of text.

  Attributes:
    length: number of tokens in a segment.
    description: the objective with its settings, which positions in the data contain.
    features: returns the features of (tokens [B, L], keys [B]), padded with zeros at the end.
  """

  length: int
  description: str
  features: Callable[[np.ndarray, np.ndarray], HostBatch]


@dataclasses.dataclass
class BatchSequence:
  """This host's rows of every batch.

  A source is a pair of a folder and an objective. With UL2 each folder becomes seven sources.

  Attributes:
    sources: the segments and the objective of each source.
    mixture: of each example the source and its index in that source.
    lengths: the lengths of "inputs" and "targets", or of "targets" alone.
    batch_size: number of rows in the global batch.
    rows: which of these rows this host reads.
    seed: the seed of the objectives' random choices.
    pack: whether to add segment ids and positions, although every row is a single segment.
    has_start: whether rows of a decoder begin with a start token. Otherwise their first token is read first
      and not predicted, as `TaskFeatureConverter` does.
  """

  sources: Sequence[tuple[Segments, BatchObjective]]
  mixture: RateMixture | Sequence[tuple[int, int]]
  lengths: Mapping[str, int]
  batch_size: int
  rows: range
  seed: int
  pack: bool
  has_start: bool = True

  def __len__(self) -> int:
    return -(-len(self.mixture) // self.batch_size)

  def __iter__(self) -> Iterator[HostBatch]:
    return (self[step] for step in range(len(self)))

  def __getitem__(self, step: int) -> HostBatch:
    """Returns the batch of a step; rows after the mixture's last example are empty."""
    numbers = [step * self.batch_size + row for row in self.rows]
    last = len(self.mixture) - 1
    batch = self._model_features(self._task_features([min(number, last) for number in numbers]))
    for values in batch.values():
      values[[number > last for number in numbers]] = 0
    return batch

  def describe_data(self) -> dict[str, Any]:
    """Returns what a batch depends on as JSON values; folders may be moved."""
    assert isinstance(self.mixture, RateMixture)
    streams = {str(segments.stream.folder): segments.stream for segments, _ in self.sources}
    sizes, digests = ([s.size for s in streams.values()], [s.digest for s in streams.values()])
    return {
      "folders": list_files(list(streams), sizes, digests, is_movable=True),
      "shares": list(map(str, self.mixture.shares)),
      "objectives": [objective.description for _, objective in self.sources],
    }

  def epochs(self, step: int) -> dict[str, float]:
    """Returns by folder's name how many times it has been read at the beginning of a step."""
    assert isinstance(self.mixture, RateMixture)
    epochs = defaultdict[pathlib.Path, float](float)
    for source, (segments, _) in enumerate(self.sources):
      examples = self.mixture.examples_before(step * self.batch_size, source)
      epochs[segments.stream.folder] += examples / segments.count
    names = [folder.name for folder in epochs]
    if len(set(names)) < len(names):
      names = [f"{number}_{name}" for number, name in enumerate(names)]
    return dict(zip(names, epochs.values(), strict=True))

  def _task_features(self, numbers: Sequence[int]) -> HostBatch:
    """Returns the features of these examples, which are computed for each source at once."""
    keys_B = random_keys(self.seed, np.array(numbers))
    rows_of = defaultdict[int, list[tuple[int, int]]](list)
    for row, (source, index) in enumerate(map(self.mixture.__getitem__, numbers)):
      rows_of[source].append((row, index))
    shapes = {name: (len(numbers), length) for name, length in self.lengths.items()}
    features = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}
    for source, found in rows_of.items():
      rows, (segments, objective) = [row for row, _ in found], self.sources[source]
      starts = [segments.start(index) for _, index in found]
      tokens_BL = segments.stream.read(starts, segments.length)
      for name, values in objective.features(tokens_BL, keys_B[rows]).items():
        features[name][rows, : values.shape[1]] = values
    return features

  def _model_features(self, features: HostBatch) -> HostBatch:
    """Converts the task's features to the model's, as SeqIO's feature converters do."""
    targets = features["targets"]
    read = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    if not self.has_start:
      targets, read = (np.pad(x[:, 1:], ((0, 0), (0, 1))) for x in (targets, read))
    is_token = {"decoder": (targets > 0).astype(np.int32)}
    batch = {
      "decoder_target_tokens": targets,
      "decoder_input_tokens": read,
      "decoder_loss_weights": is_token["decoder"],
    }
    if "inputs" in features:
      batch["encoder_input_tokens"] = features["inputs"]
      is_token["encoder"] = (features["inputs"] > 0).astype(np.int32)
    if self.pack:
      for side, ids in is_token.items():
        batch[f"{side}_segment_ids"] = ids
        batch[f"{side}_positions"] = ids * np.arange(ids.shape[1], dtype=np.int32)
    return batch


class PreparedIterator(dataset_iterator.DatasetIterator):
  """Yields batches in order, prefetched by Grain's threads or processes.

  Its position is the step, which any number of hosts can restore.
  """

  is_shard_independent = True

  def __init__(self, batches: BatchSequence, threads: int | None, workers: int):
    """Starts at the first batch.

    Args:
      batches: the data.
      threads: number of Grain's threads for prefetching; None for 2.
      workers: number of Grain's processes for prefetching; 0 for none.
    """
    self.batches = batches
    self.describe_data = batches.describe_data
    self._threads = threads or 2
    self._workers = workers
    self.reset()

  def _start(self, step: int) -> None:
    import grain

    self._step = step
    batches = grain.MapDataset.range(step, sys.maxsize).map(self.batches.__getitem__)
    options = grain.ReadOptions(self._threads, prefetch_buffer_size=4 * self._threads)
    data = batches.to_iter_dataset(options)
    if self._workers:
      data = data.mp_prefetch(grain.MultiprocessingOptions(num_workers=self._workers))
    self._iterator = iter(data)

  def __next__(self) -> HostBatch:
    batch = next(self._iterator)
    self._step += 1
    return batch

  def reset(self) -> None:
    """Returns to the first batch."""
    self._start(0)

  @property
  def element_spec(self) -> dict[str, dataset_iterator.ArraySpec]:
    """Shapes and dtypes of a batch."""
    first = self.batches[0].items()
    return {name: dataset_iterator.ArraySpec(x.dtype, x.shape) for name, x in first}

  def save(self, filename: epath.PathLike, steps_back: int = 0) -> None:
    """Writes the position: the step that is `steps_back` before the current one."""
    epath.Path(filename).write_text(json.dumps({"step": self._step - steps_back}))

  def restore(self, filename: epath.PathLike) -> None:
    """Continues at a saved step, without making the batches before it."""
    self._start(int(json.loads(epath.Path(filename).read_text())["step"]))


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
  """Draws examples endlessly from several sources; each has its exact share of every 1000 or so examples.

  Attributes:
    shares: each source's number of examples among these, at least 1.
  """

  def __init__(self, rates: Sequence[float], seed: int):
    """Builds a mixture.

    Args:
      rates: the sources' rates above 0, in any unit.
      seed: determines the order of the sources.
    """
    exact = np.asarray(rates, np.float64) / math.fsum(rates) * _WINDOW
    self.shares = np.maximum(np.rint(exact).astype(int), 1).tolist()
    self._window, self._seed = sum(self.shares), seed
    self._sources, self._ranks = _sources_and_ranks(self.shares)

  def __len__(self) -> int:
    return sys.maxsize

  def __getitem__(self, number: int) -> tuple[int, int]:
    """Returns the source of example `number`, and the example's index in that source."""
    if len(self.shares) == 1:
      return 0, number
    window, index = divmod(number, self._window)
    index = _shuffle(index, self._window, random_keys(self._seed, window, 3))
    source = int(self._sources[index])
    return source, window * self.shares[source] + int(self._ranks[index])

  def examples_before(self, number: int, source: int) -> float:
    """Returns how many of a source's examples precede `number`, to within one window's share."""
    return number * self.shares[source] / self._window


def proportional_mixture(counts: Sequence[int], limit: int) -> list[tuple[int, int]]:
  """Returns the source and the index of each example of several sources once, for evaluation.

  The sources are mixed evenly, and the examples of each source are in order.

  Args:
    counts: each source's number of examples.
    limit: the largest number of examples.
  """
  total = min(limit, sum(counts))
  # Among the first `total` examples no source exceeds its proportion by more than one.
  parts = [min(count, total * count // sum(counts) + 1) for count in counts]
  sources, ranks = _sources_and_ranks(parts)
  order = np.lexsort((sources, (ranks + 0.5) / np.asarray(counts)[sources]))[:total]
  return list(zip(sources[order].tolist(), ranks[order].tolist(), strict=True))


def _sources_and_ranks(counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
  """Returns two arrays: each example's source, and its index in that source."""
  ranks = [np.arange(count) for count in counts]
  return np.repeat(np.arange(len(counts)), counts), np.concatenate(ranks)


def _shuffle(index: int, count: int, key: np.ndarray) -> int:
  """Returns the image of `index` under a random permutation of range(count)."""
  from grain.experimental import index_shuffle

  return index_shuffle(index, count - 1, int(key) % (1 << 32), 4)


@np.errstate(over="ignore")
def splitmix64(values: np.ndarray) -> np.ndarray:
  """Hashes each uint64 with splitmix64 (Steele et al. 2014), which serves as a random generator."""
  values = values + GOLDEN
  values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return values ^ (values >> np.uint64(31))


def random_keys(*numbers: int | np.ndarray) -> np.ndarray:
  """Returns a uint64 key for each combination of the numbers; arrays are broadcast."""
  key = np.zeros((), np.uint64)
  for number in numbers:
    key = splitmix64(key ^ splitmix64(np.asarray(number).astype(np.uint64)))
  return key
