"""The input of a decoding step, and the type of the function that computes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import struct

# Used as log 0. It is finite, so that multiplying by it never gives NaN.
NEG_INF = np.array(-1.0e7)


class DecodingState(struct.PyTreeNode):
  """The input of a step; the decodes of one example are adjacent in the first dimension.

  Attributes:
    cur_index: the position of `cur_token`, from 0: a scalar, or [batch · decodes].
    sequences: [batch · decodes, length] the tokens so far.
    cur_token: [batch · decodes, 1] the token at this position.
    cache: a nested dict of arrays, the attention's cache.
  """

  cur_index: jax.Array
  sequences: jax.Array
  cur_token: jax.Array
  cache: Any


# Returns the next token's logits [batch · decodes, vocabulary] and the cache with one more position.
TokensToLogits = Callable[[DecodingState], tuple[jax.Array, Any]]
