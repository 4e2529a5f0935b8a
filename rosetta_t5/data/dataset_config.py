"""The data of a run: `DatasetConfig`, its seed, and its task or mixture, checked before anything is read."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import glob
import importlib
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from rosetta_t5.argument_types import NonNegative, Positive, Seed
from rosetta_t5.data import tensorflow_import
from rosetta_t5.data.tasks.catalogue import TASKS, MissingDataError, register, registered_names
from rosetta_t5.data.tensorflow_import import seqio, tf
from rosetta_t5.distributed.coordination import draw_seed
from rosetta_t5.user_errors import did_you_mean, reason_of

# The errors of TensorFlow about files that are damaged, missing or not readable.
_FILE_ERRORS = ("DataLossError", "NotFoundError", "PermissionDeniedError")
# Finds the text of a reader's ValueError in the error that tf.data raises instead.
_WRAPPED = re.compile(r"ValueError: (?P<text>(?:None of the |\S.*, line \d+: ).*?)\s*(?:\n|$)")
# TensorFlow's messages about a record that is no example, or one without a feature of the task.
_DAMAGED = re.compile("Could not parse example|Feature: .* is required but could not be found")
# The modules that `import_module` may import; None for all.
importable: contextvars.ContextVar[Collection[str] | None]
importable = contextvars.ContextVar("importable", default=None)


class _UntrustedModule(str):
  """A module that a file from elsewhere names. It remains one when the file has been read."""


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

  def __post_init__(self) -> None:
    allowed = importable.get()
    if self.module is not None and allowed is not None and self.module not in allowed:
      object.__setattr__(self, "module", _UntrustedModule(self.module))

  @property
  def name(self) -> str:
    """The name of the task or mixture."""
    given = self.mixture_or_task_name
    return given if isinstance(given, str) else given.name


def import_module(module: str) -> Any:
  """Imports the module that registers a run's task.

  Raises:
    ValueError: the module does not exist, or is named by a file that is not trusted.
      Errors inside the module are raised unchanged.
  """
  is_limited = isinstance(module, _UntrustedModule) or module not in (importable.get() or [module])
  if is_limited and module not in sys.modules:
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
      f"There is no Python module '{error.name}', but MIXTURE_OR_TASK_MODULE (DatasetConfig.module) is "
      f"{module!r}: name a module that Python finds, e.g. by adding its folder to PYTHONPATH"
    ) from error


def resolve_seed(cfg: DatasetConfig, stored: int | None = None) -> int:
  """Returns the seed of a dataset: the config's, else the stored one, else one drawn from the clock.

  A run with `seed=None` stores the drawn seed in its checkpoints and passes it back here, so that a
  restart shuffles in the same order. All processes draw the same seed.
  """
  if cfg.seed is not None:
    return int(cfg.seed)
  return draw_seed() if stored is None else int(stored)


def find_task_or_mixture(cfg: DatasetConfig) -> Any:
  """Returns the task or mixture that `cfg` names, after importing its module.

  Raises:
    ValueError: the name is not registered. The message lists similar names and what to set.
  """
  is_name = isinstance(cfg.mixture_or_task_name, str)
  # T5X's recipes import t5 for tasks that are known here too, so t5 need not be installed.
  is_t5s = is_name and cfg.name in TASKS and (cfg.module or "").split(".")[0] == "t5"
  if cfg.module and not (is_t5s and find_spec("t5") is None):
    import_module(cfg.module)
  if not is_name:
    return cfg.mixture_or_task_name
  register(cfg.name)
  known = registered_names()
  if cfg.name in known:
    return seqio.get_mixture_or_task(cfg.name)
  near = did_you_mean(cfg.name, {*known, *TASKS}, cutoff=0.5)
  raise ValueError(
    f"There is no SeqIO task or mixture '{cfg.name}' (MIXTURE_OR_TASK_NAME, or --task of eval).{near} Set "
    "MIXTURE_OR_TASK_MODULE (DatasetConfig.module) to the module of yours that registers it, got "
    f"{cfg.module!r}"
  )


def find_checked_task(cfg: DatasetConfig, converter: seqio.FeatureConverter | None = None) -> Any:
  """Returns the task or mixture after checking its cache, its split and its feature lengths.

  Args:
    cfg: the dataset.
    converter: the model's feature converter; without it, the lengths are not checked.

  Raises:
    ValueError: the task, its cache or its split does not exist, or the lengths do not fit the model.
  """
  provider = find_task_or_mixture(cfg)
  check_split(cfg, provider)
  if converter is not None:
    check_feature_lengths(cfg, converter)
  return provider


def check_split(cfg: DatasetConfig, provider: Any) -> None:
  """Checks that the split exists, in the offline cache of every task if `cfg.use_cached` is set.

  Raises:
    ValueError: a task has no cache; the split does not exist, and the message lists those that do; or
      the folder of TensorFlow Datasets that states them is damaged.
  """
  if cfg.use_cached:
    missing = [task.name for task in seqio.get_subtasks(provider) if not task.cache_dir]
    if missing or not subtasks_with_split(cfg, provider):
      split = "" if missing else f" of the split '{cfg.split}'"
      raise ValueError(
        f"The task '{[*missing, cfg.name][0]}' has no offline cache{split}, but USE_CACHED_TASKS = True "
        "(DatasetConfig.use_cached): set USE_CACHED_TASKS = False to read its source, cache it with "
        "seqio_cache_tasks, or name the cache's folder with --seqio_additional_cache_dirs."
      )
    return
  try:
    splits = sorted(provider.splits)
  except MissingDataError:
    raise
  except Exception as error:
    raise ValueError(
      f"The data of the task '{cfg.name}' cannot be opened in "
      f"{tensorflow_import.tfds_data_dir_override()} ({reason_of(error)[:300]}). Correct --tfds_data_dir, or restore the dataset's files there"
    ) from error
  if not has_split(provider, cfg.split):
    raise ValueError(
      f"The task '{cfg.name}' has no split '{cfg.split}'; it has {', '.join(map(repr, splits))}. "
      "Set DatasetConfig.split (--split of eval and inspect, or MIXTURE_OR_TASK_SPLIT in recipes that have it) to one of them."
    )


def has_split(provider: Any, split: str) -> bool:
  """Returns whether a task has a split, or every part of a split like "train[:90%]+validation".

  A source of files has whole splits only.
  """
  source = getattr(provider, "source", None)
  reads_files = isinstance(source, seqio.FileDataSource)
  if not getattr(source, "reads_parts", not reads_files):
    return split in provider.splits
  return all(part.split("[")[0] in provider.splits for part in split.split("+"))


def subtasks_with_split(cfg: DatasetConfig, provider: Any) -> list[Any]:
  """Returns the task, or the mixture's tasks, if they have the split; caches have their own splits."""

  def has_split_to_read(task: Any) -> bool:
    if not (cfg.use_cached and task.cache_dir):
      return has_split(task, cfg.split)
    return tf.io.gfile.exists(seqio.utils.get_cached_info_path(task.cache_dir, cfg.split))

  return [task for task in seqio.get_subtasks(provider) if has_split_to_read(task)]


def read_task(cfg: DatasetConfig, provider: Any, **options: Any) -> tf.data.Dataset:
  """Returns the examples of a task or mixture: by default one unshuffled pass.

  Args:
    cfg: the feature lengths, the split, and whether to read the offline cache.
    provider: the task or mixture.
    **options: further arguments of SeqIO's `get_dataset`, such as shard_info and seed.
  """
  options = {"shuffle": False, "num_epochs": 1, **options}
  return tensorflow_import.without_autograph(provider.get_dataset, provider)(
    sequence_length=cfg.task_feature_lengths, split=cfg.split, use_cached=cfg.use_cached, **options
  )


def check_feature_lengths(cfg: DatasetConfig, converter: seqio.FeatureConverter) -> None:
  """Checks that TASK_FEATURE_LENGTHS has exactly the features that the model reads.

  Raises:
    ValueError: a feature has no length, or the model does not read it.
  """
  wanted = sorted(set(converter.TASK_FEATURES) | tensorflow_import.passthrough_features(converter))
  given = dict(cfg.task_feature_lengths or {})
  if wanted != sorted(given):
    raise ValueError(
      f"TASK_FEATURE_LENGTHS = {given} (task '{cfg.name}') must have the features {wanted}, which "
      f"{type(converter).__name__} reads: set for example TASK_FEATURE_LENGTHS = "
      f"{ {name: given.get(name, 512) for name in wanted} }"
    )


def task_files(task: Any, cfg: DatasetConfig) -> list[str]:
  """Returns the files that a task reads: its source's, or those of its offline cache."""
  if not cfg.use_cached:
    return list(map(str, task.source.list_shards(cfg.split)))
  prefix = seqio.utils.get_cached_tfrecord_prefix(task.cache_dir, cfg.split)
  return sorted(glob.glob(f"{glob.escape(prefix)}*"))


@contextlib.contextmanager
def data_errors_named(cfg: DatasetConfig | None) -> Iterator[None]:
  """Inside the `with`, errors about data files become ValueErrors that name the task.

  Args:
    cfg: the data that is read; None if it is not known.
  """
  try:
    yield
  except Exception as error:
    is_wrapped = type(error).__module__.startswith("tensorflow")
    if is_wrapped and (found := _WRAPPED.search(str(error))):
      raise ValueError(found["text"]) from None
    # TensorFlow shows a record that it cannot parse; Python cannot decode the message if it is not text.
    is_damaged = isinstance(error, UnicodeDecodeError) or _DAMAGED.search(str(error))
    if type(error).__name__ not in _FILE_ERRORS and not is_damaged:
      raise
    reason = re.sub(r"^(\{\{.*?\}\} )+| \[Op:.*", "", str(error).splitlines()[0])
    data = "the data" if cfg is None else f"the data of the task '{cfg.name}'"
    raise ValueError(
      f"{data} cannot be read: {reason}. Restore its files, or correct the task's file pattern, or the "
      "names of the features that it reads"
    ) from error
