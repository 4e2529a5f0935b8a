"""Which query sees which key, and the kernels that compute attention.

`KERNELS` is the registry. A kernel's `refuses` is the only rule of what it can compute: its text is the
error of a run that asks for the kernel, and the filter of those that `attention_kernel = 'auto'` measures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from rosetta_t5.kernels.context_attention import context_attention, splits_heads
from rosetta_t5.kernels.flash_attention import flash_attention
from rosetta_t5.kernels.flash_kernels import FlashOptions, Segments, Window
from rosetta_t5.kernels.xla_attention import query_key_weights, xla_attention
from rosetta_t5.parallel import placement
from rosetta_t5.parallel.axis_rules import count_parts
from rosetta_t5.parallel.mesh import CONTEXT_AXIS, axis_names


@struct.dataclass
class Visibility:
  """Which query sees which key: those of its own segment, limited by causality and a window.

  Attributes:
    query_BT: each query's segment; 0 is padding.
    key_BS: each key's segment.
    prefix_BT: nonzero for the positions of a causal row that all see each other (prefix LM); None for
      no such positions.
    causal: whether a query does not see the keys after it.
    window: how many keys a query sees before and after it, itself included in both; None for all.
    packed: whether a row may have segments other than 0 and 1.
  """

  query_BT: Int[Array, "B T"]
  key_BS: Int[Array, "B S"]
  prefix_BT: Int[Array, "B T"] | None = None
  causal: bool = struct.field(pytree_node=False, default=False)
  window: Window | None = struct.field(pytree_node=False, default=None)
  packed: bool = struct.field(pytree_node=False, default=False)

  @classmethod
  def of_tokens(
    cls,
    real_BT: Bool[Array, "B T"],
    real_BS: Bool[Array, "B S"],
    segments_BT: Int[Array, "B T"] | None = None,
    segments_BS: Int[Array, "B S"] | None = None,
    **options: Any,
  ) -> Visibility:
    """Returns the visibility of rows of tokens.

    Args:
      real_BT: which queries are not padding.
      real_BS: which keys are not padding.
      segments_BT: the packed example that each query belongs to; None if rows are not packed.
      segments_BS: the packed example that each key belongs to.
      **options: `prefix_BT`, `causal` and `window`.
    """
    if segments_BT is None or segments_BS is None:
      return cls(real_BT.astype(jnp.int32), real_BS.astype(jnp.int32), **options)
    query_BT, key_BS = jnp.where(real_BT, segments_BT, 0), jnp.where(real_BS, segments_BS, 0)
    return cls(query_BT.astype(jnp.int32), key_BS.astype(jnp.int32), packed=True, **options)

  def mask(self) -> Bool[Array, "B 1 T S"]:
    """Returns True where a query sees a key."""
    visible_BTS = (self.query_BT > 0)[:, :, None] & (self.key_BS > 0)[:, None]
    query_T1 = jnp.arange(self.query_BT.shape[1])[:, None]
    distance_TS = query_T1 - jnp.arange(self.key_BS.shape[1])[None]
    if self.causal:
      causal_BTS = (distance_TS >= 0)[None]
      if self.prefix_BT is not None:
        in_prefix_BT = self.prefix_BT != 0
        causal_BTS |= in_prefix_BT[:, :, None] & in_prefix_BT[:, None]
      visible_BTS &= causal_BTS
    if self.window is not None:
      before, after = self.window
      visible_BTS &= ((distance_TS < before) & (-distance_TS < after))[None]
    if self.packed:
      visible_BTS &= self.query_BT[:, :, None] == self.key_BS[:, None]
    return visible_BTS[:, None]


def real_queries(visible: Visibility | Bool[Array, "B 1 T S"] | None) -> Bool[Array, "B T"] | None:
  """Returns which queries of self-attention are not padding; None for all."""
  if isinstance(visible, Visibility):
    return visible.query_BT > 0
  return None if visible is None else jnp.any(visible, axis=(1, 3))


@dataclasses.dataclass(frozen=True)
class AttentionCase:
  """One kind of attention of a step, as one device computes it.

  Attributes:
    queries: the number of queries in a row.
    keys: the number of keys in a row.
    heads: the number of heads of queries.
    kv_heads: the number of heads of keys and values.
    head_dim: the size of a head.
    dtype: the type of queries, keys and values.
    causal: whether a query does not see the keys after it.
    has_bias: whether a learned bias is added to the logits.
    packed: whether a row contains several examples.
    has_prefix: whether the first positions of a causal row see each other.
    window: see `Visibility`.
    softcap: see `xla_attention`.
    context_shards: into how many parts rows are split over devices.
    batch: the number of examples.
    layers: the number of layers that compute it.
  """

  queries: int
  keys: int
  heads: int
  kv_heads: int
  head_dim: int
  dtype: str
  causal: bool = False
  has_bias: bool = False
  packed: bool = False
  has_prefix: bool = False
  window: Window | None = None
  softcap: float | None = None
  context_shards: int = 1
  batch: int = 1
  layers: int = 1


class Operands(NamedTuple):
  """The arguments of an attention kernel, which are those of `xla_attention`.

  `visible` is what `Kernel.prepare` returns, or a mask [B or 1, 1 or H, T, S], or None.
  """

  q_BTHK: Float[Array, "B T H K"]
  k_BSGK: Float[Array, "B S G K"]
  v_BSGK: Float[Array, "B S G K"]
  bias_1HTS: Float[Array, "#B H T S"] | None = None
  visible: Any = None
  value_scale_BGS: Float[Array, "B G S"] | None = None
  softcap: float | None = None
  float32_logits: bool = False

  def case(self) -> AttentionCase:
    """Returns the kind of attention; `visible` must be a `Visibility`."""
    _, queries, heads, size = self.q_BTHK.shape
    visible: Visibility = self.visible
    return AttentionCase(
      queries=queries,
      keys=self.k_BSGK.shape[1],
      heads=heads,
      kv_heads=self.k_BSGK.shape[2],
      head_dim=size,
      dtype=self.q_BTHK.dtype.name,
      causal=visible.causal,
      has_bias=self.bias_1HTS is not None,
      packed=visible.packed,
      has_prefix=visible.prefix_BT is not None,
      window=visible.window,
      softcap=self.softcap,
      context_shards=placement.context_shards(),
    )

  def weights(self) -> Float[Array, "B H T S"]:
    """Returns the attention weights, without dropout, as XLA's kernel computes them."""
    visible, options = self.visible, (self.float32_logits, self.softcap)
    mask = visible.mask() if isinstance(visible, Visibility) else visible
    return query_key_weights(self.q_BTHK, self.k_BSGK, self.bias_1HTS, mask, *options)

  def scaled_values(self) -> Float[Array, "B S G K"]:
    """Returns the values times their factors, which carry dropout."""
    if self.value_scale_BGS is None:
      return self.v_BSGK
    scale_BSG1 = self.value_scale_BGS.transpose(0, 2, 1)[..., None]
    return self.v_BSGK * scale_BSG1.astype(self.v_BSGK.dtype)


class Kernel(NamedTuple):
  """A way to compute the attention of whole sequences.

  Attributes:
    run: returns the attention of `Operands`, [B, T, H, K].
    refuses: returns why it cannot compute an `AttentionCase` on a device, and what to set instead; None
      if it can.
    prepare: converts a `Visibility` to what `run` takes, once for all layers.
  """

  run: Callable[[Operands], Array]
  refuses: Callable[[AttentionCase, Any], str | None]
  prepare: Callable[[Visibility], Any] = lambda visible: visible


def prepare(kernel: str, visible: Any, windows: Window | None = None) -> tuple[Any, Any]:
  """Returns a `Visibility` in the form that a kernel takes, for global and for local layers.

  The second is None without windows. A mask, or None, is returned unchanged for both.
  """
  if not isinstance(visible, Visibility):
    return visible, visible
  convert = KERNELS[kernel].prepare
  if windows is None:
    return convert(visible), None
  return convert(visible), convert(dataclasses.replace(visible, window=windows))


def attend(
  kernel: str, operands: Operands, setting: str = "attention_kernel"
) -> Float[Array, "B T H K"]:
  """Returns the attention computed by the kernel of this name.

  XLA's kernel computes what only it can: with a mask instead of a `Visibility`, or with neither.

  Args:
    kernel: a name in `KERNELS`.
    operands: what is computed.
    setting: the setting that names the kernel, for the error.

  Raises:
    ValueError: the kernel cannot compute it.
  """
  if not isinstance(operands.visible, Visibility):
    return _run_xla(operands)
  if problem := KERNELS[kernel].refuses(operands.case(), placement.target_device()):
    raise ValueError(f"{setting} = {kernel!r} {problem}")
  return KERNELS[kernel].run(operands)


def _run_xla(operands: Operands) -> Array:
  q, k, v, bias, visible, value_scale, softcap, float32_logits = operands
  mask = visible.mask() if isinstance(visible, Visibility) else visible
  if placement.context_shards() > 1:
    # Each device computes the queries of its own positions.
    k, v = (placement.constrain(x, ("batch", None, "heads", "kv")) for x in (k, v))
    if bias is not None:
      bias = placement.constrain(bias, (None, "heads", "length", None))
    if mask is not None:
      mask = placement.constrain(mask, ("batch", None, "length", None))
  return xla_attention(q, k, v, bias, mask, value_scale, float32_logits, softcap)


def _run_cudnn(operands: Operands) -> Array:
  q, k, _, bias, visible, *_ = operands
  # The mask is passed as lengths, because a mask array would be expanded to [B, H, T, S]. A row that
  # is all padding counts as one token, since its outputs would otherwise be NaN. The check is added
  # to the bias because that is small and shared by the layers, or to the queries of a decoder without
  # one. In cross-attention, keys and values come from a stack of layers that has it.
  check = _nan_if_padding_precedes_tokens(visible).astype(q.dtype)
  if bias is not None:
    bias += check.astype(bias.dtype)
  elif visible.causal:
    q += check
  return jax.nn.dot_product_attention(
    q,
    k,
    operands.scaled_values(),
    bias=bias,
    scale=1.0,
    is_causal=visible.causal,
    query_seq_lengths=_row_lengths(visible.query_BT),
    key_value_seq_lengths=_row_lengths(visible.key_BS),
    implementation="cudnn",
  )


def _nan_if_padding_precedes_tokens(visible: Visibility) -> Array:
  """Returns 0, or NaN for a batch that lengths cannot describe, so that the run stops."""
  has_gap: Any = False
  for segments_BT in (visible.query_BT, visible.key_BS):
    has_gap |= jnp.any((segments_BT[:, 1:] > 0) & (segments_BT[:, :-1] == 0))
  return jnp.where(has_gap, jnp.nan, 0.0)


def _row_lengths(segments_BT: Array) -> Array:
  """Returns each row's length up to its last token, at least 1."""
  ends_T = jnp.arange(1, segments_BT.shape[1] + 1, dtype=jnp.int32)
  return jnp.max(jnp.where(segments_BT > 0, ends_T[None], 1), axis=1)


def _run_flash(operands: Operands) -> Array:
  """Runs the kernel on each device's examples, heads and queries.

  XLA cannot partition a Triton kernel. Devices that share a row exchange positions for heads, or gather keys.
  """
  q, k, _, bias, visible, _, softcap, _ = operands
  mesh, device = placement.current().mesh, placement.target_device()
  batch, heads = placement.dividing_axes(("batch", "heads"), (q.shape[0], k.shape[2]))
  is_split = placement.context_shards(q.shape[1], k.shape[1]) > 1
  gpu = device.device_kind if device.platform == "gpu" else None
  options = FlashOptions(visible.causal, visible.window, softcap, gpu)

  def run(q: Array, k: Array, v: Array, bias: Array | None, *segments: Array) -> Array:
    if is_split:
      return context_attention(q, k, v, bias, Segments(*segments), CONTEXT_AXIS, options)
    return flash_attention(q, k, v, bias, Segments(*segments), options)

  arrays = (q, k, operands.scaled_values(), bias, visible.query_BT, visible.key_BS)
  if mesh.empty or mesh.size == 1:
    return run(*arrays)
  length = CONTEXT_AXIS if is_split else None
  spec, segments_spec = PartitionSpec(batch, length, heads), PartitionSpec(batch)
  bias_spec = None if bias is None else PartitionSpec(None, heads, length)
  local_heads = k.shape[2] // count_parts(heads, mesh.shape)
  if bias is not None and is_split and splits_heads(local_heads, placement.context_shards()):
    bias_spec = PartitionSpec(None, (*axis_names(heads), CONTEXT_AXIS))
  sharded = jax.shard_map(
    run,
    in_specs=(spec, spec, spec, bias_spec, segments_spec, segments_spec),
    out_specs=spec,
    check_vma=False,  # Pallas kernels do not declare over which mesh axes their results vary
  )
  return sharded(*arrays)


_NO_PREFIX = (
  "supports causal attention only, but inputs_bidirectional_attention lets the inputs see each other: set "
  "it to 'xla'"
)


def _cudnn_refuses(case: AttentionCase, device: Any) -> str | None:
  if device.platform != "gpu":
    return f"needs an NVIDIA GPU, but jax runs on {device.platform}: set it to 'auto'"
  if case.dtype != "bfloat16":
    return f"computes in bfloat16, but dtype is {case.dtype}: change dtype, or set it to 'flash'"
  if case.head_dim % 8 != 0:
    return f"needs a head_dim that is a multiple of 8, got {case.head_dim}: set it to 'flash'"
  if case.window is not None or case.softcap is not None:
    given = f"{case.window} and {case.softcap}"
    return f"supports no window and no softcap, got {given}: set it to 'flash'"
  if case.has_prefix:
    return _NO_PREFIX
  if case.packed:
    return "does not support packed examples: set it to 'flash', or DatasetConfig.pack to False"
  if case.context_shards > 1:
    return "does not support the mesh axis 'context': set it to 'flash'"
  if case.queries % 2 or case.keys % 2:
    lengths = f"{case.queries} and {case.keys}"
    return f"trains with a bias only if lengths are even, got {lengths}: set it to 'flash'"
  return None


def _flash_refuses(case: AttentionCase, _: Any) -> str | None:
  return _NO_PREFIX if case.has_prefix else None  # without a GPU it is interpreted


KERNELS = {
  "xla": Kernel(_run_xla, lambda case, device: None, Visibility.mask),
  "cudnn": Kernel(_run_cudnn, _cudnn_refuses),
  "flash": Kernel(_run_flash, _flash_refuses),
}
