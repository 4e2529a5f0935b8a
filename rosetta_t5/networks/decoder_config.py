"""The sizes and switches of a decoder-only model: of T5's layers, or GPT's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import struct

from rosetta_t5.networks.layers.attention import MultiHeadDotProductAttention
from rosetta_t5.networks.layers.dense import Product
from rosetta_t5.networks.layers.remat import REMAT_POLICIES
from rosetta_t5.networks.t5_config import ATTENTION_KERNELS, check_one_of

POSITIONS = ("relative", "learned", "rotary")
NORMS = ("rms", "layer")


@struct.dataclass
class TransformerConfig:
  """The sizes and switches of a decoder-only model; those not told here are `T5Config`'s.

  The defaults are a decoder of T5's layers, T5X's. GPT-2 and GPT-3 (Radford et al. 2019, Brown et al.
  2020) are positions 'learned', norm 'layer', use_bias, scale_queries, and tied logits not divided.

  Attributes:
    vocab_size: rows of the embedding table; at least the vocabulary's size.
    dtype: what activations are computed in, float32 or bfloat16; parameters stay float32.
    emb_dim: the model's width.
    num_heads: attention heads.
    num_layers: layers.
    head_dim: the size of one head.
    mlp_dim: the feed-forward block's hidden size.
    mlp_activations: ('relu',) or ('gelu',) for a plain block, ('gelu', 'linear') for a gated one.
    dropout_rate: the rate of every dropout.
    logits_via_embedding: whether the output layer is the embedding table.
    float32_attention_logits: as T5Config's.
    scale_attn_logits: as T5Config's.
    fuse_qkv_params: as T5Config's.
    attention_kernel: as T5Config's.
    remat_policy: as T5Config's.
    positions: how a token's place is told: 'relative' by T5's bias, which all layers share; 'learned'
      by a vector for each place, added to the token's; 'rotary' by turning queries and keys.
    max_length: how many places have a learned vector.
    norm: 'rms' for T5's, 'layer' for the one with mean and bias.
    norm_epsilon: added to the mean square, or the variance.
    use_bias: whether all projections but the output layer have biases.
    scale_queries: whether queries are divided by √head_dim, and not their initial values.
    divide_tied_logits: whether logits from the embedding table are divided by √emb_dim.
    init_stddev: standard deviation of all initial kernels and tables; None for T5's.
    local_attention_window: how many tokens, its own counted, a token sees in every second layer, from
      the second on; None for all (GPT-3 and GPT-Neo have such layers).
    padding_never_follows: whether padding, token 0, has no probability.
    scan_layers: whether one program serves all layers, whose parameters are stacked under
      `decoder/decoder`; for many layers. Not with relative positions.
    make_product: as T5Config's.
    transpose_batch_sequence: as T5Config's.
    attention_class: no field, so not to be set.
    param_scan_axis: nor this: where layers are stacked.
  """

  vocab_size: int
  dtype: Any = jnp.float32
  emb_dim: int = 512
  num_heads: int = 8
  num_layers: int = 6
  head_dim: int = 64
  mlp_dim: int = 2048
  mlp_activations: Sequence[str] = ("relu",)
  dropout_rate: float = 0.1
  logits_via_embedding: bool = False
  float32_attention_logits: bool = False
  scale_attn_logits: bool = False
  fuse_qkv_params: bool = False
  attention_kernel: str = "auto"
  remat_policy: str = "none"
  positions: str = "relative"
  max_length: int = 2048
  norm: str = "rms"
  norm_epsilon: float = 1e-6
  use_bias: bool = False
  scale_queries: bool = False
  divide_tied_logits: bool = True
  init_stddev: float | None = None
  local_attention_window: int | None = None
  padding_never_follows: bool = False
  scan_layers: bool = False
  make_product: Callable[[], Product] | None = None
  transpose_batch_sequence: bool = False

  attention_class: ClassVar[type[MultiHeadDotProductAttention]] = MultiHeadDotProductAttention
  param_scan_axis: ClassVar[int] = 1

  def __post_init__(self) -> None:
    """Refuses what these layers cannot be trained with, and what would be passed over."""
    if jnp.dtype(self.dtype) == jnp.float16:
      raise ValueError(
        "TransformerConfig.dtype = 'float16' overflows in T5's feed-forward layers: use 'bfloat16', "
        "or 'float32'"
      )
    check_one_of("TransformerConfig.attention_kernel", self.attention_kernel, ATTENTION_KERNELS)
    check_one_of("TransformerConfig.remat_policy", self.remat_policy, REMAT_POLICIES)
    check_one_of("TransformerConfig.positions", self.positions, POSITIONS)
    check_one_of("TransformerConfig.norm", self.norm, NORMS)
    # Scripts give 1 and 0.
    for name in ("transpose_batch_sequence", "fuse_qkv_params"):
      if (value := getattr(self, name)) not in (0, 1):
        raise ValueError(f"TransformerConfig.{name} = {value!r} must be True or False, or 1 or 0")
      object.__setattr__(self, name, bool(value))
    for wrong, advice in self._contradictions():
      if wrong:
        raise ValueError(f"TransformerConfig.{advice}")

  def _contradictions(self) -> list[tuple[bool, str]]:
    window = self.local_attention_window
    return [
      (
        self.positions == "rotary" and self.head_dim % 2 == 1,
        f"positions = 'rotary' turns pairs of features: set head_dim = {self.head_dim} to an even "
        "number, or positions = 'learned'",
      ),
      (
        self.scan_layers and self.positions == "relative",
        "scan_layers = True keeps nothing that layers share, and positions = 'relative' is one bias "
        "for all of them: set positions = 'learned' or 'rotary', or scan_layers = False",
      ),
      (
        self.scan_layers and window is not None,
        f"scan_layers = True makes all layers alike, but local_attention_window = {window} is every "
        "second layer's: set it to None, or scan_layers = False",
      ),
      (
        window is not None and window < 1,
        f"local_attention_window = {window} must be 1 or more, as a token sees itself, or None",
      ),
      (
        window is not None and self.attention_kernel not in ("auto", "xla"),
        f"attention_kernel = {self.attention_kernel!r} knows no local_attention_window (it is "
        f"{window}): set it to 'xla', or the window to None",
      ),
      (
        self.scale_queries and self.scale_attn_logits,
        "scale_queries and scale_attn_logits would both divide by √head_dim: set one of them",
      ),
    ]
