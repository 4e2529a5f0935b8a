"""`attention_kernel = 'auto'` on a GPU: the fastest kernel that computes the same as XLA's attention.

No table says which kernel is fastest on hardware that nobody has measured, or which library computes
wrong results there. A run therefore measures the kernels on its own shapes when it starts, and stores the
result beside its compiled programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import rosetta_t5
from rosetta_t5.distributed.coordination import broadcast_text
from rosetta_t5.files import write_atomically
from rosetta_t5.kernels.fp8 import fp8_matmul
from rosetta_t5.kernels.xla_attention import xla_attention
from rosetta_t5.networks.kernel_choice import (
  KernelChoice,
  SegmentMask,
  choose_attention_kernel,
  fused_attention,
)
from rosetta_t5.networks.layers.dense import Matmul, matmul
from rosetta_t5.networks.layers.positions import make_boolean_mask
from rosetta_t5.networks.t5_config import replace_config
from rosetta_t5.parallel.mesh import CONTEXT_AXIS, MODEL_AXIS, count_batch_shards

# More examples do not change which kernel is fastest, and XLA's attention needs memory for each.
_LARGEST_BATCH = 32
_SECONDS_PER_KERNEL = 1.0
# A kernel may differ from float32 by twice as much as XLA's attention in the run's dtype.
_ERROR_RATIO, _ERROR_FLOOR = 2.0, 1e-3
_TIMEOUT_S = 600.0
_FAILED = "failed"

Attention = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class AttentionCase:
  """One kind of attention of a step, as one device computes it.

  Attributes:
    layers: the number of layers that compute it.
    batch: the number of examples.
    queries: the number of queries in a row.
    keys: the number of keys in a row.
    heads: the number of heads.
    head_dim: the size of a head.
    dtype: the type of queries, keys and values.
    causal: whether a query does not see the keys after it.
    has_bias: whether a learned bias is added to the logits.
    packed: whether a row contains several examples.
  """

  layers: int
  batch: int
  queries: int
  keys: int
  heads: int
  head_dim: int
  dtype: str
  causal: bool
  has_bias: bool
  packed: bool


def with_measured_kernel(
  model: Any, batch: Mapping[str, Any], mesh: Mapping[str, int]
) -> tuple[Any, KernelChoice | None]:
  """Replaces `attention_kernel = 'auto'` on a GPU by the fastest correct kernel.

  Returns the model and the choice; the choice is None if there was nothing to measure. Process 0
  measures, and all processes use its choice.

  Args:
    model: the model.
    batch: the shape and type of each feature of the global batch.
    mesh: the size of each mesh axis.
  """
  config = model.network_config
  if getattr(config, "attention_kernel", None) != "auto" or jax.default_backend() != "gpu":
    return model, None
  text = ""
  if jax.process_index() == 0:
    cases, names = attention_cases(config, batch, mesh), usable_kernels(model, batch, mesh)
    text = json.dumps(_stored_or(functools.partial(choose_fastest, cases, names), cases, names))
  choice = KernelChoice(*json.loads(broadcast_text(text, "attention kernel", _TIMEOUT_S)))
  return replace_config(model, attention_kernel=choice.name), choice


def attention_cases(
  config: Any, batch: Mapping[str, Any], mesh: Mapping[str, int]
) -> list[AttentionCase]:
  """Returns the kinds of attention in a step of a `T5Config` or `TransformerConfig`.

  Args:
    config: the network's config.
    batch: the shape and type of each feature of the global batch.
    mesh: the size of each mesh axis.
  """
  shards, heads = mesh.get(MODEL_AXIS, 1), config.num_heads
  size, decoder = batch["decoder_target_tokens"].shape
  make = functools.partial(
    AttentionCase,
    batch=max(1, min(size // count_batch_shards(mesh), _LARGEST_BATCH)),
    heads=heads // shards if heads % shards == 0 else heads,  # else each device computes all heads
    head_dim=config.head_dim,
    dtype=jnp.dtype(config.dtype).name,
    packed="decoder_segment_ids" in batch,
  )
  biased = getattr(config, "positions", "relative") == "relative"
  if "encoder_input_tokens" not in batch:
    return [
      make(layers=config.num_layers, queries=decoder, keys=decoder, causal=True, has_bias=biased)
    ]
  encoder = batch["encoder_input_tokens"].shape[1]
  above, below = config.num_decoder_layers, config.num_encoder_layers
  return [
    make(layers=above, queries=decoder, keys=decoder, causal=True, has_bias=biased),
    make(layers=below, queries=encoder, keys=encoder, causal=False, has_bias=biased),
    make(layers=above, queries=decoder, keys=encoder, causal=False, has_bias=False),
  ]


def usable_kernels(model: Any, batch: Mapping[str, Any], mesh: Mapping[str, int]) -> list[str]:
  """Returns the kernels that accept the model's dtype, sizes and masks; `xla` is always the first.

  Args:
    model: the model.
    batch: the shape and type of each feature of the global batch.
    mesh: the size of each mesh axis.
  """
  fused = ("flash",) if mesh.get(CONTEXT_AXIS, 1) > 1 else ("cudnn", "flash")
  return ["xla", *(name for name in fused if _can_train(model, name, batch))]


def case_program(case: AttentionCase, name: str) -> tuple[Callable[..., Any], Any]:
  """Returns one of our kernels, forward and backward, as a function, and the shapes of its inputs."""
  return _forward_and_backward(_kernel(name)), jax.eval_shape(lambda: _example(case))


def choose_fastest(
  cases: Sequence[AttentionCase],
  names: Sequence[str],
  kernels: Mapping[str, Attention] | None = None,
  seconds: float = _SECONDS_PER_KERNEL,
) -> KernelChoice:
  """Returns the kernel that is fastest over all layers among those that are correct in every case.

  Args:
    cases: what a step computes.
    names: the candidates; the first one is chosen if none is better.
    kernels: the candidates' functions (q, k, v, bias, mask) → output; None for ours.
    seconds: how long each kernel is timed.
  """
  kernels = kernels or {name: _kernel(name) for name in names}
  times = dict.fromkeys(names, 0.0)
  problems: dict[str, str] = {}
  for case, name in itertools.product(cases, names):
    if name in problems:
      continue
    try:
      error, limit = kernel_error(case, kernels[name]), _error_limit(case)
      run = jax.jit(_forward_and_backward(kernels[name]))
      times[name] += case.layers * _time(run, _example(case), seconds / len(cases))
    except Exception as failure:  # a kernel that fails here cannot be used, whatever the reason
      problems[name] = f"{_FAILED} ({str(failure).splitlines()[0][:80]})"
      continue
    if not error <= limit:
      problems[name] = f"is wrong by {error:.2g}"
  correct = [name for name in names if name not in problems] or [names[0]]
  best = min(correct, key=lambda name: times[name])
  results = [f"{name} {problems.get(name, f'{1e3 * times[name]:.3g} ms')}" for name in names]
  return KernelChoice(best, f"auto, measured: {', '.join(results)}")


def kernel_error(case: AttentionCase, kernel: Attention) -> float:
  """Returns a kernel's largest difference from XLA's attention in float32, relative to the largest value.

  The output at real positions and all gradients are compared, for two examples. The result is infinite
  if a number is not finite.

  Args:
    case: what is computed, on random numbers, with padding at the end of each row.
    kernel: (q, k, v, bias, mask) → output.
  """
  example = _example(dataclasses.replace(case, batch=min(case.batch, 2)))
  inputs, *others = example
  precise = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
  exact = jax.jit(_forward_and_backward(_kernel("xla")))(precise, *others)
  found = jax.jit(_forward_and_backward(kernel))(*example)
  return max(map(_relative_difference, jax.tree.leaves(found), jax.tree.leaves(exact)))


@functools.cache
def _error_limit(case: AttentionCase) -> float:
  """Returns the largest error with which a kernel counts as correct; NaN if the reference is not."""
  error = kernel_error(case, _kernel("xla"))
  return _ERROR_RATIO * error + _ERROR_FLOOR if np.isfinite(error) else np.nan


def _relative_difference(found: jax.Array, exact: jax.Array) -> float:
  a, b = np.asarray(found, np.float32), np.asarray(exact, np.float32)
  difference = float(np.max(np.abs(a - b)) / max(float(np.max(np.abs(b))), 1e-30))
  return difference if np.isfinite(difference) else np.inf


def fp8_notes(model: Any, batch: Mapping[str, Any], mesh: Mapping[str, int]) -> list[str]:
  """Returns a note for a run's header if matmuls in fp8 are slower than in the network's dtype.

  Measured on a GPU only, with XLA's own fp8 and the matmul of a feed-forward block.

  Args:
    model: the model.
    batch: the shape and type of each feature of the global batch.
    mesh: the size of each mesh axis.
  """
  config = model.network_config
  if getattr(config, "make_matmul", None) is None or jax.default_backend() != "gpu":
    return []
  rows = batch["decoder_target_tokens"].size // count_batch_shards(mesh)
  units = config.mlp_dim // mesh.get(MODEL_AXIS, 1)
  ratio = compare_matmuls(fp8_matmul, rows, config.emb_dim, units, config.dtype)
  if ratio <= 1:
    return []
  return [
    f"matmuls in fp8 take {ratio:.2f} times as long as in {jnp.dtype(config.dtype).name} on this GPU: "
    "set te_helper.TransformerEngineConfig.enabled = 0"
  ]


def compare_matmuls(
  multiply: Matmul, rows: int, inputs: int, outputs: int, dtype: Any, seconds: float = 0.3
) -> float:
  """Returns how many times as long a matmul takes as the normal one, forward and backward.

  Args:
    multiply: the matmul, (x [rows, inputs], w [inputs, outputs]) → y.
    rows: the number of rows.
    inputs: the size of the contracted dimension.
    outputs: the number of columns.
    dtype: the type of the operands.
    seconds: how long each of the two is repeated.
  """
  x_NI, w_IO = jnp.ones((rows, inputs), dtype), jnp.ones((inputs, outputs), dtype)

  def run(product: Matmul) -> Callable[..., Any]:
    return jax.jit(jax.grad(lambda x, w: jnp.sum(product(x, w) ** 2), argnums=(0, 1)))

  times = [_time(run(product), (x_NI, w_IO), seconds) for product in (multiply, matmul)]
  return times[0] / times[1]


def _time(run: Callable[..., Any], inputs: Sequence[Any], seconds: float) -> float:
  """Returns the seconds of one call, repeated for `seconds`, without the first call."""
  jax.block_until_ready(run(*inputs))
  calls, started = 0, time.perf_counter()
  while calls == 0 or time.perf_counter() - started < seconds:
    jax.block_until_ready(run(*inputs))
    calls += 1
  return (time.perf_counter() - started) / calls


def _example(case: AttentionCase) -> tuple[tuple, SegmentMask, jax.Array]:
  """Returns (q, k, v, bias), the mask, and the weights of the outputs, 0 for padding."""
  keys = iter(jax.random.split(jax.random.PRNGKey(0), 5))

  def draw(*shape: int) -> jax.Array:
    return jax.random.normal(next(keys), shape, jnp.float32).astype(case.dtype)

  heads = (case.heads, case.head_dim)
  q, k, v = (draw(case.batch, length, *heads) for length in (case.queries, case.keys, case.keys))
  bias = draw(1, case.heads, case.queries, case.keys) if case.has_bias else None
  query, key = (_segments(case, length) for length in (case.queries, case.keys))
  weights = draw(case.batch, case.queries, *heads) * (query > 0)[:, :, None, None]
  return (q * case.head_dim**-0.5, k, v, bias), SegmentMask(query, key, case.causal), weights


def _segments(case: AttentionCase, length: int) -> jax.Array:
  """Returns segments: one example per row, or two if packed, and an eighth of padding."""
  position = jnp.arange(length)
  segments = 1 + (position >= length // 2) if case.packed else jnp.ones_like(position)
  row = jnp.where(position < length - length // 8, segments, 0).astype(jnp.int32)
  return jnp.broadcast_to(row, (case.batch, length))


def _forward_and_backward(kernel: Attention) -> Callable[..., Any]:
  """Returns a function of an example: the output at real positions, and the gradients of the inputs."""

  def total(inputs: tuple, mask: SegmentMask, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    output = kernel(*inputs, mask)
    return jnp.sum(output.astype(jnp.float32) * weights), output * (weights != 0)

  def run(inputs: tuple, mask: SegmentMask, weights: jax.Array) -> tuple[jax.Array, tuple]:
    (_, output), gradients = jax.value_and_grad(total, has_aux=True)(inputs, mask, weights)
    return output, gradients

  return run


def _kernel(name: str) -> Attention:
  """Returns one of our kernels as a function (q, k, v, bias, mask) → output."""
  if name != "xla":
    return functools.partial(fused_attention, name)

  def attend(q: Any, k: Any, v: Any, bias: Any, mask: SegmentMask) -> jax.Array:
    visible = make_boolean_mask(
      mask.query_BT > 0, mask.key_BS > 0, mask.query_BT, mask.key_BS, mask.causal
    )
    return xla_attention(q, k, v, bias, visible)

  return attend


def _can_train(model: Any, name: str, batch: Mapping[str, Any]) -> bool:
  """Returns whether the kernel accepts the model's dtype, sizes and masks; it is only traced."""
  features = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
  shapes = {name: x.shape for name, x in features.items()}

  def loss(key: jax.Array, batch: Any) -> Any:
    changed = replace_config(model, attention_kernel=name)
    choose_attention_kernel(changed.network_config)
    params = changed.get_initial_variables(key, shapes)["params"]
    return changed.loss_fn(params, batch, key)[0]

  try:
    jax.eval_shape(loss, jax.eval_shape(lambda: jax.random.PRNGKey(0)), features)
  except ValueError:
    return False
  return True


def _stored_or(
  choose: Callable[[], KernelChoice], cases: Sequence[AttentionCase], names: Sequence[str]
) -> KernelChoice:
  """Returns the choice that an earlier run has stored for the same cases, or makes and stores it."""
  settings: Any = jax.config
  folder = settings.jax_compilation_cache_dir
  if not folder:
    return choose()
  path = pathlib.Path(folder) / f"attention-kernel-{_hash_of_facts(cases, names)}.json"
  try:
    stored = KernelChoice(*json.loads(path.read_text()))
    return KernelChoice(stored.name, f"{stored.reason}, in an earlier run")
  except (OSError, ValueError, TypeError):
    choice = choose()
  if _FAILED not in choice.reason:  # a failure may be temporary, as when memory is full
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(choice))
  return choice


def _hash_of_facts(cases: Sequence[AttentionCase], names: Sequence[str]) -> str:
  """Returns a hash of all that a choice depends on: device, versions, flags, shapes and candidates."""
  device, cudnn = jax.local_devices()[0], ""
  with contextlib.suppress(metadata.PackageNotFoundError):
    cudnn = metadata.version("nvidia-cudnn-cu13")
  versions = [jax.__version__, jaxlib.__version__, rosetta_t5.__version__, cudnn]
  flags = os.environ.get("XLA_FLAGS", "")
  facts = [device.device_kind, device.client.platform_version, flags, *versions, *names, *cases]
  return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
