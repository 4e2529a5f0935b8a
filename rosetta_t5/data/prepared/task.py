"""Prepared folders as the data of a run: `MIXTURE_OR_TASK_NAME = @data.prepared_task()`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from rosetta_t5.argument_types import NonNegative, PositiveNumber, Rate, check_one_of, one_of
from rosetta_t5.data.prepared.batch_objectives import OBJECTIVES, make_objectives
from rosetta_t5.data.prepared.example_order import ProportionalMixture, RateMixture, Segments
from rosetta_t5.data.prepared.prepared_batches import Batches, PreparedIterator
from rosetta_t5.data.prepared.token_stream import TokenStream, read_manifest

if TYPE_CHECKING:
  from rosetta_t5.data.dataset_config import DatasetConfig


Objective = Annotated[str, one_of(OBJECTIVES)]


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
    return sorted(name for name in splits[0] if all(facts[name]["shards"] for facts in splits))

  @property
  def output_features(self) -> dict[str, Any]:
    """The features as SeqIO describes them, with their vocabulary."""
    from rosetta_t5.data.tensorflow_import import import_seqio

    seqio = import_seqio()
    path = TokenStream(self.folders[0], self.splits[0]).vocabulary
    feature = seqio.Feature(seqio.SentencePieceVocabulary(path, extra_ids=self.extra_ids))
    names = ["targets"] if self.objective == "causal_lm" else ["inputs", "targets"]
    return dict.fromkeys(names, feature)

  def batches(self, cfg: DatasetConfig, shard: int, shards: int, seed: int) -> Batches:
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
    return Batches(
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

  def feed(self, cfg: DatasetConfig, shard: int, shards: int, seed: int) -> PreparedIterator:
    """Returns an endless iterator of training batches."""
    batches = self.batches(cfg, shard, shards, seed)
    return PreparedIterator(batches, cfg.num_prefetch_threads, cfg.num_workers)

  def evaluation(self, cfg: DatasetConfig, shard: int, shards: int, steps: int) -> Batches:
    """Returns at most `steps` batches, in which each example occurs once.

    The last batch may have empty rows.
    """
    cfg = dataclasses.replace(cfg, shuffle=False)
    batches = self.batches(cfg, shard, shards, cfg.seed or 0)
    counts = [segments.count for segments in batches.segments]
    mixture = ProportionalMixture(counts, steps * cfg.batch_size)
    return dataclasses.replace(batches, mixture=mixture)
