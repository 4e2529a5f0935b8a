"""The task `data.prepared_task` of prepared folders, and its training objectives in numpy.

The objectives are those of `data.objectives`, without TensorFlow, with the same distributions but other
random numbers: a row depends only on its own tokens and key.
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from rosetta_t5.argument_types import NonNegative, PositiveNumber, Rate, check_one_of, one_of
from rosetta_t5.data import objectives
from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.denoisers import Denoiser, ul2_denoisers
from rosetta_t5.data.prepared import prepared_batches
from rosetta_t5.data.prepared.prepared_batches import BatchObjective, BatchSequence, HostBatch
from rosetta_t5.data.prepared.shards import VOCABULARY, TokenStream, read_manifest
from rosetta_t5.data.tensorflow_import import seqio
from rosetta_t5.data.vocabularies.sentencepiece_models import count_last_sentinels
from rosetta_t5.data.vocabularies.task_vocabularies import tokenizer_vocabulary

OBJECTIVES = ("span_corruption", "prefix_lm", "causal_lm", "ul2")


@dataclasses.dataclass(frozen=True)
class PreparedTask:
  """Takes the place of a SeqIO task in `DatasetConfig.mixture_or_task_name`.

  Attributes:
    folders: folders that `rosetta-t5 prepare` wrote, or one of them.
    objective: "span_corruption", "prefix_lm", "ul2", or "causal_lm" for decoder-only models.
    rates: how often each folder is drawn from; None draws from all tokens equally often.
    extra_ids: number of sentinels above the vocabulary's pieces.
    name: the task's name in logs and metrics.
    noise_density: fraction of the tokens that span_corruption drops.
    mean_span_length: mean number of tokens in a span that span_corruption drops.
    denoisers: those of "ul2", as for `data.file_task`; None for the seven of the paper.
  """

  tasks = ()  # It consists of no SeqIO tasks.
  folders: str | Sequence[str]
  objective: Annotated[str, one_of(OBJECTIVES)] = "span_corruption"
  rates: Sequence[float] | None = None
  extra_ids: NonNegative = 100
  name: str = "prepared"
  noise_density: Rate = 0.15
  mean_span_length: PositiveNumber = 3.0
  denoisers: Sequence[Sequence[Any]] | None = None

  def __post_init__(self) -> None:
    check_one_of("prepared_task.objective", self.objective, OBJECTIVES)
    if isinstance(self.folders, str):
      object.__setattr__(self, "folders", (self.folders,))
    count, rates = len(self.folders), self.rates
    if rates is not None and (len(rates) != count or min(rates) <= 0):
      raise ValueError(f"prepared_task.rates must be {count} numbers above 0, got {rates}")
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
    path = os.path.join(self.folders[0], read_manifest(self.folders[0])["vocabulary"]["file"])
    if os.path.basename(path) == VOCABULARY:
      feature = seqio.Feature(seqio.SentencePieceVocabulary(path, extra_ids=self.extra_ids))
    else:
      feature = seqio.Feature(tokenizer_vocabulary(path, extra_ids=self.extra_ids))
    return dict.fromkeys(self._feature_names, feature)

  @property
  def arguments(self) -> dict[str, Any]:
    """Those of a `file_task` that makes the same kind of examples."""
    objective, denoisers = self.objective, self.denoisers
    if objective == "span_corruption" and self._mixed() != [Denoiser("", 0.15, 3.0)]:
      objective, denoisers = "ul2", [dataclasses.astuple(self._mixed()[0])]
    text = read_manifest(self.folders[0])["text"]
    return {"text": text, "objective": objective, "denoisers": denoisers}

  @property
  def _feature_names(self) -> list[str]:
    return ["targets"] if self.objective == "causal_lm" else ["inputs", "targets"]

  def objectives(self, lengths: Mapping[str, int], vocabulary: Any) -> list[BatchObjective]:
    """Returns a list with the objective; for "ul2", with its denoisers.

    Args:
      lengths: the lengths of "inputs" and "targets"; for causal_lm, of "targets" alone.
      vocabulary: that of `output_features`.

    Raises:
      ValueError: `lengths` has the wrong features, or too small a value for the targets.
    """
    if sorted(lengths) != self._feature_names:
      raise ValueError(
        f"TASK_FEATURE_LENGTHS must have the features {self._feature_names} for the objective "
        f"{self.objective}, got {dict(lengths)}"
      )
    if self.objective == "causal_lm":
      return [_objective(_causal_lm, lengths["targets"])]
    return [_fit(denoiser, lengths, vocabulary) for denoiser in self._mixed()]

  def _mixed(self) -> list[Denoiser]:
    """Returns the denoisers that make the examples; for causal_lm, one that stands for it."""
    if self.objective == "ul2":
      return list(ul2_denoisers(self.denoisers).values())
    if self.objective == "span_corruption":
      return [Denoiser("", self.noise_density, self.mean_span_length)]
    return [Denoiser("", None, None)]

  def batch_sequence(self, cfg: DatasetConfig, shard: int, shards: int, seed: int) -> BatchSequence:
    """Returns this shard's rows of every training batch.

    Raises:
      ValueError: the lengths do not fit the objective; or the split does not exist, or has fewer
        tokens than one example.
    """
    lengths = dict(cfg.task_feature_lengths or {})
    streams = [TokenStream(folder, cfg.split) for folder in self.folders]
    vocabulary = self.output_features["targets"].vocabulary
    found = self.objectives(lengths, vocabulary)
    pairs = itertools.product(streams, found)
    rates = self.rates or [float(stream.size) for stream in streams]
    drawn = [rate * denoiser.rate for rate in rates for denoiser in self._mixed()]
    segments = [
      prepared_batches.Segments(stream, objective.length, seed + 7919 * number, cfg.shuffle)
      for number, (stream, objective) in enumerate(pairs)
    ]
    return BatchSequence(
      sources=list(zip(segments, found * len(streams), strict=True)),
      mixture=prepared_batches.RateMixture(drawn, seed),
      lengths=lengths,
      batch_size=cfg.batch_size,
      rows=range(shard * cfg.batch_size // shards, (shard + 1) * cfg.batch_size // shards),
      seed=seed,
      pack=cfg.pack,
      has_start=self.objective != "causal_lm" or getattr(vocabulary, "starts_rows", True),
    )

  def batches(
    self, cfg: DatasetConfig, shard: int, shards: int, seed: int
  ) -> prepared_batches.PreparedIterator:
    """Returns an endless iterator of training batches; see `batch_sequence`."""
    batches = self.batch_sequence(cfg, shard, shards, seed)
    return prepared_batches.PreparedIterator(batches, cfg.num_prefetch_threads, cfg.num_workers)

  def eval_batches(self, cfg: DatasetConfig, shard: int, shards: int, steps: int) -> BatchSequence:
    """Returns at most `steps` batches, in which each example occurs once.

    The last batch may have empty rows.
    """
    cfg = dataclasses.replace(cfg, shuffle=False)
    batches = self.batch_sequence(cfg, shard, shards, cfg.seed or 0)
    counts = [segments.count for segments, _ in batches.sources]
    mixture = prepared_batches.proportional_mixture(counts, steps * cfg.batch_size)
    return dataclasses.replace(batches, mixture=mixture)

  def describe(self, cfg: DatasetConfig, steps: int | None) -> list[str]:
    """Returns a line about each folder: how many epochs the steps are."""
    epochs = self.batch_sequence(cfg, 0, 1, 0).epochs(steps) if steps else {}
    return [f"{name}: {steps:,} steps are {n:.3g} epochs" for name, n in epochs.items()]


# Gin files call it data.prepared_task.
prepared_task = PreparedTask


def _fit(denoiser: Denoiser, lengths: Mapping[str, int], vocabulary: Any) -> BatchObjective:
  """Returns an objective whose segments fill both features, including one end token in each."""
  mode = tuple(vocabulary.encode(denoiser.mode))
  density, mean = denoiser.density, denoiser.mean_length
  ends = {"mode": mode, "end": max(vocabulary.eos_id, 1)}
  if mean is None:
    without_end = {name: size - 1 for name, size in lengths.items()}
    length, most, density = objectives.prefix_lengths(without_end, len(mode), density)
    most = min(most, length - 1)
    return _objective(_prefix_lm, length, density=density, most=most, **ends)
  assert density is not None
  room = lengths["inputs"] - len(mode)
  length = objectives.segment_length(room, lengths["targets"], density, mean)
  _, spans = objectives.noise_and_spans(length, density, mean)
  objectives.warn_of_missing_sentinels(length, spans, count_last_sentinels(vocabulary))
  settings = {"density": density, "mean_length": mean, "vocab_size": vocabulary.vocab_size}
  return _objective(_span_corruption, length, **settings, **ends)


def _objective(make: Callable[..., HostBatch], length: int, **settings: Any) -> BatchObjective:
  described = ", ".join(f"{n}={value!r}" for n, value in {"length": length, **settings}.items())
  name = make.__name__.strip("_")
  return BatchObjective(length, f"{name}({described})", functools.partial(make, **settings))


def _causal_lm(tokens_BL: np.ndarray, keys_B: np.ndarray) -> HostBatch:
  """Returns the whole segment as targets, for decoder-only models."""
  del keys_B
  return {"targets": tokens_BL}


def _span_corruption(
  tokens_BL: np.ndarray, keys_B: np.ndarray, mode: Sequence[int], end: int, **settings: Any
) -> HostBatch:
  """Returns the corrupted text as inputs, after the tokens `mode`, and the dropped spans as targets."""
  return _with_mode(*corrupt_spans(tokens_BL, keys_B, **settings), mode, end)


def _prefix_lm(
  tokens_BL: np.ndarray, keys_B: np.ndarray, density: float, most: int, **ends: Any
) -> HostBatch:
  """Returns the beginning as inputs, after the tokens `mode`, and the end as targets.

  The fraction that becomes the targets is drawn uniformly between 0 and 2 * `density`; `most` is the
  largest number of tokens.
  """
  length = tokens_BL.shape[1]
  fraction_B = prepared_batches.random_keys(keys_B, 2) / 2.0**64 * 2 * density
  ends_B = np.clip(np.rint(fraction_B * length), 1, min(length - 1, most))
  starts_B1 = (length - ends_B.astype(int))[:, None]
  inputs = np.where(np.arange(length)[None] < starts_B1, tokens_BL, 0)
  positions_BM = starts_B1 + np.arange(most)[None]
  targets = np.take_along_axis(tokens_BL, np.minimum(positions_BM, length - 1), axis=1)
  return _with_mode(inputs, np.where(positions_BM < length, targets, 0), **ends)


def _with_mode(
  inputs_BL: np.ndarray, targets_BM: np.ndarray, mode: Sequence[int], end: int
) -> HostBatch:
  modes_BK = np.tile(np.array(mode, np.int32), (len(inputs_BL), 1))
  inputs_BL = np.concatenate([modes_BK, inputs_BL], axis=1)
  return {"inputs": _append_end(inputs_BL, end), "targets": _append_end(targets_BM, end)}


def _append_end(tokens_BL: np.ndarray, end: int) -> np.ndarray:
  """Appends an end token to each row's last token."""
  tokens_BL = np.pad(tokens_BL, ((0, 0), (0, 1)))
  ends_B = np.count_nonzero(tokens_BL, axis=1)
  tokens_BL[np.arange(len(tokens_BL)), ends_B] = end
  return tokens_BL


def corrupt_spans(
  tokens_BL: np.ndarray, keys_B: np.ndarray, vocab_size: int, density: float, mean_length: float
) -> tuple[np.ndarray, np.ndarray]:
  """Drops random spans and returns the inputs and the targets, without end tokens.

  Args:
    tokens_BL: int32 tokens; the rows must have no padding.
    keys_B: one uint64 key for each row.
    vocab_size: size of the vocabulary, whose last ids are the sentinels, from `vocab_size - 1` down.
    density: fraction of the tokens that is dropped.
    mean_length: mean number of tokens in a dropped span.
  """
  batch, length = tokens_BL.shape
  noise, spans = objectives.noise_and_spans(length, density, mean_length)
  kept_BS = _random_parts(length - noise, spans, prepared_batches.random_keys(keys_B, 0))
  dropped_BS = _random_parts(noise, spans, prepared_batches.random_keys(keys_B, 1))
  lengths_BT = np.stack([kept_BS, dropped_BS], axis=-1).reshape(batch, -1)
  starts_BT = np.cumsum(lengths_BT, axis=1)[:, :-1]  # the starts of all spans but the first
  is_start_BL = np.zeros((batch, length), bool)
  is_start_BL[:, 0] = True
  is_start_BL[np.arange(batch)[:, None], starts_BT] = True
  span_BL = np.cumsum(is_start_BL, axis=1) - 1
  is_noise_BL = span_BL % 2 == 1
  sentinel_BL = vocab_size - 1 - span_BL // 2

  def keep(is_kept_BL: np.ndarray) -> np.ndarray:
    """Keeps the selected tokens and replaces each other span by one sentinel."""
    mixed_BL = np.where(is_kept_BL, tokens_BL, sentinel_BL).astype(np.int32)
    # The rows remain equally long, because all have the same numbers of spans and dropped tokens.
    return mixed_BL[is_kept_BL | is_start_BL].reshape(batch, -1)

  return keep(~is_noise_BL), keep(is_noise_BL)


def _random_parts(total: int, parts: int, keys_B: np.ndarray) -> np.ndarray:
  """Splits `total` into random positive integers [B, parts]; all splits are equally likely."""
  if parts == 1:
    return np.full((len(keys_B), 1), total)
  positions = np.arange(total - 1, dtype=np.uint64)
  draws = prepared_batches.splitmix64(keys_B[:, None] + positions * prepared_batches.GOLDEN)
  cuts = np.sort(np.argpartition(draws, parts - 2, axis=1)[:, : parts - 1], axis=1) + 1
  return np.diff(cuts, axis=1, prepend=0, append=total)
