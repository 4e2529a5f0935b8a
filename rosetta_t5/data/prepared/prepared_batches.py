"""Batches of prepared text: each is a function of the seed and the step, on any number of hosts.

Each host reads its rows of every global batch. A position in the data is the number of a step, so a
run can continue at any step without reading what came before it.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from clu.data import dataset_iterator
from etils import epath

from rosetta_t5.data.pipeline.batch_iterators import StepIndexedIterator
from rosetta_t5.data.prepared.batch_objectives import Objective
from rosetta_t5.data.prepared.corruption import random_keys
from rosetta_t5.data.prepared.example_order import ProportionalMixture, RateMixture, Segments
from rosetta_t5.data.prepared.token_stream import DamagedRecordError
from rosetta_t5.data.reading.files import digest_of, list_files

HostBatch = dict[str, np.ndarray]


@dataclasses.dataclass
class Batches:
  """This host's rows of every batch, as a sequence.

  A source is a pair of a folder and an objective. With UL2 each folder becomes seven sources.

  Attributes:
    segments: the segments of each source.
    objectives: the objective of each source.
    mixture: maps an example's number to its source and its index in that source.
    lengths: the lengths of "inputs" and "targets", or of "targets" alone.
    batch_size: number of rows in the global batch.
    rows: which of these rows this host reads.
    seed: the seed of the objectives' random choices.
    pack: whether to add segment ids and positions, although every row is a single segment.
    unreadable: the number of damaged examples that have been replaced so far.
  """

  segments: Sequence[Segments]
  objectives: Sequence[Objective]
  mixture: RateMixture | ProportionalMixture
  lengths: Mapping[str, int]
  batch_size: int
  rows: range
  seed: int
  pack: bool
  unreadable: int = 0

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

  def fingerprint(self) -> str:
    """Returns a digest of all that a batch depends on, except its shape and this host's rows."""
    assert isinstance(self.mixture, RateMixture)
    facts = [
      [(segments.stream.digest, segments.seed) for segments in self.segments],
      [self.mixture.shares, self.seed, *self.objectives],
    ]
    return digest_of([repr(facts).encode()])

  def describe_data(self) -> dict[str, Any]:
    """Returns what a batch depends on as JSON values; folders may be moved."""
    assert isinstance(self.mixture, RateMixture)
    streams = {str(segments.stream.folder): segments.stream for segments in self.segments}
    paths = [os.path.abspath(path) for path in streams]
    sizes, digests = ([s.size for s in streams.values()], [s.digest for s in streams.values()])
    return {
      "folders": list_files(paths, sizes, digests, is_movable=True),
      "shares": list(map(str, self.mixture.shares)),
      "objectives": list(map(str, self.objectives)),
    }

  def measures(self, step: int) -> dict[str, float]:
    """Returns metrics at the beginning of a step.

    "data/epochs/NAME" is how many times a folder has been read, "data/unreadable" the number of
    damaged examples.
    """
    assert isinstance(self.mixture, RateMixture)
    epochs: dict[pathlib.Path, float] = collections.defaultdict(float)
    for source, segments in enumerate(self.segments):
      examples = self.mixture.examples_before(step * self.batch_size, source)
      epochs[segments.stream.folder] += examples / segments.count
    names = [folder.name for folder in epochs]
    if len(set(names)) < len(names):
      names = [f"{number}_{name}" for number, name in enumerate(names)]
    measures = {f"data/epochs/{name}": n for name, n in zip(names, epochs.values(), strict=True)}
    if self.unreadable:
      measures["data/unreadable"] = float(self.unreadable)
    return measures

  def _task_features(self, numbers: Sequence[int]) -> HostBatch:
    """Returns the features of these examples, which are computed for each source at once."""
    sources, indices = zip(*map(self.mixture.locate, numbers), strict=True)
    keys_B = random_keys(self.seed, np.array(numbers))
    features = {
      name: np.zeros((len(numbers), length), np.int32) for name, length in self.lengths.items()
    }
    for source in sorted(set(sources)):
      rows = [row for row, row_source in enumerate(sources) if row_source == source]
      tokens_BL = self._read(self.segments[source], [indices[row] for row in rows])
      for name, values in self.objectives[source].features(tokens_BL, keys_B[rows]).items():
        features[name][rows, : values.shape[1]] = values
    return features

  def _read(self, segments: Segments, indices: Sequence[int]) -> np.ndarray:
    starts = [segments.start(index) for index in indices]
    try:
      return segments.stream.read(starts, segments.length)
    except DamagedRecordError:
      return np.stack([self._read_or_replace(segments, index) for index in indices])

  def _read_or_replace(self, segments: Segments, index: int) -> np.ndarray:
    """Reads a segment, or the first one after it that is not damaged."""
    for candidate in range(index, index + segments.count):
      try:
        return segments.stream.read([segments.start(candidate)], segments.length)[0]
      except DamagedRecordError as error:
        self.unreadable += 1
        if self.unreadable.bit_count() == 1:  # powers of two, so that the log remains short
          logging.warning("Unreadable example %d is replaced: %s", self.unreadable, error)
    raise ValueError(f"No example of {segments.stream.folder} can be read: prepare it again")

  def _model_features(self, features: HostBatch) -> HostBatch:
    """Converts the task's features to the model's, as SeqIO's feature converters do."""
    targets = features["targets"]
    is_token = {"decoder": (targets > 0).astype(np.int32)}
    batch = {
      "decoder_target_tokens": targets,
      "decoder_input_tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
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


class PreparedIterator(StepIndexedIterator):
  """Yields batches in order, prefetched by Grain's threads or processes; its position is the step."""

  def __init__(self, batches: Batches, threads: int | None, workers: int):
    """Starts at the first batch.

    Args:
      batches: the data.
      threads: number of Grain's threads for prefetching; None for 2.
      workers: number of Grain's processes for prefetching; 0 for none.
    """
    self.batches = batches
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

  def describe_data(self) -> dict[str, Any]:
    """Returns what the batches depend on; see `Batches.describe_data`."""
    return self.batches.describe_data()

  def measures(self, step: int) -> dict[str, float]:
    """Returns metrics at the beginning of a step; see `Batches.measures`."""
    return self.batches.measures(step)

  def reset(self) -> None:
    """Returns to the first batch."""
    self._start(0)

  @property
  def element_spec(self) -> dict[str, dataset_iterator.ArraySpec]:
    """Shapes and dtypes of a batch."""
    return {
      name: dataset_iterator.ArraySpec(value.dtype, value.shape)
      for name, value in self.batches[0].items()
    }

  def save(self, filename: epath.PathLike, steps_back: int = 0) -> None:
    """Writes the position: the step that is `steps_back` before the current one."""
    state = {"step": self._step - steps_back, "data": self.batches.fingerprint()}
    epath.Path(filename).write_text(json.dumps(state))

  def restore(self, filename: epath.PathLike) -> None:
    """Continues at a saved step, without making the batches before it.

    Raises:
      ValueError: the position was saved for other batches.
    """
    state = json.loads(epath.Path(filename).read_text())
    fingerprint = self.batches.fingerprint()
    if state.get("data", fingerprint) != fingerprint:
      raise ValueError("it is a step of other prepared folders, rates, objective or seed")
    self._start(int(state["step"]))
