"""Which kernel computes attention, why, and the calls of the fused ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from flax.linen import partitioning as flax_partitioning
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from rosetta_t5.kernels.flash_attention import Segments, flash_attention


class KernelChoice(NamedTuple):
  """A kernel's name, and why it was chosen."""

  name: str
  why: str


@struct.dataclass
class SegmentMask:
  """A mask in the few numbers that fused kernels take: one sees one's own segment.

  Attributes:
    query_BT: each query's segment; 0 is padding.
    key_BS: each key's.
    causal: whether a query sees no key after it.
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
    return KernelChoice("xla", "auto: no fused kernel has been measured to be faster yet")
  if name == "cudnn":
    _check_cudnn(config)
  if name == "flash" and _is_interpreted():
    return KernelChoice("flash", "set; interpreted, as there is no GPU: slow")
  return KernelChoice(name, "set")


def is_fused(config: Any) -> bool:
  """Returns whether a fused kernel computes attention of whole sequences; a step of decoding never."""
  return choose_attention_kernel(config).name != "xla"


def segment_mask(
  config: Any,
  real_queries: Bool[Array, "B T"],
  real_keys: Bool[Array, "B S"],
  query_segments: Int[Array, "B T"] | None = None,
  key_segments: Int[Array, "B S"] | None = None,
  causal: bool = False,
) -> SegmentMask:
  """Returns the mask for the config's fused kernel.

  Args:
    config: a `T5Config`.
    real_queries: which queries are not padding.
    real_keys: which keys are not.
    query_segments: which packed example each query belongs to; None if rows are not packed.
    key_segments: the same for keys.
    causal: whether a query sees no key after it.

  Raises:
    ValueError: the kernel cannot compute it.
  """
  kernel = choose_attention_kernel(config).name
  packed = query_segments is not None and key_segments is not None
  if kernel == "cudnn" and packed:
    raise ValueError(
      f"{type(config).__name__}.attention_kernel = 'cudnn' takes no packed examples: set it to "
      "'flash', or train/DatasetConfig.pack = False"
    )
  if kernel == "cudnn" and (real_queries.shape[1] % 2 or real_keys.shape[1] % 2):
    raise ValueError(
      f"{type(config).__name__}.attention_kernel = 'cudnn' trains with a bias at even lengths only, "
      f"not {real_queries.shape[1]} and {real_keys.shape[1]}: change TASK_FEATURE_LENGTHS, or set it to "
      "'flash'"
    )
  if query_segments is None or key_segments is None:
    query_segments, key_segments = jnp.ones_like(real_queries), jnp.ones_like(real_keys)
  query = jnp.where(real_queries, query_segments, 0)
  key = jnp.where(real_keys, key_segments, 0)
  return SegmentMask(query.astype(jnp.int32), key.astype(jnp.int32), causal)


def fused_attention(
  kernel: str,
  q_BTHK: Float[Array, "B T H K"],
  k_BSHK: Float[Array, "B S H K"],
  v_BSHK: Float[Array, "B S H K"],
  bias_1HTS: Float[Array, "1 H T S"] | None,
  mask: SegmentMask,
  value_scale_BHS: Float[Array, "B H S"] | None = None,
) -> Float[Array, "B T H K"]:
  """Returns what `kernels.attention.xla_attention` returns, by the fused kernel of that name.

  Args:
    kernel: `flash` or `cudnn`.
    q_BTHK: queries.
    k_BSHK: keys.
    v_BSHK: values.
    bias_1HTS: added to the logits.
    mask: which query sees which key. For cuDNN padding stands at the end: a gap within a row makes NaN.
    value_scale_BHS: a factor on each head's value at each key, dropout's.
  """
  if value_scale_BHS is not None:
    v_BSHK = v_BSHK * value_scale_BHS.transpose(0, 2, 1)[..., None].astype(v_BSHK.dtype)
  if kernel == "cudnn":
    return _cudnn_attention(q_BTHK, k_BSHK, v_BSHK, bias_1HTS, mask)
  return _flash_attention_on_every_device(q_BTHK, k_BSHK, v_BSHK, bias_1HTS, mask)


def _cudnn_attention(
  q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, bias_1HTS: Array | None, mask: SegmentMask
) -> Array:
  # Lengths, as a mask would be written out as [B, H, T, S]. A row of padding alone counts as one
  # token: with none, its outputs would be NaN. The bias is small and shared by the layers, so the
  # check costs next to nothing there; without one, keys and values come from a stack that has one.
  if bias_1HTS is not None:
    bias_1HTS += nan_where_padding_has_tokens_after_it(mask).astype(bias_1HTS.dtype)
  return jax.nn.dot_product_attention(
    q_BTHK,
    k_BSHK,
    v_BSHK,
    bias=bias_1HTS,
    scale=1.0,
    is_causal=mask.causal,
    query_seq_lengths=_length(mask.query_BT),
    key_value_seq_lengths=_length(mask.key_BS),
    implementation="cudnn",
  )


def nan_where_padding_has_tokens_after_it(mask: SegmentMask) -> Float[Array, ""]:
  """Returns 0; NaN for a batch that lengths cannot describe: a run stops sooner than it learns wrong."""
  has_gap: Any = False
  for segments_BT in (mask.query_BT, mask.key_BS):
    has_gap |= jnp.any((segments_BT[:, 1:] > 0) & (segments_BT[:, :-1] == 0))
  return jnp.where(has_gap, jnp.nan, 0.0)


def _length(segments_BT: Array) -> Array:
  """Returns each row's length up to its last token, at least 1."""
  ends_T = jnp.arange(1, segments_BT.shape[1] + 1, dtype=jnp.int32)
  return jnp.max(jnp.where(segments_BT > 0, ends_T[None], 1), axis=1)


def _flash_attention_on_every_device(
  q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, bias_1HTS: Array | None, mask: SegmentMask
) -> Array:
  """Each device computes its own examples and heads: the compiler cannot split a Triton kernel."""

  def one_device(
    q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, bias_1HTS: Array | None, *ids: Array
  ) -> Array:
    return flash_attention(
      q_BTHK, k_BSHK, v_BSHK, bias_1HTS, Segments(*ids), mask.causal, _is_interpreted()
    )

  mesh = jax.sharding.get_abstract_mesh()
  operands = (q_BTHK, k_BSHK, v_BSHK, bias_1HTS, mask.query_BT, mask.key_BS)
  if mesh.empty or mesh.size == 1:
    return one_device(*operands)
  batch = _axis_that_divides("batch", q_BTHK.shape[0], mesh)
  heads = _axis_that_divides("heads", q_BTHK.shape[2], mesh)
  spec = PartitionSpec(batch, None, heads)
  bias_spec = None if bias_1HTS is None else PartitionSpec(None, heads)
  ids = PartitionSpec(batch)
  sharded = jax.shard_map(
    one_device,
    in_specs=(spec, spec, spec, bias_spec, ids, ids),
    out_specs=spec,
    check_vma=False,  # Pallas kernels do not tell over which axes their results vary
  )
  return sharded(*operands)


def _axis_that_divides(logical_axis: str, size: int, mesh: Any) -> Any:
  """Returns the mesh axis that the rules name for it; None if it does not divide `size`."""
  (axis,) = flax_partitioning.logical_to_mesh_axes((logical_axis,)) or (None,)
  names = (axis,) if isinstance(axis, str) else axis or ()
  devices = 1
  for name in names:
    devices *= mesh.shape[name]
  return axis if size % devices == 0 else None


def _is_interpreted() -> bool:
  return jax.default_backend() != "gpu"


def _check_cudnn(config: Any) -> None:
  if jax.default_backend() != "gpu":
    raise ValueError(
      f"{type(config).__name__}.attention_kernel = 'cudnn' needs an NVIDIA GPU, and jax runs on "
      f"{jax.default_backend()}: set it to 'auto'"
    )
  if jnp.dtype(config.dtype) != jnp.bfloat16:
    raise ValueError(
      f"{type(config).__name__}.attention_kernel = 'cudnn' computes in bfloat16, but its dtype is "
      f"{jnp.dtype(config.dtype).name}: set dtype = 'bfloat16', or attention_kernel = 'xla'"
    )
  if config.head_dim % 8:
    raise ValueError(
      f"{type(config).__name__}.attention_kernel = 'cudnn' needs a head_dim that is a multiple of 8, "
      f"not {config.head_dim}: set attention_kernel = 'xla'"
    )
