"""Prepared folders as the data of a run: each batch is a function of the seed and the step, on any number of hosts.

Each host reads its rows of every global batch. A position in the data is the number of a step, so a
run can continue at any step without reading what came before it.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from clu.data import dataset_iterator
from etils import epath

from rosetta_t5.argument_types import NonNegative, PositiveNumber, Rate, check_one_of, one_of
from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.prepared.batch_objectives import (
  OBJECTIVES,
  BatchObjective,
  make_objectives,
  random_keys,
)
from rosetta_t5.data.prepared.token_stream import (
  ProportionalMixture,
  RateMixture,
  Segments,
  TokenStream,
  read_manifest,
)
from rosetta_t5.data.reading.files import list_files
from rosetta_t5.data.tensorflow_import import seqio

EPOCHS = "data/epochs/"  # before a folder's name, in the names of metrics
HostBatch = dict[str, np.ndarray]
Objective = Annotated[str, one_of(OBJECTIVES)]


@dataclasses.dataclass
class BatchSequence:
  """This host's rows of every batch.

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
  """

  segments: Sequence[Segments]
  objectives: Sequence[BatchObjective]
  mixture: RateMixture | ProportionalMixture
  lengths: Mapping[str, int]
  batch_size: int
  rows: range
  seed: int
  pack: bool

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
    streams = {str(segments.stream.folder): segments.stream for segments in self.segments}
    sizes, digests = ([s.size for s in streams.values()], [s.digest for s in streams.values()])
    return {
      "folders": list_files(list(streams), sizes, digests, is_movable=True),
      "shares": list(map(str, self.mixture.shares)),
      "objectives": [objective.description for objective in self.objectives],
    }

  def measures(self, step: int) -> dict[str, float]:
    """Returns {"data/epochs/NAME": how many times a folder has been read at the beginning of a step}."""
    assert isinstance(self.mixture, RateMixture)
    epochs: dict[pathlib.Path, float] = collections.defaultdict(float)
    for source, segments in enumerate(self.segments):
      examples = self.mixture.examples_before(step * self.batch_size, source)
      epochs[segments.stream.folder] += examples / segments.count
    names = [folder.name for folder in epochs]
    if len(set(names)) < len(names):
      names = [f"{number}_{name}" for number, name in enumerate(names)]
    return {f"{EPOCHS}{name}": n for name, n in zip(names, epochs.values(), strict=True)}

  def _task_features(self, numbers: Sequence[int]) -> HostBatch:
    """Returns the features of these examples, which are computed for each source at once."""
    sources, indices = zip(*map(self.mixture.locate, numbers), strict=True)
    keys_B = random_keys(self.seed, np.array(numbers))
    features = {
      name: np.zeros((len(numbers), length), np.int32) for name, length in self.lengths.items()
    }
    for source in sorted(set(sources)):
      rows = [row for row, row_source in enumerate(sources) if row_source == source]
      segments = self.segments[source]
      starts = [segments.start(indices[row]) for row in rows]
      tokens_BL = segments.stream.read(starts, segments.length)
      for name, values in self.objectives[source].features(tokens_BL, keys_B[rows]).items():
        features[name][rows, : values.shape[1]] = values
    return features

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
    self.describe_data, self.measures = batches.describe_data, batches.measures
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
class PreparedTask:
  """Takes the place of a SeqIO task in `DatasetConfig.mixture_or_task_name`.

  Attributes:
    folders: folders that `rosetta-t5 prepare` wrote.
    objective: "span_corruption", "prefix_lm", "ul2", or "causal_lm" for decoder-only models.
    rates: how often each folder is drawn from; None draws from all tokens equally often.
    extra_ids: number of sentinels above the vocabulary's pieces.
    name: the task's name in logs and metrics.
    noise_density: fraction of the tokens that span_corruption drops.
    mean_span_length: mean number of tokens in a span that span_corruption drops.
  """

  folders: tuple[str, ...]
  objective: str = "span_corruption"
  rates: tuple[float, ...] | None = None
  extra_ids: NonNegative = 100
  name: str = "prepared"
  noise_density: Rate = 0.15
  mean_span_length: PositiveNumber = 3.0

  def __post_init__(self) -> None:
    check_one_of("prepared_task.objective", self.objective, OBJECTIVES)
    if self.rates is not None and len(self.rates) != len(self.folders):
      raise ValueError(
        "prepared_task must have one rate for each folder, got "
        f"{len(self.folders)} folders and {len(self.rates)} rates"
      )
    digests = {read_manifest(f)["vocabulary"]["sha256"]: f for f in self.folders}
    if len(digests) > 1:
      raise ValueError(
        f"{' and '.join(digests.values())} were prepared with different vocabularies: prepare all "
        "folders with the same one"
      )

  @property
  def splits(self) -> list[str]:
    """The splits that all folders have."""
    splits = [read_manifest(folder)["splits"] for folder in self.folders]
    return sorted(name for name in splits[0] if all(split[name]["shards"] for split in splits))

  @property
  def output_features(self) -> dict[str, Any]:
    """The features as SeqIO describes them, with their vocabulary."""
    path = TokenStream(self.folders[0], self.splits[0]).vocabulary
    feature = seqio.Feature(seqio.SentencePieceVocabulary(path, extra_ids=self.extra_ids))
    names = ["targets"] if self.objective == "causal_lm" else ["inputs", "targets"]
    return dict.fromkeys(names, feature)

  def batch_sequence(self, cfg: DatasetConfig, shard: int, shards: int, seed: int) -> BatchSequence:
    """Returns this shard's rows of every training batch.

    Raises:
      ValueError: the lengths do not fit the objective; or the split does not exist, or has fewer
        tokens than one example.
    """
    lengths = dict(cfg.task_feature_lengths or {})
    streams = [TokenStream(folder, cfg.split) for folder in self.folders]
    objectives = make_objectives(
      self.objective,
      lengths,
      streams[0].manifest["vocabulary"]["pieces"],
      self.extra_ids,
      streams[0].encode,
      self.noise_density,
      self.mean_span_length,
    )
    sources = [(stream, objective) for stream in streams for objective in objectives]
    rates = self.rates or [float(stream.size) for stream in streams]
    return BatchSequence(
      segments=[
        Segments(stream, objective.length, seed + 7919 * number, cfg.shuffle)
        for number, (stream, objective) in enumerate(sources)
      ],
      objectives=[objective for _, objective in sources],
      mixture=RateMixture([rate for rate in rates for _ in objectives], seed),
      lengths=lengths,
      batch_size=cfg.batch_size,
      rows=range(shard * cfg.batch_size // shards, (shard + 1) * cfg.batch_size // shards),
      seed=seed,
      pack=cfg.pack,
    )

  def batches(self, cfg: DatasetConfig, shard: int, shards: int, seed: int) -> PreparedIterator:
    """Returns an endless iterator of training batches; see `batch_sequence`."""
    batches = self.batch_sequence(cfg, shard, shards, seed)
    return PreparedIterator(batches, cfg.num_prefetch_threads, cfg.num_workers)

  def eval_batches(self, cfg: DatasetConfig, shard: int, shards: int, steps: int) -> BatchSequence:
    """Returns at most `steps` batches, in which each example occurs once.

    The last batch may have empty rows.
    """
    cfg = dataclasses.replace(cfg, shuffle=False)
    batches = self.batch_sequence(cfg, shard, shards, cfg.seed or 0)
    counts = [segments.count for segments in batches.segments]
    mixture = ProportionalMixture(counts, steps * cfg.batch_size)
    return dataclasses.replace(batches, mixture=mixture)

  def describe(self, cfg: DatasetConfig, steps: int | None) -> list[str]:
    """Returns a line about each folder: how many epochs the steps are."""
    measures = self.batch_sequence(cfg, 0, 1, 0).measures(steps) if steps else {}
    epochs = {name.removeprefix(EPOCHS): n for name, n in measures.items()}
    return [f"{name}: {steps:,} steps are {n:.3g} epochs" for name, n in epochs.items()]


def prepared_task(
  folders: str | Sequence[str],
  objective: Objective = "span_corruption",
  rates: Sequence[float] | None = None,
  extra_ids: NonNegative = 100,
  name: str = "prepared",
  noise_density: Rate = 0.15,
  mean_span_length: PositiveNumber = 3.0,
) -> PreparedTask:
  """Returns prepared folders as a task, for gin files; see `PreparedTask` for the arguments."""
  folders = (folders,) if isinstance(folders, str) else tuple(folders)
  rates = tuple(rates) if rates else None
  return PreparedTask(folders, objective, rates, extra_ids, name, noise_density, mean_span_length)
