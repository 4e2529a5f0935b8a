"""Batches of prepared text: each a function of (seed, step), the same on any number of hosts.

Host h of n reads rows of the global batch; together they always have the whole of it. A position is
a step's number, so a run goes on at any step at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from absl import logging
from clu.data import dataset_iterator
from etils import epath

from rosetta_t5.data.prepared.batch_objectives import Objective
from rosetta_t5.data.prepared.corruption import keys_of
from rosetta_t5.data.prepared.example_order import InProportion, Schedule, Segments

HostBatch = dict[str, np.ndarray]


@dataclasses.dataclass
class Batches:
  """This host's rows of every batch.

  A source is a folder under an objective: UL2 makes seven of each folder.

  Attributes:
    segments: what each source is cut into.
    objectives: what becomes of each source's segments.
    schedule: from an example's number to its source.
    lengths: of "inputs" and "targets", or of "targets" alone.
    batch_size: rows of the global batch.
    rows: this host's of them.
    seed: of the objectives.
    pack: add segment ids and positions. (Every row is one segment already.)
    unreadable: examples that another had to stand for.
  """

  segments: Sequence[Segments]
  objectives: Sequence[Objective]
  schedule: Schedule
  lengths: Mapping[str, int]
  batch_size: int
  rows: range
  seed: int
  pack: bool
  unreadable: int = 0

  def __getitem__(self, step: int) -> HostBatch:
    """Returns the batch of a step."""
    return self.make([step * self.batch_size + row for row in self.rows])

  def one_epoch(self, most: int) -> OneEpoch:
    """Returns batches in order, at most `most`; rows after the last example are empty."""
    counts = [segments.count for segments in self.segments]
    return OneEpoch(self, InProportion(counts, most * self.batch_size))

  def epochs(self, step: int) -> dict[pathlib.Path, float]:
    """Returns how many times each folder was read when a step begins."""
    number = step * self.batch_size
    epochs: dict[pathlib.Path, float] = {}
    for source, segments in enumerate(self.segments):
      folder, passes = segments.stream.folder, self.schedule.before(number, source) / segments.count
      epochs[folder] = epochs.get(folder, 0.0) + passes
    return epochs

  def fingerprint(self) -> str:
    """Returns a digest of what a step's batch depends on, beside its shape and this host's rows."""
    facts = [
      [(segments.stream.digest, segments.seed) for segments in self.segments],
      [self.schedule.shares, self.seed, *self.objectives],
    ]
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()

  def measures(self, step: int) -> dict[str, float]:
    """Returns numbers for a run's metrics when a step begins: epochs by folder, what is damaged."""
    epochs = self.epochs(step)
    names = [folder.name for folder in epochs]
    if len(set(names)) < len(names):
      names = [f"{number}_{name}" for number, name in enumerate(names)]
    told = {f"data/epochs/{name}": n for name, n in zip(names, epochs.values(), strict=True)}
    return {**told, "data/unreadable": float(self.unreadable)} if self.unreadable else told

  def make(
    self, numbers: Sequence[int], schedule: Schedule | InProportion | None = None
  ) -> HostBatch:
    """Makes the rows of these examples; the rows of each source together."""
    places = [(schedule or self.schedule).place(number) for number in numbers]
    keys_B = keys_of(self.seed, np.array(numbers))
    features = {
      name: np.zeros((len(numbers), length), np.int32) for name, length in self.lengths.items()
    }
    for source, (segments, objective) in enumerate(
      zip(self.segments, self.objectives, strict=True)
    ):
      rows = [row for row, (of_row, _) in enumerate(places) if of_row == source]
      if not rows:
        continue
      tokens_BL = self._read(segments, [places[row][1] for row in rows])
      for name, values in objective.features(tokens_BL, keys_B[rows]).items():
        features[name][rows, : values.shape[1]] = values
    return self._model_features(features)

  def _read(self, segments: Segments, numbers: Sequence[int]) -> np.ndarray:
    """Reads segments of one source."""
    starts = [segments.start(number) for number in numbers]
    try:
      return segments.stream.read(starts, segments.length)
    except ValueError:
      return np.stack([self._read_or_replace(segments, number) for number in numbers])

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
    targets = features["targets"]
    is_real = (targets > 0).astype(np.int32)
    batch = {
      "decoder_target_tokens": targets,
      "decoder_input_tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
      "decoder_loss_weights": is_real,
    }
    marks = {"decoder": is_real}
    if "inputs" in features:
      batch["encoder_input_tokens"] = features["inputs"]
      marks["encoder"] = (features["inputs"] > 0).astype(np.int32)
    if self.pack:
      for side, real in marks.items():
        batch[f"{side}_segment_ids"] = real
        batch[f"{side}_positions"] = real * np.arange(real.shape[1], dtype=np.int32)
    return batch


@dataclasses.dataclass(frozen=True)
class OneEpoch:
  """An evaluation's batches, to be gone through again and again."""

  batches: Batches
  schedule: InProportion

  def __iter__(self) -> Iterator[HostBatch]:
    return (self.batch(step) for step in range(len(self)))

  def __len__(self) -> int:
    return -(-len(self.schedule) // self.batches.batch_size)

  def batch(self, step: int) -> HostBatch:
    """Returns a batch whose rows beyond the last example are empty."""
    first = step * self.batches.batch_size
    numbers = [first + row for row in self.batches.rows]
    last = len(self.schedule) - 1
    batch = self.batches.make([min(number, last) for number in numbers], self.schedule)
    for values in batch.values():
      values[[number > last for number in numbers]] = 0
    return batch


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

  is_shard_independent = True

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
