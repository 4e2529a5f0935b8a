"""What a decoding loop shows the model at each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import struct

# Stands for log 0: finite, so that products with it are never NaN.
NEG_INF = np.array(-1.0e7)


class DecodingState(struct.PyTreeNode):
  """A step's input; the decodes of one sequence lie side by side in the first dimension.

  Attributes:
    cur_index: position of `cur_token`, from 0: a scalar, or [batch · decodes].
    sequences: [batch · decodes, length] the tokens so far.
    cur_token: [batch · decodes, 1] the token of this position.
    cache: a nested dict of arrays, the attention's cache.
  """

  cur_index: jax.Array
  sequences: jax.Array
  cur_token: jax.Array
  cache: Any


# Returns the next token's logits [batch · decodes, vocabulary] and the cache with one position more.
TokensToLogits = Callable[[DecodingState], tuple[jax.Array, Any]]
