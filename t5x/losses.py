"""T5X's `losses`: weighted cross-entropy with z-loss and label smoothing, and its normalizing factors."""

from rosetta_t5.training.losses import *
