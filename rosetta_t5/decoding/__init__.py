"""Decoding: beam search and sampling for any model that computes the next token's logits."""

from rosetta_t5.decoding.beam_search import (
  NEG_INF_VALUE,
  BeamState,
  beam_init,
  beam_search,
  brevity_penalty,
)
from rosetta_t5.decoding.beams import (
  add_beam_dim,
  cache_gather_beams,
  cache_map,
  flat_batch_beam_expand,
  flatten_beam_dim,
  gather_beams,
  gather_topk_beams,
  top_k_two_stage,
  unflatten_beam_dim,
)
from rosetta_t5.decoding.next_token import (
  NEG_INF,
  Controls,
  DecodingState,
  TokensToLogits,
  apply_controls,
  float32_bsearch,
  int32_bsearch,
  topk_mask,
  topp_mask,
)
from rosetta_t5.decoding.sampling import (
  MIN_TEMPERATURE,
  LogitCallbackFn,
  SamplingLoopState,
  StateCallbackFn,
  temperature_sample,
)
