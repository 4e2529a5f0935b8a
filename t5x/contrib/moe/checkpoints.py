"""T5X's `contrib.moe.checkpoints`: sparse upcycling."""

from rosetta_t5.compat.moe.upcycling import UpcycleCheckpointer
