"""T5X's `train_state`: the train state of training and inference."""

from rosetta_t5.compat.train_state import EMPTY_DICT, FlaxOptimTrainState
from rosetta_t5.training.train_state import InferenceState, TrainState
