"""T5X's `trainer`: trainers, their functions, actions, and the metrics manager."""

from rosetta_t5.compat.trainer_functions import (
  PreemptionError,
  WeightMetricsComputer,
  accumulate_grads_microbatched,
  apply_grads,
  eval_step,
  train_with_lr,
)
from rosetta_t5.telemetry.metrics_manager import MetricsManager
from rosetta_t5.telemetry.metrics_manager import now as _time
from rosetta_t5.training.actions import (
  ActionMode,
  BaseAction,
  EarlyStoppingAction,
  TerminateOnNanAction,
)
from rosetta_t5.training.trainer import BaseTrainer, Trainer, merge_metrics
