"""T5X's `version`."""

from rosetta_t5 import __version__
