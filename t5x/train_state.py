"""T5X's `train_state`."""

from rosetta_t5.training.train_state import (
  InferenceState,
  TrainState,
)
from rosetta_t5.training.train_state import (
  TrainState as FlaxOptimTrainState,
)
