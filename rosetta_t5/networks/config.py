"""The sizes and settings of a network: one config for all families, and the kinds of its layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
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
from rosetta_t5.kernels.attention import KERNELS, Window
from rosetta_t5.networks.expert_settings import ROUTERS, ExpertSettings
from rosetta_t5.networks.layers.dense import Initializer
from rosetta_t5.networks.layers.matmuls import Matmul
from rosetta_t5.networks.layers.norms import NORMS
from rosetta_t5.networks.layers.stack import REMAT_POLICIES

ATTENTION_KERNELS = ("auto", *KERNELS)
POSITIONS = ("relative", "learned", "rotary")
LAYER_PATTERN = ("global", "local")
_CHOICES = {
  "attention_kernel": ATTENTION_KERNELS,
  "remat_policy": tuple(REMAT_POLICIES),
  "router": ROUTERS,
  "positions": POSITIONS,
  "norm": tuple(NORMS),
}


@struct.dataclass(kw_only=True)
class NetworkConfig(ExpertSettings):
  """The sizes and settings of any network; `ExpertSettings` has those of mixtures of experts.

  Scripts set the boolean switches to 1 or 0; these become True or False.

  Attributes:
    vocab_size: the number of rows of the embedding table; at least the vocabulary's size.
    dtype: the type of activations, float32 or bfloat16; parameters stay float32.
    emb_dim: the model's width.
    num_heads: the number of attention heads.
    head_dim: the size of one head.
    mlp_dim: the feed-forward block's hidden size.
    mlp_activations: ('relu',) or ('gelu',) for a plain block, ('gelu', 'linear') for a gated one.
    dropout_rate: the rate of every dropout.
    logits_via_embedding: whether the output layer is the embedding table (T5 1.0, GPT).
    float32_attention_logits: whether attention logits and softmax are float32 under bfloat16.
    scale_attn_logits: whether the input of the query projection is divided by √head_dim.
    remat_policy: what a layer saves for its backward pass; see `stack.rematerialize`.
    transpose_batch_sequence: whether activations are [length, batch, ...] inside the layers. Results
      do not change.
    fuse_qkv_params: whether one matmul computes queries, keys and values (in cross-attention, keys
      and values). Parameters and checkpoints do not change.
    attention_kernel: auto, xla, cudnn or flash; see `kernels.attention`.
    num_kv_heads: the number of heads of keys and values, each shared by a group of query heads (grouped
      queries, Ainslie et al. 2023); None for `num_heads`.
    scale_queries: whether queries, rather than the query kernel's initial values, are divided by
      √head_dim.
    query_scale: what queries are multiplied by, in place of 1/√head_dim; implies `scale_queries`.
    qk_norm: whether each head's queries and keys are normalized, before positions are added.
    attention_softcap: the soft limit c of attention logits, which become c·tanh(x/c) (Gemma 2); None for none.
    logit_softcap: the soft limit of the output layer's logits.
    use_bias: whether all projections except the output layer have biases.
    qkv_bias: whether the projections to queries, keys and values have biases.
    attention_bias: whether all four projections of attention have biases.
    mlp_bias: whether the projections of feed-forward blocks have biases.
    positions: 'relative' adds T5's bias to attention logits; 'learned' adds a learned vector to each
      token's embedding; 'rotary' rotates queries and keys.
    num_buckets: the number of buckets of T5's relative bias.
    max_distance: the distance at which the last of these buckets begins.
    bias_per_layer: whether each layer has a relative bias of its own (scalable T5, UMT5).
    max_length: the number of learned position vectors.
    rope_theta: the base of the frequencies of rotary positions.
    rope_interleaved: which features are rotated together; see `Rope`.
    rope_scaling: Hugging Face's dictionary of that name; see `Rope`. None for no scaling.
    local_rope_theta: the base in local layers, whose frequencies are then not scaled; None for the frequencies
      of global layers.
    layer_pattern: the kinds of the layers, 'global' or 'local', repeated up to the number of layers.
    window: in local layers, how many tokens a token sees in each direction, itself included.
    window_ahead: in local layers of an encoder, how many tokens a token sees from its own position onwards,
      itself included; None for `window`.
    global_block_size: the number of tokens in a block whose sum is one more key in an encoder (LongT5's
      transient global attention); None for no blocks.
    merged_attention: whether the decoder's self-attention also attends to the encoded inputs, with the
      same kernels and without positions, instead of cross-attention (T5Gemma 2). It uses XLA's kernel.
    norm: 'rms' for T5's norm; 'rms_plus_one' for RMS norm by 1 + the stored scale (Gemma); 'layer' for
      LayerNorm, with mean and bias; 'layer_without_bias' for LayerNorm without the bias (Cohere).
    norm_epsilon: added to the mean square, or to the variance.
    post_norms: whether the outputs of attention and feed-forward blocks are normalized too (Gemma 2).
    parallel_blocks: whether attention and the feed-forward block read the same input, and both outputs are
      added to it (Cohere).
    embedding_scale: what tokens' embeddings are multiplied by.
    end_of_image_id: the token that ends an image, whose embedding is not in the table (T5Gemma 2).
    shared_embedding: whether encoder and decoder have one embedding table.
    divide_tied_logits: whether logits from the embedding table are divided by √emb_dim.
    logit_scale: what logits are multiplied by.
    init_stddev: the standard deviation of all initial kernels and tables; None for T5's.
    pad_id: the token that is padding: nothing attends to it, and it has no loss.
    padding_never_follows: whether padding has probability 0.
    unused_rows: how many rows at the table's end belong to no token; they have probability 0.
    decoder_start_token_id: the token whose embedding starts the decoder's inputs; None for `pad_id`. Batches
      start with `pad_id` in any case, and the network replaces it.
    decoder_expert_layer_period: the decoder's `expert_layer_period`; None for the same.
    prompt_length: how many trained vectors precede the embedded inputs of the encoder, or of a network without
      one (prompt tuning); their width is `emb_dim`, and `embedding_scale` does not apply to them.
    prompt_init: initializer of these vectors; None for uniform values between 0 and 0.5.
    scan_layers: whether layers are scanned and their parameters stacked under `decoder/decoder`, which
      suits deep models.
    param_scan_axis: the axis that parameters are stacked along, 0 or 1.
    matmul: how the projections of attention and feed-forward blocks are computed, other than in `dtype`;
      see `layers.matmuls`. `networks.precision` sets it, not users.
    nd_kernels: whether kernels keep heads as a dimension, as in T5X's scalable T5; not a field, so users
      cannot set it.
  """

  vocab_size: Positive
  dtype: FloatDType = jnp.float32
  emb_dim: Positive = 512
  num_heads: Positive = 8
  head_dim: Positive = 64
  mlp_dim: Positive = 2048
  mlp_activations: Sequence[str] = ("relu",)
  dropout_rate: Rate = 0.1
  logits_via_embedding: bool = False
  float32_attention_logits: bool = False
  scale_attn_logits: bool = False
  remat_policy: Annotated[str, one_of(REMAT_POLICIES)] = "none"
  transpose_batch_sequence: bool = False
  fuse_qkv_params: bool = False
  attention_kernel: Annotated[str, one_of(ATTENTION_KERNELS)] = "auto"
  num_kv_heads: Positive | None = None
  scale_queries: bool = False
  query_scale: PositiveNumber | None = None
  qk_norm: bool = False
  attention_softcap: PositiveNumber | None = None
  logit_softcap: PositiveNumber | None = None
  use_bias: bool = False
  qkv_bias: bool = False
  attention_bias: bool = False
  mlp_bias: bool = False
  positions: Annotated[str, one_of(POSITIONS)] = "relative"
  num_buckets: Positive = 32
  max_distance: Positive = 128
  bias_per_layer: bool = False
  max_length: Positive = 2048
  rope_theta: PositiveNumber = 10_000.0
  rope_interleaved: bool = False
  rope_scaling: Mapping[str, Any] | None = None
  local_rope_theta: PositiveNumber | None = None
  layer_pattern: Sequence[str] = ("global",)
  window: Positive | None = None
  window_ahead: Positive | None = None
  global_block_size: Positive | None = None
  merged_attention: bool = False
  norm: Annotated[str, one_of(NORMS)] = "rms"
  norm_epsilon: PositiveNumber = 1e-6
  post_norms: bool = False
  parallel_blocks: bool = False
  embedding_scale: PositiveNumber = 1.0
  end_of_image_id: NonNegative | None = None
  shared_embedding: bool = True
  divide_tied_logits: bool = True
  logit_scale: PositiveNumber = 1.0
  init_stddev: PositiveNumber | None = None
  pad_id: NonNegative = 0
  padding_never_follows: bool = False
  unused_rows: NonNegative = 0
  decoder_start_token_id: NonNegative | None = None
  decoder_expert_layer_period: Positive | None = None
  prompt_length: NonNegative = 0
  prompt_init: Initializer | None = None
  scan_layers: bool = False
  param_scan_axis: int = 1
  matmul: Matmul | None = None

  nd_kernels: ClassVar[bool] = False

  def __post_init__(self) -> None:
    """Refuses settings that the layers do not support or that contradict each other."""
    for switch in ("transpose_batch_sequence", "fuse_qkv_params"):
      if (value := getattr(self, switch)) not in (0, 1):
        raise ValueError(f"{self.name}.{switch} = {value!r} must be True or False, or 1 or 0")
      object.__setattr__(self, switch, bool(value))
    for field, known in _CHOICES.items():
      check_one_of(f"{self.name}.{field}", getattr(self, field), known)
    for kind in self.layer_pattern:
      check_one_of(f"{self.name}.layer_pattern", kind, LAYER_PATTERN)
    if contradiction := self._contradiction():
      raise ValueError(f"{self.name}.{contradiction}")

  def _contradiction(self) -> str | None:
    """Returns the rest of an error message, which begins with a field's name; None if the settings are valid."""
    heads, groups, window, size = self.num_heads, self.kv_heads, self.window, self.global_block_size
    pattern, is_relative = tuple(self.layer_pattern), self.positions == "relative"
    has_encoder = self.layers_of("encoder") > 0
    contradictions = {
      "dtype = 'float16' overflows in T5's feed-forward layers: use 'bfloat16', or 'float32'": (
        jnp.dtype(self.dtype) == jnp.float16
      ),
      f"router = {self.router!r} needs at least 2 experts, got num_experts = 1: set router = 'switch'": (
        self.router != "switch" and self.num_experts == 1
      ),
      "router must be 'switch' or 'top_2' in a decoder, got 'expert_choice': the experts of a token would "
      "depend on later tokens, which do not exist when the model decodes": (
        self.router == "expert_choice" and not has_encoder
      ),
      f"num_kv_heads = {groups} must divide num_heads = {heads}, since each key head is shared by a "
      "group of query heads: set a divisor, or None": heads % groups != 0,
      "head_dim must be even for positions = 'rotary', which rotates pairs of features, got "
      f"{self.head_dim}: set an even number, or positions = 'learned'": (
        self.positions == "rotary" and self.head_dim % 2 == 1
      ),
      "scale_queries (or query_scale) and scale_attn_logits would both divide by √head_dim: set one": (
        self.scale_attn_logits and (self.scale_queries or self.query_scale is not None)
      ),
      f"window = {window} and layer_pattern = {pattern} contradict each other: local layers need a window, "
      "and a window local layers, such as layer_pattern = ('global', 'local')": (
        (window is not None) != ("local" in pattern)
      ),
      f"local_rope_theta = {self.local_rope_theta} needs positions = 'rotary' and local layers: set it to None": (
        self.local_rope_theta is not None and (window is None or self.positions != "rotary")
      ),
      f"global_block_size = {size} needs an encoder with positions = 'relative' and bias_per_layer = False: "
      "set it to None": (
        size is not None and not (has_encoder and is_relative and not self.bias_per_layer)
      ),
      "merged_attention = True has no relative bias to encoded inputs: set positions = 'rotary'": (
        self.merged_attention and is_relative
      ),
      "parallel_blocks = True needs a decoder-only network without post_norms: set it to False": (
        self.parallel_blocks and (self.post_norms or has_encoder)
      ),
      f"param_scan_axis must be 0 or 1, got {self.param_scan_axis!r}: the scale of a norm has one dimension, so "
      "layers can be stacked before or after it": self.param_scan_axis not in (0, 1),
    }
    return next((text for text, is_wrong in contradictions.items() if is_wrong), None)

  @property
  def name(self) -> str:
    """The name of the config in gin files, which messages start with."""
    return type(self).__name__.removeprefix("Scalable")

  @property
  def kv_heads(self) -> int:
    """The number of heads of keys and values."""
    return self.num_kv_heads or self.num_heads

  @property
  def windows(self) -> Window | None:
    """How many tokens local layers see before and after a token, itself included in both."""
    return None if self.window is None else (self.window, self.window_ahead or self.window)

  @property
  def kernel(self) -> str:
    """The attention kernel in use: `xla` if there are blocks, or while `auto` has not been replaced by a run."""
    is_xla = self.attention_kernel == "auto" or self.global_block_size is not None
    return "xla" if is_xla else self.attention_kernel

  @property
  def row_axes(self) -> tuple[str, str]:
    """The logical axes of the first two dimensions of activations inside the layers."""
    return ("length", "batch") if self.transpose_batch_sequence else ("batch", "length")

  @property
  def sides(self) -> tuple[str, ...]:
    """The stacks of layers that the network has."""
    return ("encoder", "decoder") if self.layers_of("encoder") else ("decoder",)

  def layers_of(self, side: str) -> int:
    """Returns the number of layers of the stack `side`, "encoder" or "decoder"."""
    raise NotImplementedError

  def of_side(self, side: str) -> NetworkConfig:
    """Returns the config of the stack `side`, "encoder" or "decoder"."""
    return self


@struct.dataclass(kw_only=True)
class T5Config(NetworkConfig):
  """The sizes and settings of a T5 model; `NetworkConfig` has those that all networks share.

  Attributes:
    num_encoder_layers: the number of encoder layers.
    num_decoder_layers: the number of decoder layers.
    encoder: the fields that have other values in the encoder, such as {'emb_dim': 3584} (T5Gemma 9b-2b).
  """

  num_encoder_layers: NonNegative = 6
  num_decoder_layers: NonNegative = 6
  encoder: Mapping[str, Any] | None = None

  def __post_init__(self) -> None:
    """Refuses settings that the layers do not support or that contradict each other."""
    super().__post_init__()
    for name in self.encoder or {}:
      check_one_of(f"{self.name}.encoder", name, [field.name for field in dataclasses.fields(self)])
    encoder = self.of_side("encoder")
    sizes = [(cfg.vocab_size, cfg.emb_dim) for cfg in (encoder, self)]
    if self.shared_embedding and sizes[0] != sizes[1]:
      raise ValueError(
        f"{self.name}.shared_embedding = True needs one vocab_size and emb_dim for encoder and decoder, "
        f"got {sizes[0]} and {sizes[1]}: set it to False"
      )

  def layers_of(self, side: str) -> int:
    """Returns the number of layers of the stack `side`, "encoder" or "decoder"."""
    return self.num_encoder_layers if side == "encoder" else self.num_decoder_layers

  def of_side(self, side: str) -> NetworkConfig:
    """Returns the config of the stack `side`, "encoder" or "decoder"."""
    if side == "decoder" or not self.encoder:
      return self
    return dataclasses.replace(self, **{**self.encoder, "encoder": None})


@struct.dataclass(kw_only=True)
class ScalableT5Config(T5Config):
  """The sizes and settings of T5X's scalable T5, whose checkpoints have another parameter tree.

  Each layer has a relative bias of its own, attention kernels keep heads as a dimension, and layers are
  scanned with stacked parameters, so that the compiled program is as small for 24 layers as for 2.
  Without `scan_layers` each layer has parameters of its own, `layers_0`, …; initial values differ
  between the two, as in T5X.
  """

  scan_layers: bool = True
  bias_per_layer: bool = True

  nd_kernels: ClassVar[bool] = True


ScalableT5Config.__name__ = "T5Config"  # As gin files name it, network.T5Config


@struct.dataclass(kw_only=True)
class TransformerConfig(NetworkConfig):
  """The sizes and settings of a decoder-only model; `NetworkConfig` has those that all networks share.

  The defaults are T5X's decoder-only model, which has T5's layers. GPT-2 and GPT-3 (Radford et al.
  2019, Brown et al. 2020) use positions 'learned', norm 'layer', use_bias, scale_queries, and
  divide_tied_logits = False.

  Attributes:
    num_layers: the number of layers.
  """

  num_layers: NonNegative = 6

  def layers_of(self, side: str) -> int:
    """Returns the number of layers of the stack `side`; the encoder has none."""
    return self.num_layers if side == "decoder" else 0
