"""T5X's `trainer`: trainers, what they are made of, actions, and the metrics' manager."""

from rosetta_t5.telemetry.metrics_manager import MetricsManager
from rosetta_t5.training.actions import (
  ActionMode,
  BaseAction,
  EarlyStoppingAction,
  TerminateOnNanAction,
)
from rosetta_t5.training.protocols import (
  ArrayMapFuture,
  BaseTrainerConstructor,
  LearningRateCallable,
  MetricValueMapFuture,
  PartitionedEvalCallable,
  PartitionedTrainCallable,
  SummarizeMetricsCallable,
  TimeFuture,
)
from rosetta_t5.training.trainer import BaseTrainer, Trainer, merge_metrics
from rosetta_t5.training.trainer_parts import (
  PreemptionError,
  WeightMetricsComputer,
  accumulate_grads_microbatched,
  apply_grads,
  eval_step,
  train_with_lr,
)

__all__ = [
  "ActionMode",
  "ArrayMapFuture",
  "BaseAction",
  "BaseTrainer",
  "BaseTrainerConstructor",
  "EarlyStoppingAction",
  "LearningRateCallable",
  "MetricValueMapFuture",
  "MetricsManager",
  "PartitionedEvalCallable",
  "PartitionedTrainCallable",
  "PreemptionError",
  "SummarizeMetricsCallable",
  "TerminateOnNanAction",
  "TimeFuture",
  "Trainer",
  "WeightMetricsComputer",
  "accumulate_grads_microbatched",
  "apply_grads",
  "eval_step",
  "merge_metrics",
  "train_with_lr",
]
