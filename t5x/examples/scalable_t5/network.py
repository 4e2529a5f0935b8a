"""T5X's `examples.scalable_t5.network`."""

from rosetta_t5.networks.scalable_t5 import *
