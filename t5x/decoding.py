"""T5X's `decoding`: beam search, temperature sampling, and functions on beams."""

from typing import Any

import jax

from rosetta_t5.decoding.beam_search import *
from rosetta_t5.decoding.beams import *
from rosetta_t5.decoding.next_token import *
from rosetta_t5.decoding.sampling import *
from rosetta_t5.decoding.sampling import temperature_sample


def _temperature_sample_single_trial(*args: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
  decodes, log_probs = temperature_sample(*args, **{"topk": 20, **options})
  return decodes[:, 0], log_probs[:, 0]
