"""The data of a run: `DatasetConfig`, its seed, and the import of the module that defines its task."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from rosetta_t5.argument_types import NonNegative, Positive, Seed
from rosetta_t5.data.tensorflow_import import seqio, tf
from rosetta_t5.distributed.coordination import draw_seed

# The modules that may be imported; None for all.
_importable: Container[str] | None = None


@dataclasses.dataclass(frozen=True)
class DatasetConfig:
  """A SeqIO task or mixture, and how a run reads it, with T5X's fields and defaults.

  Use `dataclasses.replace` to change a field. Example:

      DatasetConfig("squad_v010_allanswers", {"inputs": 512, "targets": 64}, split="train",
                    batch_size=128, shuffle=True, seed=None)

  Attributes:
    mixture_or_task_name: a registered name, or the `seqio.Task` or `seqio.Mixture` itself.
    task_feature_lengths: tokens of each feature of the task, e.g. {"inputs": 512, "targets": 128}.
    split: the task's split, e.g. "train".
    batch_size: examples in a global batch, over all hosts.
    shuffle: whether to shuffle files and examples.
    seed: the seed of shuffling and of random preprocessing; None draws one (see `resolve_seed`).
    use_cached: whether to read the task's offline cache (SeqIO's cache folders).
    pack: whether to put several short examples into one sequence.
    use_custom_packing_ops: whether to pack with tensor2tensor's compiled operation, if installed.
    module: a module to import first, which registers the task.
    use_memory_cache: whether to keep evaluation data in memory.
    trim_output_features: whether to truncate features to their lengths.
    allow_truncated_targets: whether a run starts although most targets are longer than their length, so
      that they lose their end.
    runtime_preprocessors: dataset → dataset, applied between the task and the feature converter.
    num_prefetch_threads: threads for prepared data; SeqIO chooses its own number.
    num_workers: processes for prepared data.
  """

  mixture_or_task_name: str | seqio.Task | seqio.Mixture
  task_feature_lengths: Mapping[str, Positive] | None
  split: str
  batch_size: Positive
  shuffle: bool
  seed: Seed | None
  use_cached: bool = False
  pack: bool = False
  use_custom_packing_ops: bool = False
  module: str | None = None
  use_memory_cache: bool = True
  trim_output_features: bool = True
  runtime_preprocessors: Sequence[Callable[[tf.data.Dataset], tf.data.Dataset]] | None = None
  num_prefetch_threads: NonNegative | None = None
  num_workers: NonNegative = 0
  allow_truncated_targets: bool = False

  @property
  def name(self) -> str:
    """The name of the task or mixture."""
    given = self.mixture_or_task_name
    return given if isinstance(given, str) else given.name


@contextlib.contextmanager
def imports_limited_to(modules: Container[str] | None) -> Iterator[None]:
  """Limits what `import_module` imports inside the `with`; None for no limit."""
  global _importable
  before, _importable = _importable, modules
  try:
    yield
  finally:
    _importable = before


def import_module(module: str) -> Any:
  """Imports the module that registers a run's task.

  Raises:
    ValueError: the module does not exist, or is named by a file that is not trusted.
      Errors inside the module are raised unchanged.
  """
  if _importable is not None and module not in _importable and module not in sys.modules:
    raise ValueError(
      f"The module {module!r} (DatasetConfig.module) is not imported, because the file that names it "
      f"may be from elsewhere. If you trust it, add --trust"
    )
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    # If another module is missing, `module` exists and failed to import that one.
    if error.name is None or not f"{module}.".startswith(f"{error.name}."):
      raise
    raise ValueError(
      f"There is no Python module '{error.name}' to import the task from: {module!r} was given as "
      "DatasetConfig.module (MIXTURE_OR_TASK_MODULE in T5X's recipes). Name a module that Python "
      "finds, e.g. by adding its folder to PYTHONPATH."
    ) from error


def resolve_seed(cfg: DatasetConfig, stored: int | None = None) -> int:
  """Returns the seed of a dataset: the config's, else the stored one, else one drawn from the clock.

  A run with `seed=None` stores the drawn seed in its checkpoints and passes it back here, so that a
  restart shuffles in the same order. All processes draw the same seed.
  """
  if cfg.seed is not None:
    return int(cfg.seed)
  return draw_seed() if stored is None else int(stored)
