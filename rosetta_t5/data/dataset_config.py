"""What a run says about its data: `DatasetConfig`, its seed, and the module that defines its task."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rosetta_t5.distributed.coordination import draw_seed

if TYPE_CHECKING:
  import seqio
  import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class DatasetConfig:
  """A SeqIO task or mixture, and how a run reads it. T5X's fields and defaults.

  Change one with `dataclasses.replace`. Example:

    DatasetConfig("squad_v010_allanswers", {"inputs": 512, "targets": 64}, split="train",
                  batch_size=128, shuffle=True, seed=None)

  Attributes:
    mixture_or_task_name: registered name, or the `seqio.Task` or `seqio.Mixture` itself.
    task_feature_lengths: tokens of each feature of the task, e.g. {"inputs": 512, "targets": 128}.
    split: the task's split, e.g. "train".
    batch_size: examples in a batch of the whole run, over all hosts.
    shuffle: whether files and examples are shuffled.
    seed: of shuffling and of random preprocessing; None draws one (see `resolve_seed`).
    use_cached: read the task's offline cache (SeqIO's cache folders).
    pack: put several short examples into one sequence.
    use_custom_packing_ops: pack with tensor2tensor's compiled operation, where it is installed.
    module: imported first, to register the task.
    use_memory_cache: keep evaluation data in memory.
    trim_output_features: cut features to their lengths.
    runtime_preprocessors: dataset → dataset, applied between the task and the feature converter.
    num_prefetch_threads: for providers other than SeqIO's; SeqIO chooses by itself.
    num_workers: the same.
  """

  mixture_or_task_name: str | seqio.Task | seqio.Mixture
  task_feature_lengths: Mapping[str, int]
  split: str
  batch_size: int
  shuffle: bool
  seed: int | None
  use_cached: bool = False
  pack: bool = False
  use_custom_packing_ops: bool = False
  module: str | None = None
  use_memory_cache: bool = True
  trim_output_features: bool = True
  runtime_preprocessors: Sequence[Callable[[tf.data.Dataset], tf.data.Dataset]] | None = None
  num_prefetch_threads: int | None = None
  num_workers: int = 0

  @property
  def name(self) -> str:
    """The task's or mixture's name, however it was given."""
    given = self.mixture_or_task_name
    return given if isinstance(given, str) else given.name


def import_module(module: str) -> Any:
  """Imports the module that registers a run's task.

  Raises:
    ValueError: there is no such module. An error inside the module is passed on as it is.
  """
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    if error.name is None or not f"{module}.".startswith(f"{error.name}."):
      raise
    raise ValueError(
      f"There is no Python module '{error.name}' to import the task from: {module!r} was given as "
      "DatasetConfig.module (MIXTURE_OR_TASK_MODULE in T5X's recipes). Name a module that Python "
      "finds, e.g. with PYTHONPATH set to its folder."
    ) from error


def resolve_seed(cfg: DatasetConfig, stored: int | None = None) -> int:
  """The seed of a dataset: the config's, else the stored one, else one drawn from the clock.

  A run with `seed=None` stores what was drawn in its checkpoints and passes it back here, so that
  a restart shuffles as before. All processes draw the same.
  """
  if cfg.seed is not None:
    return int(cfg.seed)
  if stored is not None:
    return int(stored)
  return draw_seed()
