"""A model with a metric of its own, and a way to decode of its own."""

import jax.numpy as jnp

from t5x import decoding, metrics, models


def first_choice(
  inputs,
  cache,
  tokens_to_logits,
  eos_id,
  num_decodes=1,
  max_decode_len=None,
  decode_rng=None,
  cache_offset=0,
  **unused,
):
  """Decodes greedily; the only beam."""
  del eos_id, max_decode_len, decode_rng, cache_offset, unused
  steps = inputs.shape[1]
  token, decodes = jnp.zeros((inputs.shape[0], 1), jnp.int32), []
  score = jnp.zeros(inputs.shape[0])
  for step in range(steps):
    state = decoding.DecodingState(
      cur_index=jnp.array(step), sequences=inputs, cur_token=token, cache=cache
    )
    logits, cache = tokens_to_logits(state)
    token = jnp.argmax(logits, axis=-1)[:, None].astype(jnp.int32)
    score += jnp.max(logits, axis=-1)
    decodes.append(token)
  return jnp.concatenate(decodes, axis=1)[:, None, :], score[:, None]


class BagModel(models.EncoderDecoderModel):
  """Adds a metric, and a penalty of its own to the loss."""

  def __init__(self, *args, penalty=0.0, **kwargs):
    super().__init__(*args, **kwargs)
    self._penalty = penalty

  def loss_fn(self, params, batch, dropout_rng):
    loss, measured = super().loss_fn(params, batch, dropout_rng)
    size = jnp.sum(jnp.square(params["scale"]))
    return loss + self._penalty * size, {
      **measured,
      "scale_size": metrics.AveragePerStep.from_model_output(size),
    }
