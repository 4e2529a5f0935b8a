"""`attention_kernel = 'auto'` on a GPU: the fastest kernel that computes the same as XLA's attention.

No table can say which kernel is fastest on hardware that nobody has measured, or that a library has no
error there. A run therefore measures the kernels on its own shapes when it starts, and remembers the
result beside its compiled programs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rosetta_t5
from rosetta_t5.distributed.coordination import broadcast_text
from rosetta_t5.kernels.fp8 import fp8_matmul
from rosetta_t5.kernels.xla_attention import xla_attention
from rosetta_t5.networks.kernel_choice import (
  KernelChoice,
  SegmentMask,
  choose_attention_kernel,
  fused_attention,
)
from rosetta_t5.networks.layers.dense import Matmul, matmul
from rosetta_t5.networks.layers.masks import make_boolean_mask
from rosetta_t5.networks.t5_config import replace_config

# More examples do not change which kernel is fastest, but XLA's float32 reference needs much memory.
_LARGEST_BATCH = 32
_SECONDS_PER_KERNEL = 1.0
# A kernel may differ from float32 by twice as much as XLA's attention in the run's dtype.
_ERROR_RATIO, _ERROR_FLOOR = 2.0, 1e-3
_TIMEOUT_S = 600.0

Attention = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class AttentionCase:
  """One kind of attention of a step, as one device computes it.

  Attributes:
    batch: examples.
    queries: positions of a row.
    keys: positions of a row.
    heads: heads.
    head_dim: the size of a head.
    dtype: the type of queries, keys and values.
    causal: whether a query does not see the keys after it.
    has_bias: whether a learned bias is added to the logits.
    packed: whether a row contains several examples.
  """

  batch: int
  queries: int
  keys: int
  heads: int
  head_dim: int
  dtype: str
  causal: bool
  has_bias: bool
  packed: bool


@dataclasses.dataclass(frozen=True)
class Measurement:
  """How long a kernel takes, forward and backward, and its largest relative difference from float32."""

  seconds: float
  error: float


def with_measured_kernel(
  model: Any, batch: Mapping[str, Any], mesh: Mapping[str, int]
) -> tuple[Any, KernelChoice | None]:
  """Returns the model with the fastest correct attention kernel, and the choice, if it is to be measured.

  That is the case for `attention_kernel = 'auto'` on a GPU; otherwise the choice is None. Process 0
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
    cases, names = attention_cases(config, batch, mesh), usable_kernels(model, batch)
    choice = _remembered(cases, names, functools.partial(choose_fastest, cases))
    text = json.dumps(choice)
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
  tensor = mesh.get("model", 1) * mesh.get("tensor", 1)
  devices = int(np.prod(list(mesh.values())))
  size, decoder = batch["decoder_target_tokens"].shape
  make = functools.partial(
    AttentionCase,
    batch=max(1, min(size * tensor // devices, _LARGEST_BATCH)),
    heads=max(1, config.num_heads // tensor),
    head_dim=config.head_dim,
    dtype=jnp.dtype(config.dtype).name,
    packed="decoder_segment_ids" in batch,
  )
  has_bias = getattr(config, "positions", "relative") == "relative"
  cases = [make(queries=decoder, keys=decoder, causal=True, has_bias=has_bias)]
  if "encoder_input_tokens" in batch:
    encoder = batch["encoder_input_tokens"].shape[1]
    cases += [
      make(queries=encoder, keys=encoder, causal=False, has_bias=has_bias),
      make(queries=decoder, keys=encoder, causal=False, has_bias=False),
    ]
  return cases


def usable_kernels(model: Any, batch: Mapping[str, Any]) -> list[str]:
  """Returns the kernels that accept the model's dtype, sizes and masks; `xla` is always the first.

  Args:
    model: the model.
    batch: the shape and type of each feature of the global batch.
  """
  return ["xla", *(name for name in ("cudnn", "flash") if _can_train(model, name, batch))]


def case_program(case: AttentionCase, name: str) -> tuple[Callable[..., Any], tuple]:
  """Returns one of our kernels, forward and backward, as a function, and random inputs for it."""
  inputs, mask, weights = _example(case)
  return _value_and_gradients(_kernel(name), mask, weights), inputs


def choose_fastest(
  cases: Sequence[AttentionCase],
  names: Sequence[str],
  kernels: Mapping[str, Attention] | None = None,
  seconds: float = _SECONDS_PER_KERNEL,
) -> KernelChoice:
  """Returns the kernel that is fastest over all cases among those that are correct in every case.

  Args:
    cases: what a step computes.
    names: the candidates; the first one is the reference.
    kernels: the candidates' functions (q, k, v, bias, mask) → output; None for ours.
    seconds: how long each kernel is timed.
  """
  kernels = kernels or {name: _kernel(name) for name in names}
  times, problems = dict.fromkeys(names, 0.0), {}
  for case in cases:
    limit = np.inf
    for name in [name for name in names if name not in problems]:
      try:
        found = measure(case, kernels[name], seconds / len(cases))
      except Exception as error:  # a kernel that fails here cannot be used, whatever the reason
        problems[name] = f"failed ({str(error).splitlines()[0][:80]})"
        continue
      if name == names[0]:
        limit = _ERROR_RATIO * found.error + _ERROR_FLOOR
      if not found.error <= limit:
        problems[name] = f"is wrong by {found.error:.2g}"
      times[name] += found.seconds
  correct = [name for name in names if name not in problems] or [names[0]]
  best = min(correct, key=lambda name: times[name])
  results = [f"{name} {problems.get(name, f'{1e3 * times[name]:.3g} ms')}" for name in names]
  return KernelChoice(best, f"auto, measured: {', '.join(results)}")


def measure(case: AttentionCase, kernel: Attention, seconds: float) -> Measurement:
  """Returns the time of a kernel's forward and backward pass, and its error.

  The error is the largest difference of the output and of each gradient from XLA's attention in
  float32, relative to the largest value.

  Args:
    case: what is computed, on random numbers, with padding at the end of each row.
    kernel: (q, k, v, bias, mask) → output.
    seconds: how long the kernel is repeated.
  """
  inputs, mask, weights = _example(case)
  reference = jax.jit(_value_and_gradients(_kernel("xla"), mask, weights))
  exact = reference(*jax.tree.map(lambda x: x.astype(jnp.float32), inputs))
  run = jax.jit(_value_and_gradients(kernel, mask, weights))
  outputs = jax.block_until_ready(run(*inputs))
  error = max(map(_relative_error, jax.tree.leaves(outputs), jax.tree.leaves(exact)))
  return Measurement(_time(run, inputs, seconds), error)


def fp8_notes(model: Any, batch: Mapping[str, Any], mesh: Mapping[str, int]) -> list[str]:
  """Returns a note for a run's header if matmuls in fp8 are slower than in the network's dtype.

  Measured on a GPU only, with XLA's own fp8 and the matmul of a feed-forward block.

  Args:
    model: the model.
    batch: the shape and type of each feature of the global batch.
    mesh: the size of each mesh axis.
  """
  config = model.network_config
  if getattr(config, "make_product", None) is None or jax.default_backend() != "gpu":
    return []
  rows = int(np.prod(next(iter(batch.values())).shape)) // int(np.prod(list(mesh.values())))
  ratio = compare_matmuls(fp8_matmul, rows, config.emb_dim, config.mlp_dim, config.dtype)
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


def _relative_error(found: jax.Array, exact: jax.Array) -> float:
  """Returns the largest difference; infinite if a number is not finite."""
  a, b = np.asarray(found, np.float32), np.asarray(exact, np.float32)
  error = float(np.max(np.abs(a - b)) / max(float(np.max(np.abs(b))), 1e-30))
  return error if np.isfinite(error) else np.inf


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


def _value_and_gradients(kernel: Attention, mask: SegmentMask, weights: jax.Array) -> Any:
  """Returns (q, k, v, bias) → the output at real positions, and the gradients of its weighted sum."""

  def total(inputs: tuple) -> tuple[jax.Array, jax.Array]:
    output = kernel(*inputs, mask)
    return jnp.sum(output.astype(jnp.float32) * weights), output * (weights != 0)

  def run(*inputs: Any) -> Any:
    (_, output), gradients = jax.value_and_grad(total, has_aux=True)(inputs)
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
  changed = replace_config(model, attention_kernel=name)
  features = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
  shapes = {name: x.shape for name, x in features.items()}

  def loss(key: jax.Array, batch: Any) -> Any:
    params = changed.get_initial_variables(key, shapes)["params"]
    return changed.loss_fn(params, batch, key)[0]

  try:
    choose_attention_kernel(changed.network_config)
    jax.eval_shape(loss, jax.eval_shape(lambda: jax.random.PRNGKey(0)), features)
  except ValueError:
    return False
  return True


def _remembered(
  cases: Sequence[AttentionCase], names: Sequence[str], choose: Callable[..., KernelChoice]
) -> KernelChoice:
  """Returns the choice that an earlier run has stored for the same cases, or makes and stores it."""
  settings: Any = jax.config
  folder = settings.jax_compilation_cache_dir
  if not folder:
    return choose(names)
  device = jax.local_devices()[0].device_kind
  facts = [device, jax.__version__, rosetta_t5.__version__, list(names), *map(repr, cases)]
  name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
  path = pathlib.Path(folder) / f"attention-kernel-{name}.json"
  try:
    stored = KernelChoice(*json.loads(path.read_text()))
    return KernelChoice(stored.name, f"{stored.reason}, in an earlier run")
  except (OSError, ValueError, TypeError):
    choice = choose(names)
  path.parent.mkdir(parents=True, exist_ok=True)
  scratch = path.with_suffix(f".{os.getpid()}")
  scratch.write_text(json.dumps(choice))
  scratch.replace(path)
  return choice
