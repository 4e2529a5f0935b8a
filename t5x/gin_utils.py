"""T5X's `gin_utils`: parsing of gin flags, summaries of the configuration, functions for gin files."""

from rosetta_t5.config import *
