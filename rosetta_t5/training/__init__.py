"""The pure train step, train state, trainer, losses, schedules, hooks and optimizers."""

from rosetta_t5.training.hooks import (
  Hook,
  automatic_garbage_collection,
  run_due_hooks,
  step_ranges,
)
from rosetta_t5.training.step import accumulate_gradients, eval_step, train_step
from rosetta_t5.training.train_state import InferenceState, TrainState
from rosetta_t5.training.trainer import BaseTrainer, Trainer, merge_metrics
