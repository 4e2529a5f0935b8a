"""The sizes and switches of a T5 model."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import struct

from rosetta_t5.networks.layers.attention import MultiHeadDotProductAttention
from rosetta_t5.networks.layers.dense import Product
from rosetta_t5.networks.layers.remat import REMAT_POLICIES

ATTENTION_KERNELS = ("auto", "xla", "cudnn", "flash")


@struct.dataclass
class T5Config:
  """The sizes and switches of a T5 model.

  Attributes:
    vocab_size: rows of the embedding table; at least the vocabulary's size.
    dtype: what activations are computed in, float32 or bfloat16; parameters stay float32.
    emb_dim: the model's width.
    num_heads: attention heads.
    num_encoder_layers: layers of the encoder.
    num_decoder_layers: layers of the decoder.
    head_dim: the size of one head.
    mlp_dim: the feed-forward block's hidden size.
    mlp_activations: ('relu',) for T5 1.0, ('gelu', 'linear') for T5 1.1.
    dropout_rate: the rate of every dropout.
    logits_via_embedding: whether the output layer is the embedding table (T5 1.0).
    float32_attention_logits: whether attention logits and softmax are float32 under bfloat16.
    scale_attn_logits: whether the queries' input is divided by √head_dim.
    transpose_batch_sequence: whether activations are [length, batch, ...] inside the layers. Numbers
      stay what they are.
    fuse_qkv_params: whether one product makes queries, keys and values (in cross-attention, keys and
      values). Parameters and checkpoints stay what they are.
    attention_kernel: auto, xla, cudnn or flash; see `networks.attention_kernel`.
    remat_policy: what a layer keeps for its backward pass; see `networks.remat`.
    make_product: how the projections of attention and feed-forward blocks multiply, None for in
      `dtype`; set by `networks.precision`, not by users.
    attention_class: how the attention's kernels are stored; no field, so not to be set.
  """

  vocab_size: int
  dtype: Any = jnp.float32
  emb_dim: int = 512
  num_heads: int = 8
  num_encoder_layers: int = 6
  num_decoder_layers: int = 6
  head_dim: int = 64
  mlp_dim: int = 2048
  mlp_activations: Sequence[str] = ("relu",)
  dropout_rate: float = 0.1
  logits_via_embedding: bool = False
  float32_attention_logits: bool = False
  scale_attn_logits: bool = False
  transpose_batch_sequence: bool = False
  fuse_qkv_params: bool = False
  attention_kernel: str = "auto"
  remat_policy: str = "none"
  make_product: Callable[[], Product] | None = None

  attention_class: ClassVar[type[MultiHeadDotProductAttention]] = MultiHeadDotProductAttention

  def __post_init__(self) -> None:
    """Refuses what T5 cannot be trained with."""
    if jnp.dtype(self.dtype) == jnp.float16:
      raise ValueError(
        "T5Config.dtype = 'float16' overflows in T5's feed-forward layers: use 'bfloat16', "
        "or 'float32'"
      )
    for name in ("transpose_batch_sequence", "fuse_qkv_params"):
      if (value := getattr(self, name)) not in (0, 1):
        raise ValueError(f"T5Config.{name} = {value!r} must be True or False, or 1 or 0")
      object.__setattr__(self, name, bool(value))  # scripts give 1 and 0
    check_one_of("T5Config.attention_kernel", self.attention_kernel, ATTENTION_KERNELS)
    check_one_of("T5Config.remat_policy", self.remat_policy, REMAT_POLICIES)


def check_one_of(name: str, value: Any, known: Sequence[str]) -> None:
  """Refuses a value of the switch `name` that is not among those known.

  Raises:
    ValueError: it is not.
  """
  if value in known:
    return
  near = difflib.get_close_matches(str(value), known, n=1)
  raise ValueError(
    f"{name} = {value!r} is unknown"
    + (f" (did you mean {near[0]!r}?)" if near else "")
    + f": set it to one of {', '.join(map(repr, known))}"
  )
