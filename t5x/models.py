"""T5X's `models`: encoder-decoder and decoder-only models."""

from rosetta_t5.models import *
