"""T5X's `decoding`: beam search, temperature sampling, and functions on beams."""

from rosetta_t5.decoding import *
from rosetta_t5.decoding.sampling import sample_expanded as _temperature_sample_single_trial
