"""Builds SeqIO's evaluator, which compares predictions with targets, from a run's `DatasetConfig`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rosetta_t5 import terminal
from rosetta_t5.data import seqio_internals
from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.pipeline import task_lookup
from rosetta_t5.data.pipeline.error_locations import naming_files
from rosetta_t5.data.prepared import PreparedTask
from rosetta_t5.data.tasks.catalogue import registered_names
from rosetta_t5.data.tensorflow_import import import_seqio

if TYPE_CHECKING:
  import seqio


def has_metrics(cfg: DatasetConfig) -> bool:
  """Returns whether the task, or a task of the mixture, has the split and metrics of predictions.

  Raises:
    ValueError: the task does not exist.
  """
  if isinstance(cfg.mixture_or_task_name, PreparedTask):
    return False
  tasks = task_lookup.subtasks_with_split(cfg, task_lookup.find_task_or_mixture(cfg))
  return any(task.metric_objs for task in tasks)


def make_evaluator(
  cfg: DatasetConfig,
  feature_converter_cls: Callable[..., Any],
  evaluator_cls: Callable[..., Any] | None = None,
  log_dir: str | os.PathLike[str] | None = None,
) -> seqio.Evaluator:
  """Returns an evaluator over all examples of a split, which it reads once to find their lengths.

  Args:
    cfg: the dataset. With `task_feature_lengths` None, the longest example sets the lengths, so that
      nothing is truncated. With `use_memory_cache` False, each evaluation reads the data again.
    feature_converter_cls: called with `pack=False`.
    evaluator_cls: `seqio.Evaluator`, possibly with bound arguments; None means one that writes
      TensorBoard files and JSON.
    log_dir: the folder for its loggers; None means no loggers.

  Returns:
    The evaluator. Its `eval_tasks` are the tasks that have the split and metrics.

  Raises:
    ValueError: the task, its split or its cache does not exist, or `cfg.pack` is set.
  """
  seqio = import_seqio()
  if cfg.pack:
    raise ValueError(
      "infer_eval/utils.DatasetConfig.pack must be False, because each prediction belongs to one "
      f"example; got True for the task '{cfg.name}'"
    )
  provider = task_lookup.find_task_or_mixture(cfg)
  task_lookup.check_cached(cfg, provider)
  if isinstance(provider, seqio.Task):  # A mixture's tasks without the split are left out.
    task_lookup.check_split(cfg, provider)
  if cfg.name not in registered_names() or seqio.get_mixture_or_task(cfg.name) is not provider:
    raise ValueError(
      f"The task '{cfg.name}' must be in SeqIO's registry, because the evaluator looks it up there. "
      "Register it with seqio.TaskRegistry.add, and give its name instead of the task"
    )
  if evaluator_cls is None:
    loggers = [seqio.PyLoggingLogger, seqio.TensorBoardLogger, seqio.JSONLogger]
    evaluator_cls = functools.partial(seqio.Evaluator, logger_cls=loggers)
  log_options = {"logger_cls": ()} if log_dir is None else {"log_dir": os.fspath(log_dir)}
  with naming_files(cfg):
    evaluator = evaluator_cls(
      mixture_or_task_name=cfg.name,
      feature_converter=feature_converter_cls(pack=False),
      eval_split=cfg.split,
      use_cached=cfg.use_cached,
      seed=cfg.seed,
      sequence_length=cfg.task_feature_lengths,
      use_memory_cache=cfg.use_memory_cache,
      **log_options,
    )
  seqio_internals.replace_loggers(evaluator, _without_errors)
  return evaluator


def _without_errors(logger: Callable[..., None]) -> Callable[..., None]:
  """Returns a logger that writes UTF-8, and logs an error instead of raising it."""
  seqio_internals.write_utf8(logger)

  def log(*args: Any, **kwargs: Any) -> None:
    with terminal.optional_output("the results of predictions", Exception):
      logger(*args, **kwargs)

  return log
