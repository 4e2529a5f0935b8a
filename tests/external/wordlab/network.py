"""A network of the user's own: words in a bag, and the word before."""

import flax.linen as nn
import jax.numpy as jnp
from flax import struct
from flax.linen import partitioning as nn_partitioning

param_with_axes = nn_partitioning.param_with_axes


@struct.dataclass
class BagConfig:
  vocab_size: int
  emb_dim: int = 16
  dropout_rate: float = 0.0


class Table(nn.Module):
  rows: int
  width: int

  @nn.compact
  def __call__(self, tokens):
    table = param_with_axes(
      "embedding",
      nn.initializers.normal(1.0),
      (self.rows, self.width),
      jnp.float32,
      axes=("vocab", "embed"),
    )
    return table[tokens]


class StepsDecoded(nn.Module):
  """The cache: a count."""

  @nn.compact
  def __call__(self):
    index = self.variable("cache", "cache_index", lambda: jnp.zeros((), jnp.int32))
    index.value = index.value + 1


class Bag(nn.Module):
  config: BagConfig

  def setup(self):
    self.words = Table(self.config.vocab_size, self.config.emb_dim)
    self.steps_decoded = StepsDecoded()
    self.scale = param_with_axes(
      "scale", nn.initializers.ones, (self.config.emb_dim,), jnp.float32, axes=("embed",)
    )
    self.out = param_with_axes(
      "out",
      nn.initializers.normal(0.1),
      (self.config.emb_dim, self.config.vocab_size),
      jnp.float32,
      axes=("embed", "vocab"),
    )

  def encode(self, encoder_input_tokens, encoder_segment_ids=None, enable_dropout=True):
    real = (encoder_input_tokens > 0)[..., None]
    return jnp.where(real, self.words(encoder_input_tokens), 0.0)

  def decode(
    self,
    encoded,
    encoder_input_tokens,
    decoder_input_tokens,
    decoder_target_tokens,
    encoder_segment_ids=None,
    decoder_segment_ids=None,
    decoder_positions=None,
    enable_dropout=True,
    decode=False,
    max_decode_length=None,
  ):
    if decode:
      self.steps_decoded()
    bag = encoded.mean(axis=1, keepdims=True)
    return ((bag + self.words(decoder_input_tokens)) * self.scale) @ self.out

  def __call__(
    self,
    encoder_input_tokens,
    decoder_input_tokens,
    decoder_target_tokens,
    encoder_segment_ids=None,
    decoder_segment_ids=None,
    encoder_positions=None,
    decoder_positions=None,
    *,
    enable_dropout=True,
    decode=False,
  ):
    encoded = self.encode(encoder_input_tokens, enable_dropout=enable_dropout)
    return self.decode(
      encoded,
      encoder_input_tokens,
      decoder_input_tokens,
      decoder_target_tokens,
      enable_dropout=enable_dropout,
      decode=decode,
    )
