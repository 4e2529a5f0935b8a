"""T5X's `decoding`: beam search, temperature sampling, and functions on beams."""

from rosetta_t5.decoding import (
  MIN_TEMPERATURE,
  NEG_INF,
  NEG_INF_VALUE,
  BeamState,
  DecodingState,
  LogitCallbackFn,
  SamplingLoopState,
  StateCallbackFn,
  add_beam_dim,
  beam_init,
  beam_search,
  brevity_penalty,
  cache_gather_beams,
  cache_map,
  flat_batch_beam_expand,
  flatten_beam_dim,
  gather_beams,
  gather_topk_beams,
  temperature_sample,
  top_k_two_stage,
  unflatten_beam_dim,
)
from rosetta_t5.decoding.sampling import sample_expanded as _temperature_sample_single_trial
