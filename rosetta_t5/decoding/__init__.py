"""Decoding: beam search and sampling for any model that computes the next token's logits."""

from rosetta_t5.decoding.beam_search import beam_search
from rosetta_t5.decoding.beams import flat_batch_beam_expand
from rosetta_t5.decoding.next_token import Controls, DecodingState, TokensToLogits, apply_controls
from rosetta_t5.decoding.sampling import temperature_sample
