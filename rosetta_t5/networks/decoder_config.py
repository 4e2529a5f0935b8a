"""The sizes and settings of a decoder-only model with T5's layers or GPT's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import jax.numpy as jnp
from flax import struct

from rosetta_t5.argument_types import (
  FloatDType,
  NonNegative,
  Positive,
  PositiveNumber,
  Rate,
  check_one_of,
  one_of,
)
from rosetta_t5.networks.t5_config import LayerSettings, RematPolicy

POSITIONS = ("relative", "learned", "rotary")
NORMS = ("rms", "layer")
Positions = Annotated[str, one_of(POSITIONS)]
Norm = Annotated[str, one_of(NORMS)]


@struct.dataclass
class TransformerConfig(LayerSettings):
  """The sizes and settings of a decoder-only model; `LayerSettings` has those that all networks share.

  The defaults are T5X's decoder-only model, which has T5's layers. GPT-2 and GPT-3 (Radford et al.
  2019, Brown et al. 2020) use positions 'learned', norm 'layer', use_bias, scale_queries, and
  divide_tied_logits = False.

  Attributes:
    vocab_size: the number of rows of the embedding table; at least the vocabulary's size.
    dtype: the type of activations, float32 or bfloat16; parameters stay float32.
    emb_dim: the model's width.
    num_heads: the number of attention heads.
    num_layers: the number of layers.
    head_dim: the size of one head.
    mlp_dim: the feed-forward block's hidden size.
    mlp_activations: ('relu',) or ('gelu',) for a plain block, ('gelu', 'linear') for a gated one.
    dropout_rate: the rate of every dropout.
    logits_via_embedding: whether the output layer is the embedding table.
    float32_attention_logits: see `T5Config`.
    scale_attn_logits: see `T5Config`.
    remat_policy: see `T5Config`.
    positions: 'relative' adds T5's bias, which all layers share; 'learned' adds a learned vector to
      each token's embedding; 'rotary' rotates queries and keys.
    max_length: the number of learned position vectors.
    norm: 'rms' for T5's norm, 'layer' for the one with mean and bias.
    norm_epsilon: added to the mean square, or to the variance.
    use_bias: whether all projections but the output layer have biases.
    scale_queries: whether queries, rather than the query kernel's initial values, are divided by
      √head_dim.
    divide_tied_logits: whether logits from the embedding table are divided by √emb_dim.
    init_stddev: the standard deviation of all initial kernels and tables; None for T5's.
    local_attention_window: the number of tokens, including itself, that a token sees in every second
      layer, starting with the second; None for all tokens (GPT-3 and GPT-Neo have such layers).
    padding_never_follows: whether padding, token 0, has probability 0.
    scan_layers: whether layers are scanned and their parameters stacked under `decoder/decoder`,
      which suits deep models. It excludes relative positions.
    param_scan_axis: the axis that parameters are stacked along; not a field, so users cannot set it.
  """

  vocab_size: Positive
  dtype: FloatDType = jnp.float32
  emb_dim: Positive = 512
  num_heads: Positive = 8
  num_layers: NonNegative = 6
  head_dim: Positive = 64
  mlp_dim: Positive = 2048
  mlp_activations: Sequence[str] = ("relu",)
  dropout_rate: Rate = 0.1
  logits_via_embedding: bool = False
  float32_attention_logits: bool = False
  scale_attn_logits: bool = False
  remat_policy: RematPolicy = "none"
  positions: Positions = "relative"
  max_length: Positive = 2048
  norm: Norm = "rms"
  norm_epsilon: PositiveNumber = 1e-6
  use_bias: bool = False
  scale_queries: bool = False
  divide_tied_logits: bool = True
  init_stddev: PositiveNumber | None = None
  local_attention_window: Positive | None = None
  padding_never_follows: bool = False
  scan_layers: bool = False

  param_scan_axis: ClassVar[int] = 1

  def __post_init__(self) -> None:
    """Refuses settings that the layers do not support or that contradict each other."""
    super().__post_init__()
    check_one_of("TransformerConfig.positions", self.positions, POSITIONS)
    check_one_of("TransformerConfig.norm", self.norm, NORMS)
    for is_contradiction, advice in self._contradictions():
      if is_contradiction:
        raise ValueError(f"TransformerConfig.{advice}")

  def _contradictions(self) -> list[tuple[bool, str]]:
    window = self.local_attention_window
    return [
      (
        self.positions == "rotary" and self.head_dim % 2 == 1,
        f"head_dim must be even for positions = 'rotary', which rotates pairs of features, got "
        f"{self.head_dim}: set an even number, or positions = 'learned'",
      ),
      (
        self.scan_layers and self.positions == "relative",
        "scan_layers = True excludes positions = 'relative', whose bias is shared by all layers: set "
        "positions = 'learned' or 'rotary', or scan_layers = False",
      ),
      (
        self.scan_layers and window is not None,
        f"scan_layers = True needs identical layers, but local_attention_window = {window} applies "
        "to every second layer: set it to None, or scan_layers = False",
      ),
      (
        window is not None and window < 1,
        f"local_attention_window must be at least 1 (a token sees itself) or None, got {window}",
      ),
      (
        window is not None and self.attention_kernel not in ("auto", "xla"),
        f"attention_kernel = {self.attention_kernel!r} does not support local_attention_window "
        f"(it is {window}): set it to 'xla', or the window to None",
      ),
      (
        self.router == "expert_choice",
        "router must be 'switch' or 'top_2' in a decoder, got 'expert_choice': the experts of a token would "
        "depend on later tokens, which do not exist when the model decodes",
      ),
      (
        self.scale_queries and self.scale_attn_logits,
        "scale_queries and scale_attn_logits would both divide by √head_dim: set only one of them",
      ),
    ]
