"""SeqIO's evaluator, made as a run describes its data: predictions against targets, task by task."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.pipeline.providers import check_cached, check_split, find_provider
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio

if TYPE_CHECKING:
  import seqio


def make_evaluator(
  cfg: DatasetConfig,
  feature_converter_cls: Callable[..., Any],
  evaluator_cls: Callable[..., Any] | None = None,
  log_dir: str | os.PathLike[str] | None = None,
) -> seqio.Evaluator:
  """Returns an evaluator over all examples of a split; it reads them once, to learn their lengths.

  Args:
    cfg: the data; `task_feature_lengths` None takes the longest example's lengths, so that nothing
      is cut off. `use_memory_cache` False reads the data anew for each evaluation.
    feature_converter_cls: called with `pack=False`.
    evaluator_cls: `seqio.Evaluator`, with arguments bound as one likes; None for one that writes
      TensorBoard's files and JSON.
    log_dir: where its loggers write; None for no loggers.

  Returns:
    The evaluator. Its `eval_tasks` are those tasks of a mixture that have the split and metrics.

  Raises:
    ValueError: the task, its split or its cache does not exist, or the data is to be packed.
  """
  seqio = import_seqio()
  if cfg.pack:
    raise ValueError(
      f"DatasetConfig.pack = True for the task '{cfg.name}', but predictions are made for one "
      "example at a time: set infer_eval/utils.DatasetConfig.pack = False"
    )
  provider = find_provider(cfg)
  check_cached(cfg, provider)
  if isinstance(provider, seqio.Task):  # of a mixture, tasks without the split are left out
    check_split(cfg, provider)
  _check_registered(cfg, provider, seqio)
  if evaluator_cls is None:
    loggers = [seqio.PyLoggingLogger, seqio.TensorBoardLogger, seqio.JSONLogger]
    evaluator_cls = functools.partial(seqio.Evaluator, logger_cls=loggers)
  logging = {"logger_cls": ()} if log_dir is None else {"log_dir": os.fspath(log_dir)}
  return evaluator_cls(
    mixture_or_task_name=cfg.name,
    feature_converter=feature_converter_cls(pack=False),
    eval_split=cfg.split,
    use_cached=cfg.use_cached,
    seed=cfg.seed,
    sequence_length=cfg.task_feature_lengths,
    use_memory_cache=cfg.use_memory_cache,
    **logging,
  )


def _check_registered(cfg: DatasetConfig, provider: Any, seqio: Any) -> None:
  known = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
  if cfg.name not in known or seqio.get_mixture_or_task(cfg.name) is not provider:
    raise ValueError(
      f"The task '{cfg.name}' was given as an object that is not in SeqIO's registry, where its "
      "evaluator looks it up: add it with seqio.TaskRegistry.add, and give its name"
    )
