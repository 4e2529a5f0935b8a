"""The pure train step, train state, trainer, losses, schedules, actions and optimizers."""

from rosetta_t5.training.step import train_step
from rosetta_t5.training.train_state import InferenceState, TrainState
from rosetta_t5.training.trainer import BaseTrainer, Trainer
