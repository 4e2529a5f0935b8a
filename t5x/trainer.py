"""T5X's `trainer`."""

from rosetta_t5.telemetry.metrics_manager import (
  MetricsManager,
)
from rosetta_t5.training.actions import (
  ActionMode,
  BaseAction,
  EarlyStoppingAction,
  TerminateOnNanAction,
)
from rosetta_t5.training.trainer import (
  BaseTrainer,
  Trainer,
  merge_metrics,
)

__all__ = [
  "ActionMode",
  "BaseAction",
  "BaseTrainer",
  "EarlyStoppingAction",
  "MetricsManager",
  "TerminateOnNanAction",
  "Trainer",
  "merge_metrics",
]
