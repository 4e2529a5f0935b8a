"""The sizes and settings of a T5 model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

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
from rosetta_t5.networks.expert_settings import EXPERT_DISPATCHES, ROUTERS, ExpertSettings
from rosetta_t5.networks.layers.attention import MultiHeadDotProductAttention
from rosetta_t5.networks.layers.dense import MakeMatmul
from rosetta_t5.networks.layers.layer_stack import REMAT_POLICIES

ATTENTION_KERNELS = ("auto", "xla", "cudnn", "flash")
AttentionKernel = Annotated[str, one_of(ATTENTION_KERNELS)]
RematPolicy = Annotated[str, one_of(REMAT_POLICIES)]


@struct.dataclass(kw_only=True)
class LayerSettings(ExpertSettings):
  """How layers are computed, which all networks share; `ExpertSettings` has those of mixtures of experts.

  Scripts set the boolean switches to 1 or 0; these become True or False.

  Attributes:
    transpose_batch_sequence: whether activations are [length, batch, ...] inside the layers. Results
      do not change.
    fuse_qkv_params: whether one matmul computes queries, keys and values (in cross-attention, keys
      and values). Parameters and checkpoints do not change.
    attention_kernel: auto, xla, cudnn or flash; see `networks.kernel_choice`.
    num_buckets: the number of buckets of T5's relative bias.
    max_distance: the distance at which the last of these buckets begins.
    make_matmul: returns the function that computes the matmuls of the attention and feed-forward
      projections; None for a matmul in `dtype`. `networks.precision` sets it, not users.
    attention_class: the class of the attention layers; not a field, so users cannot set it.
  """

  transpose_batch_sequence: bool = False
  fuse_qkv_params: bool = False
  attention_kernel: AttentionKernel = "auto"
  num_buckets: Positive = 32
  max_distance: Positive = 128
  make_matmul: MakeMatmul | None = None

  attention_class: ClassVar[type[MultiHeadDotProductAttention]] = MultiHeadDotProductAttention

  def __post_init__(self) -> None:
    """Refuses settings that the layers do not support."""
    name = type(self).__name__
    config: Any = self  # Subclasses have `dtype` and `remat_policy`, whose positions are T5X's.
    if jnp.dtype(config.dtype) == jnp.float16:
      raise ValueError(
        f"{name}.dtype = 'float16' overflows in T5's feed-forward layers: use 'bfloat16', or 'float32'"
      )
    for switch in ("transpose_batch_sequence", "fuse_qkv_params"):
      if (value := getattr(self, switch)) not in (0, 1):
        raise ValueError(f"{name}.{switch} = {value!r} must be True or False, or 1 or 0")
      object.__setattr__(self, switch, bool(value))
    check_one_of(f"{name}.attention_kernel", self.attention_kernel, ATTENTION_KERNELS)
    check_one_of(f"{name}.remat_policy", config.remat_policy, REMAT_POLICIES)
    check_one_of(f"{name}.router", self.router, ROUTERS)
    check_one_of(f"{name}.expert_dispatch", self.expert_dispatch, EXPERT_DISPATCHES)
    if self.router != "switch" and self.num_experts == 1:
      raise ValueError(
        f"{name}.router = {self.router!r} needs at least 2 experts, got num_experts = 1: set router = "
        "'switch'"
      )


@struct.dataclass
class T5Config(LayerSettings):
  """The sizes and settings of a T5 model; `LayerSettings` has those that all networks share.

  Attributes:
    vocab_size: the number of rows of the embedding table; at least the vocabulary's size.
    dtype: the type of activations, float32 or bfloat16; parameters stay float32.
    emb_dim: the model's width.
    num_heads: the number of attention heads.
    num_encoder_layers: the number of encoder layers.
    num_decoder_layers: the number of decoder layers.
    head_dim: the size of one head.
    mlp_dim: the feed-forward block's hidden size.
    mlp_activations: ('relu',) for T5 1.0, ('gelu', 'linear') for T5 1.1.
    dropout_rate: the rate of every dropout.
    logits_via_embedding: whether the output layer is the embedding table (T5 1.0).
    float32_attention_logits: whether attention logits and softmax are float32 under bfloat16.
    scale_attn_logits: whether the input of the query projection is divided by √head_dim.
    remat_policy: what a layer saves for its backward pass; see `layer_stack.remat_layer`.
    decoder_expert_layer_period: the decoder's `expert_layer_period`; None for the same.
    norm_epsilon: added to the mean square in norms.
    decoder_start_token_id: the token whose embedding starts the decoder. Texts still start with token 0,
      which is padding and never occurs in them.
    norm: the kind of the norms; not a field, so users cannot set it.
  """

  vocab_size: Positive
  dtype: FloatDType = jnp.float32
  emb_dim: Positive = 512
  num_heads: Positive = 8
  num_encoder_layers: NonNegative = 6
  num_decoder_layers: NonNegative = 6
  head_dim: Positive = 64
  mlp_dim: Positive = 2048
  mlp_activations: Sequence[str] = ("relu",)
  dropout_rate: Rate = 0.1
  logits_via_embedding: bool = False
  float32_attention_logits: bool = False
  scale_attn_logits: bool = False
  remat_policy: RematPolicy = "none"
  decoder_expert_layer_period: Positive | None = None
  norm_epsilon: PositiveNumber = 1e-6
  decoder_start_token_id: NonNegative = 0

  norm: ClassVar[str] = "rms"


def replace_config(model: Any, **changes: Any) -> Any:
  """Returns a copy of a model whose module has these other values in its config."""
  changed = copy.copy(model)
  changed.module = model.module.clone(config=dataclasses.replace(model.network_config, **changes))
  return changed
