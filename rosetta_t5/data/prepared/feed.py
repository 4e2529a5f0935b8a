"""Batches of prepared text: each a function of (seed, step), the same on any number of hosts.

Host h of n reads rows of the global batch; together they always have the whole of it. A position is
a step's number, so a run goes on at any step at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from absl import logging
from clu.data import dataset_iterator
from etils import epath

from rosetta_t5.data.prepared.corruption import corrupt_spans, keys_of
from rosetta_t5.data.prepared.sampling import Schedule, Segments

_END = 1  # of T5's and our own vocabularies
HostBatch = dict[str, np.ndarray]


@dataclasses.dataclass
class Batches:
  """This host's rows of every batch.

  Attributes:
    segments: what each source is cut into.
    schedule: from an example's number to its source.
    lengths: of "inputs" and "targets", or of "targets" alone.
    vocab_size: with sentinels.
    batch_size: rows of the global batch.
    rows: this host's of them.
    seed: of the corruption.
    noise: density and mean span length; None gives plain targets for a decoder alone.
    pack: add segment ids and positions. (Every row is one full segment already.)
    unreadable: examples that another had to stand for.
  """

  segments: Sequence[Segments]
  schedule: Schedule
  lengths: Mapping[str, int]
  vocab_size: int
  batch_size: int
  rows: range
  seed: int
  noise: tuple[float, float] | None
  pack: bool
  unreadable: int = 0

  def __getitem__(self, step: int) -> HostBatch:
    """Returns the batch of a step."""
    return self._make([step * self.batch_size + row for row in self.rows])

  def one_epoch(self, most: int) -> OneEpoch:
    """Returns batches in order, at most `most`; rows after the last example are empty."""
    return OneEpoch(self, min(most, -(-self.examples // self.batch_size)))

  @property
  def examples(self) -> int:
    """Examples in one pass over all sources."""
    return sum(segments.count for segments in self.segments)

  def epochs(self, step: int) -> list[float]:
    """Returns how many times each source was read when a step begins."""
    number = step * self.batch_size
    return [
      self.schedule.before(number, source) / segments.count
      for source, segments in enumerate(self.segments)
    ]

  def fingerprint(self) -> str:
    """Returns a digest of what a step's batch depends on, beside its shape and this host's rows."""
    facts = [
      [[segments.stream.digest, segments.length, segments.seed] for segments in self.segments],
      self.schedule.shares,
      [self.seed, self.noise, self.vocab_size],
    ]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()

  def measures(self, step: int) -> dict[str, float]:
    """Returns numbers for a run's metrics when a step begins: epochs by folder, what is damaged."""
    folders = [segments.stream.folder for segments in self.segments]
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
      names = [f"{number}_{name}" for number, name in enumerate(names)]
    told = {f"data/epochs/{name}": n for name, n in zip(names, self.epochs(step), strict=True)}
    return {**told, "data/unreadable": float(self.unreadable)} if self.unreadable else told

  def last(self, step: int) -> HostBatch:
    """Returns a batch whose rows beyond the last example are empty."""
    numbers = [step * self.batch_size + row for row in self.rows]
    batch = self._make([min(number, self.examples - 1) for number in numbers])
    for values in batch.values():
      values[[number >= self.examples for number in numbers]] = 0
    return batch

  def _make(self, numbers: Sequence[int]) -> HostBatch:
    tokens_BL = self._read([self.schedule.place(number) for number in numbers])
    if self.noise is None:
      return self._model_features({"targets": tokens_BL})
    keys_B = keys_of(self.seed, np.array(numbers))
    inputs, targets = corrupt_spans(tokens_BL, keys_B, self.vocab_size, *self.noise)
    return self._model_features({"inputs": _ended(inputs), "targets": _ended(targets)})

  def _read(self, places: Sequence[tuple[int, int]]) -> np.ndarray:
    """Reads the segments of a batch, those of each source together."""
    tokens_BL = np.empty((len(places), self.segments[0].length), np.int32)
    for source, segments in enumerate(self.segments):
      rows = [row for row, (of_row, _) in enumerate(places) if of_row == source]
      numbers = [places[row][1] for row in rows]
      try:
        tokens_BL[rows] = segments.stream.read(
          [segments.start(n) for n in numbers], segments.length
        )
      except ValueError:
        for row, number in zip(rows, numbers, strict=True):
          tokens_BL[row] = self._read_or_replace(segments, number)
    return tokens_BL

  def _read_or_replace(self, segments: Segments, number: int) -> np.ndarray:
    """Reads a segment; where its shard is damaged, the next one that is not."""
    for instead in range(number, number + segments.count):
      try:
        return segments.stream.read([segments.start(instead)], segments.length)[0]
      except ValueError as error:
        self.unreadable += 1
        if self.unreadable & (self.unreadable - 1) == 0:  # each power of two
          logging.warning("Unreadable example %d is replaced: %s", self.unreadable, error)
    raise ValueError(f"Not one example of {segments.stream.folder} can be read: prepare it again")

  def _model_features(self, features: Mapping[str, np.ndarray]) -> HostBatch:
    """What SeqIO's feature converters would make of the task's features."""
    targets = _padded(features["targets"], self.lengths["targets"])
    is_real = (targets > 0).astype(np.int32)
    batch = {
      "decoder_target_tokens": targets,
      "decoder_input_tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
      "decoder_loss_weights": is_real,
    }
    marks = {"decoder": is_real}
    if "inputs" in features:
      inputs = _padded(features["inputs"], self.lengths["inputs"])
      batch["encoder_input_tokens"] = inputs
      marks["encoder"] = (inputs > 0).astype(np.int32)
    if self.pack:
      for side, real in marks.items():
        batch[f"{side}_segment_ids"] = real
        batch[f"{side}_positions"] = real * np.arange(real.shape[1], dtype=np.int32)
    return batch


@dataclasses.dataclass(frozen=True)
class OneEpoch:
  """An evaluation's batches, to be gone through again and again."""

  batches: Batches
  count: int

  def __iter__(self) -> Iterator[HostBatch]:
    return (self.batches.last(step) for step in range(self.count))

  def __len__(self) -> int:
    return self.count


@dataclasses.dataclass(frozen=True)
class _From:
  """A Grain source of batches that begins at a step."""

  batches: Batches
  first: int

  def __len__(self) -> int:
    return sys.maxsize

  def __getitem__(self, place: int) -> HostBatch:
    return self.batches[self.first + int(place)]


class PreparedIterator(dataset_iterator.DatasetIterator):
  """Batches in order, made ahead by Grain's threads or processes; the position is the step."""

  any_shards_position_will_do = True

  def __init__(self, batches: Batches, threads: int | None = None, workers: int = 0):
    """Args: batches: what is read; threads: that make batches ahead; workers: processes that do."""
    self.batches = batches
    self._threads = threads or 2
    self._workers = workers
    self._start(0)

  def _start(self, step: int) -> None:
    import grain

    self._step = step
    data = grain.MapDataset.source(_From(self.batches, step)).to_iter_dataset(
      grain.ReadOptions(num_threads=self._threads, prefetch_buffer_size=4 * self._threads)
    )
    if self._workers:
      data = data.mp_prefetch(grain.MultiprocessingOptions(num_workers=self._workers))
    self._iterator = iter(data)

  def __next__(self) -> HostBatch:
    batch = next(self._iterator)
    self._step += 1
    return batch

  def measures(self, step: int) -> dict[str, float]:
    """See `Batches`."""
    return self.batches.measures(step)

  def reset(self) -> None:
    """Goes back to the first batch."""
    self._start(0)

  @property
  def element_spec(self) -> dict[str, dataset_iterator.ArraySpec]:
    """Shapes and dtypes of a batch."""
    return {
      name: dataset_iterator.ArraySpec(value.dtype, value.shape)
      for name, value in self.batches[0].items()
    }

  def save(self, filename: epath.PathLike, steps_back: int = 0) -> None:
    """Writes the step, or that of some batches before."""
    state = {"step": self._step - steps_back, "data": self.batches.fingerprint()}
    epath.Path(filename).write_text(json.dumps(state))

  def restore(self, filename: epath.PathLike) -> None:
    """Goes on at a saved step; no batch before it is made.

    Raises:
      ValueError: it was saved among other batches, so it means other examples.
    """
    state = json.loads(epath.Path(filename).read_text())
    if state.get("data", self.batches.fingerprint()) != self.batches.fingerprint():
      raise ValueError("it is a step of other prepared folders, rates, objective or seed")
    self._start(int(state["step"]))


def _ended(tokens: np.ndarray) -> np.ndarray:
  return np.pad(tokens, ((0, 0), (0, 1)), constant_values=_END)


def _padded(tokens: np.ndarray, length: int) -> np.ndarray:
  return np.pad(tokens, ((0, 0), (0, length - tokens.shape[1])))
