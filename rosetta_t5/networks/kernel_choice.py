"""The choice of the attention kernel, the masks for it, and the calls of the fused kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from rosetta_t5.kernels.context_attention import context_attention
from rosetta_t5.kernels.flash_attention import flash_attention
from rosetta_t5.kernels.flash_kernels import Segments
from rosetta_t5.networks.layers.positions import make_boolean_mask
from rosetta_t5.parallel.axis_rules import constrain, context_shards, dividing_axes, target_device
from rosetta_t5.parallel.mesh import CONTEXT_AXIS


class KernelChoice(NamedTuple):
  """The name of an attention kernel and the reason for its choice."""

  name: str
  reason: str


@struct.dataclass
class SegmentMask:
  """A compact mask for fused kernels: a query sees the keys of its own segment.

  Attributes:
    query_BT: each query's segment; 0 is padding.
    key_BS: each key's segment.
    causal: whether a query does not see the keys after it.
  """

  query_BT: Int[Array, "B T"]
  key_BS: Int[Array, "B S"]
  causal: bool = struct.field(pytree_node=False, default=False)


def choose_attention_kernel(config: Any) -> KernelChoice:
  """Returns the kernel for a `T5Config` on this machine's devices.

  Raises:
    ValueError: the kernel that the config names cannot compute this model here.
  """
  name = getattr(config, "attention_kernel", "xla")
  if name == "auto":
    where = "where it has been measured" if target_device().platform == "gpu" else "on a GPU"
    return KernelChoice("xla", f"auto: another kernel is chosen only {where}")
  if name == "cudnn":
    _check_cudnn(config)
  if name == "flash" and _is_interpreted():
    return KernelChoice("flash", "set; interpreted, because there is no GPU: slow")
  return KernelChoice(name, "set")


def make_mask(
  config: Any,
  real_queries: Bool[Array, "B T"],
  real_keys: Bool[Array, "B S"],
  query_segments: Int[Array, "B T"] | None = None,
  key_segments: Int[Array, "B S"] | None = None,
  causal: bool = False,
  prefix: Int[Array, "B T"] | None = None,
  use_fused_kernel: bool = True,
) -> Bool[Array, "B 1 T S"] | SegmentMask:
  """Returns the mask for the config's kernel: a `SegmentMask` for a fused one, else an array.

  Args:
    config: a `T5Config` or `TransformerConfig`.
    real_queries: which queries are not padding.
    real_keys: which keys are not padding.
    query_segments: the packed example that each query belongs to; None if rows are not packed.
    key_segments: the packed example that each key belongs to.
    causal: whether a query does not see the keys after it.
    prefix: nonzero for the positions of a causal mask that all see each other (prefix LM).
    use_fused_kernel: False for decoding, which no fused kernel computes.

  Raises:
    ValueError: the kernel does not support the mask.
  """
  if not use_fused_kernel or choose_attention_kernel(config).name == "xla":
    return make_boolean_mask(real_queries, real_keys, query_segments, key_segments, causal, prefix)
  is_packed = query_segments is not None and key_segments is not None
  _check_segment_mask(config, real_queries.shape[1], real_keys.shape[1], is_packed, prefix)
  if query_segments is None or key_segments is None:
    query_segments, key_segments = jnp.ones_like(real_queries), jnp.ones_like(real_keys)
  query = jnp.where(real_queries, query_segments, 0)
  key = jnp.where(real_keys, key_segments, 0)
  return SegmentMask(query.astype(jnp.int32), key.astype(jnp.int32), causal)


def real_tokens(mask: Bool[Array, "B 1 T S"] | SegmentMask | None) -> Bool[Array, "B T"] | None:
  """Returns which queries are not padding, according to the mask of self-attention; None for all."""
  if mask is None:
    return None
  return mask.query_BT > 0 if isinstance(mask, SegmentMask) else jnp.any(mask, axis=(1, 3))


def _check_segment_mask(
  config: Any, queries: int, keys: int, is_packed: bool, prefix: Array | None
) -> None:
  kernel = choose_attention_kernel(config).name
  problem = None
  if prefix is not None:
    problem = (
      "supports causal attention only, but inputs_bidirectional_attention lets the inputs see each "
      "other: set it to 'xla'"
    )
  elif kernel == "cudnn" and is_packed:
    problem = (
      "does not support packed examples: set it to 'flash', or train/DatasetConfig.pack = False"
    )
  elif kernel == "cudnn" and context_shards() > 1:
    problem = "does not support the mesh axis 'context': set it to 'flash'"
  elif kernel == "cudnn" and (queries % 2 or keys % 2):
    problem = (
      f"trains with a bias only if lengths are even, got {queries} and {keys}: change "
      "TASK_FEATURE_LENGTHS, or set it to 'flash'"
    )
  if problem:
    raise ValueError(f"{type(config).__name__}.attention_kernel = {kernel!r} {problem}")


def fused_attention(
  kernel: str,
  q_BTHK: Float[Array, "B T H K"],
  k_BSHK: Float[Array, "B S H K"],
  v_BSHK: Float[Array, "B S H K"],
  bias_1HTS: Float[Array, "1 H T S"] | None,
  mask: SegmentMask,
  value_scale_BHS: Float[Array, "B H S"] | None = None,
) -> Float[Array, "B T H K"]:
  """Returns the same as `kernels.xla_attention.xla_attention`, computed by a fused kernel.

  Args:
    kernel: `flash` or `cudnn`.
    q_BTHK: queries.
    k_BSHK: keys.
    v_BSHK: values.
    bias_1HTS: added to the logits.
    mask: which query sees which key. For cuDNN padding must be at the end of a row; padding before a
      token makes the result NaN.
    value_scale_BHS: a factor for each head's value at each key, which carries dropout.
  """
  if value_scale_BHS is not None:
    v_BSHK = v_BSHK * value_scale_BHS.transpose(0, 2, 1)[..., None].astype(v_BSHK.dtype)
  if kernel == "cudnn":
    return _cudnn_attention(q_BTHK, k_BSHK, v_BSHK, bias_1HTS, mask)
  return _sharded_flash_attention(q_BTHK, k_BSHK, v_BSHK, bias_1HTS, mask)


def _cudnn_attention(
  q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, bias_1HTS: Array | None, mask: SegmentMask
) -> Array:
  # The mask is passed as lengths, because a mask array would be expanded to [B, H, T, S]. A row that
  # is all padding counts as one token, since its outputs would otherwise be NaN. The check is added
  # to the bias because that is small and shared by the layers, or to the queries of a decoder without
  # one. In cross-attention, keys and values come from a stack of layers that has it.
  check = nan_if_padding_precedes_tokens(mask).astype(q_BTHK.dtype)
  if bias_1HTS is not None:
    bias_1HTS += check.astype(bias_1HTS.dtype)
  elif mask.causal:
    q_BTHK += check
  return jax.nn.dot_product_attention(
    q_BTHK,
    k_BSHK,
    v_BSHK,
    bias=bias_1HTS,
    scale=1.0,
    is_causal=mask.causal,
    query_seq_lengths=row_lengths(mask.query_BT),
    key_value_seq_lengths=row_lengths(mask.key_BS),
    implementation="cudnn",
  )


def nan_if_padding_precedes_tokens(mask: SegmentMask) -> Float[Array, ""]:
  """Returns 0, or NaN for a batch that lengths cannot describe, so that the run stops."""
  has_gap: Any = False
  for segments_BT in (mask.query_BT, mask.key_BS):
    has_gap |= jnp.any((segments_BT[:, 1:] > 0) & (segments_BT[:, :-1] == 0))
  return jnp.where(has_gap, jnp.nan, 0.0)


def row_lengths(segments_BT: Array) -> Array:
  """Returns each row's length up to its last token, at least 1."""
  ends_T = jnp.arange(1, segments_BT.shape[1] + 1, dtype=jnp.int32)
  return jnp.max(jnp.where(segments_BT > 0, ends_T[None], 1), axis=1)


def gather_keys(
  k_BSHK: Float[Array, "B S H K"],
  v_BSHK: Float[Array, "B S H K"],
  bias_1HTS: Float[Array, "#B H T S"] | None,
  mask_B1TS: Bool[Array, "#B 1 T S"] | None,
) -> tuple[Array, Array, Array | None, Array | None]:
  """Returns XLA's operands of attention such that each device computes its own positions' queries.

  Without a mesh axis `context` these are the given arrays.
  """
  if context_shards() == 1:
    return k_BSHK, v_BSHK, bias_1HTS, mask_B1TS
  k_BSHK, v_BSHK = (
    constrain(x_BSHK, ("batch", None, "heads", "kv")) for x_BSHK in (k_BSHK, v_BSHK)
  )
  if bias_1HTS is not None:
    bias_1HTS = constrain(bias_1HTS, (None, "heads", "length", None))
  if mask_B1TS is not None:
    mask_B1TS = constrain(mask_B1TS, ("batch", None, "length", None))
  return k_BSHK, v_BSHK, bias_1HTS, mask_B1TS


def _sharded_flash_attention(
  q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, bias_1HTS: Array | None, mask: SegmentMask
) -> Array:
  """Runs the kernel on each device's examples, heads and queries.

  XLA cannot partition a Triton kernel. Devices that share a row gather its keys and values.
  """
  mesh = jax.sharding.get_abstract_mesh()
  batch, heads = dividing_axes(("batch", "heads"), (q_BTHK.shape[0], q_BTHK.shape[2]))
  is_split = context_shards(q_BTHK.shape[1], k_BSHK.shape[1]) > 1

  def attend(q: Array, k: Array, v: Array, bias: Array | None, *segments: Array) -> Array:
    interpret = _is_interpreted()
    if is_split:
      whole = Segments(*segments)
      return context_attention(q, k, v, bias, whole, CONTEXT_AXIS, mask.causal, interpret)
    return flash_attention(q, k, v, bias, Segments(*segments), mask.causal, interpret)

  operands = (q_BTHK, k_BSHK, v_BSHK, bias_1HTS, mask.query_BT, mask.key_BS)
  if mesh.empty or mesh.size == 1:
    return attend(*operands)
  length = CONTEXT_AXIS if is_split else None
  spec, segments_spec = PartitionSpec(batch, length, heads), PartitionSpec(batch)
  bias_spec = None if bias_1HTS is None else PartitionSpec(None, heads, length)
  sharded = jax.shard_map(
    attend,
    in_specs=(spec, spec, spec, bias_spec, segments_spec, segments_spec),
    out_specs=spec,
    check_vma=False,  # Pallas kernels do not declare over which mesh axes their results vary
  )
  return sharded(*operands)


def _is_interpreted() -> bool:
  return target_device().platform != "gpu"


def _check_cudnn(config: Any) -> None:
  problem = None
  if (platform := target_device().platform) != "gpu":
    problem = f"needs an NVIDIA GPU, but jax runs on {platform}: set it to 'auto'"
  elif jnp.dtype(config.dtype) != jnp.bfloat16:
    problem = (
      f"computes in bfloat16, but dtype is {jnp.dtype(config.dtype).name}: set dtype = 'bfloat16', "
      "or attention_kernel = 'xla'"
    )
  elif config.head_dim % 8:
    problem = f"needs a head_dim that is a multiple of 8, got {config.head_dim}: set attention_kernel = 'xla'"
  if problem:
    raise ValueError(f"{type(config).__name__}.attention_kernel = 'cudnn' {problem}")
