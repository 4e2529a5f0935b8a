"""T5X's `contrib.moe.trainer`."""

from rosetta_t5.compat.moe.trainer import MoeTrainer
