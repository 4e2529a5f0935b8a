"""`attention_kernel = 'auto'` on a GPU: the fastest kernel that computes the same as XLA's attention.

No table says which kernel is fastest on hardware that nobody has measured, or which library computes
wrong results there. A run therefore measures the kernels on its own shapes when it starts, and stores the
result beside its compiled programs.
"""

from __future__ import annotations

import collections
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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import rosetta_t5
from rosetta_t5.distributed.coordination import broadcast_text
from rosetta_t5.files import write_atomically
from rosetta_t5.kernels.attention import KERNELS, AttentionCase, Operands, Visibility
from rosetta_t5.networks.layer_kinds import layer_kinds
from rosetta_t5.networks.other_networks import setting_of
from rosetta_t5.parallel.mesh import CONTEXT_AXIS, MODEL_AXIS, count_batch_shards
from rosetta_t5.parallel.placement import target_device
from rosetta_t5.traced.program import with_config

# More examples do not change which kernel is fastest, and XLA's attention needs memory for each.
_LARGEST_BATCH = 32
_SECONDS_PER_KERNEL = 1.0
# A kernel may differ from float32 by twice as much as XLA's attention in the run's dtype.
_ERROR_RATIO, _ERROR_FLOOR = 2.0, 1e-3
_FAILED = "failed"

Attention = Callable[..., jax.Array]


class KernelChoice(NamedTuple):
  """The name of an attention kernel and the reason for its choice."""

  name: str
  reason: str


def kernel_of(config: Any) -> KernelChoice:
  """Returns the kernel that a network's config names, or the one of a network without such a setting."""
  name = setting_of(config, "attention_kernel")
  if name == "auto":
    where = "where it has been measured" if target_device().platform == "gpu" else "on a GPU"
    return KernelChoice("xla", f"auto: another kernel is chosen only {where}")
  if name == "flash" and target_device().platform != "gpu":
    return KernelChoice("flash", "set; interpreted, because there is no GPU: slow")
  return KernelChoice(name, "set")


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
  if setting_of(config, "attention_kernel") != "auto" or jax.default_backend() != "gpu":
    return model, None
  text = ""
  if jax.process_index() == 0:
    cases = attention_cases(config, batch, mesh, getattr(model, "is_prefix_lm", False))
    names = usable_kernels(cases, target_device())
    text = json.dumps(_stored_or_fastest(cases, names))
  choice = KernelChoice(*json.loads(broadcast_text(text, "attention kernel")))
  return with_config(model, attention_kernel=choice.name), choice


def attention_cases(
  config: Any, batch: Mapping[str, Any], mesh: Mapping[str, int], has_prefix: bool = False
) -> list[AttentionCase]:
  """Returns the kinds of attention in a step of a network with a `NetworkConfig`.

  Args:
    config: the network's config.
    batch: the shape and type of each feature of the global batch.
    mesh: the size of each mesh axis.
    has_prefix: whether the first positions of a causal row see each other.
  """
  sides = {"encoder": "encoder_input_tokens", "decoder": "decoder_target_tokens"}
  lengths = {side: batch[name].shape[1] for side, name in sides.items() if name in batch}
  lengths[next(iter(lengths))] += config.prompt_length
  size, shards = batch["decoder_target_tokens"].shape[0], mesh.get(MODEL_AXIS, 1)

  def make(side: str, **attributes: Any) -> AttentionCase:
    cfg = config.of_side(side)
    # If the heads cannot be split, each device computes all of them.
    parts = 1 if cfg.kv_heads % shards else shards
    return AttentionCase(
      batch=max(1, min(size // count_batch_shards(mesh), _LARGEST_BATCH)),
      heads=cfg.num_heads // parts,
      kv_heads=cfg.kv_heads // parts,
      head_dim=cfg.head_dim,
      dtype=jnp.dtype(cfg.dtype).name,
      packed="decoder_segment_ids" in batch,
      softcap=cfg.attention_softcap,
      context_shards=mesh.get(CONTEXT_AXIS, 1),
      **attributes,
    )

  cases = []
  for side, length in reversed(lengths.items()):
    kinds = layer_kinds(config, side)
    windows = collections.Counter(kind.window for kind in kinds if kind.extra_keys is None)
    for window, layers in windows.items():
      case = make(
        side,
        queries=length,
        keys=length,
        layers=layers,
        window=window,
        causal=side == "decoder",
        has_prefix=has_prefix and side == "decoder",
        has_bias=config.positions == "relative",
      )
      cases.append(case)
    if crossing := sum(kind.crosses for kind in kinds):
      cases.append(make(side, queries=length, keys=lengths["encoder"], layers=crossing))
  return cases


def usable_kernels(cases: Sequence[AttentionCase], device: Any) -> list[str]:
  """Returns the kernels that compute all cases on a device; `xla` is always the first."""
  return [
    name
    for name, kernel in KERNELS.items()
    if not any(kernel.refuses(case, device) for case in cases)
  ]


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
    kernels: the candidates' functions (q, k, v, bias, visible) → output; None for ours.
    seconds: how long each kernel is timed.
  """
  times = dict.fromkeys(names, 0.0)
  problems: dict[str, str] = {}
  for case, name in itertools.product(cases, names):
    if name in problems:
      continue
    kernel = kernels[name] if kernels else _kernel(name, case)
    try:
      error, limit = kernel_error(case, kernel), _error_limit(case)
      run = jax.jit(_forward_and_backward(kernel))
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
    kernel: (q, k, v, bias, visible) → output.
  """
  example = _example(dataclasses.replace(case, batch=min(case.batch, 2)))
  inputs, *others = example
  precise = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
  exact = jax.jit(_forward_and_backward(_kernel("xla", case)))(precise, *others)
  found = jax.jit(_forward_and_backward(kernel))(*example)
  return max(map(_relative_difference, jax.tree.leaves(found), jax.tree.leaves(exact)))


@functools.cache
def _error_limit(case: AttentionCase) -> float:
  """Returns the largest error with which a kernel counts as correct; NaN if the reference is not."""
  error = kernel_error(case, _kernel("xla", case))
  return _ERROR_RATIO * error + _ERROR_FLOOR if np.isfinite(error) else np.nan


def _relative_difference(found: jax.Array, exact: jax.Array) -> float:
  a, b = np.asarray(found, np.float32), np.asarray(exact, np.float32)
  difference = float(np.max(np.abs(a - b)) / max(float(np.max(np.abs(b))), 1e-30))
  return difference if np.isfinite(difference) else np.inf


def _time(run: Callable[..., Any], inputs: Sequence[Any], seconds: float) -> float:
  """Returns the seconds of one call, repeated for `seconds`, without the first call."""
  jax.block_until_ready(run(*inputs))
  calls, started = 0, time.perf_counter()
  while calls == 0 or time.perf_counter() - started < seconds:
    jax.block_until_ready(run(*inputs))
    calls += 1
  return (time.perf_counter() - started) / calls


def _example(case: AttentionCase) -> tuple[tuple, Visibility, jax.Array]:
  """Returns (q, k, v, bias), the visibility, and the weights of the outputs, 0 for padding."""
  keys = iter(jax.random.split(jax.random.PRNGKey(0), 5))

  def draw(*shape: int) -> jax.Array:
    return jax.random.normal(next(keys), shape, jnp.float32).astype(case.dtype)

  q = draw(case.batch, case.queries, case.heads, case.head_dim)
  k, v = (draw(case.batch, case.keys, case.kv_heads, case.head_dim) for _ in range(2))
  bias = draw(1, case.heads, case.queries, case.keys) if case.has_bias else None
  query, key = (_segments(case, length) for length in (case.queries, case.keys))
  weights = draw(*q.shape) * (query > 0)[:, :, None, None]
  visible = Visibility(query, key, causal=case.causal, window=case.window, packed=case.packed)
  return (q * case.head_dim**-0.5, k, v, bias), visible, weights


def _segments(case: AttentionCase, length: int) -> jax.Array:
  """Returns segments: one example per row, or two if packed, and an eighth of padding."""
  position = jnp.arange(length)
  segments = 1 + (position >= length // 2) if case.packed else jnp.ones_like(position)
  row = jnp.where(position < length - length // 8, segments, 0).astype(jnp.int32)
  return jnp.broadcast_to(row, (case.batch, length))


def _forward_and_backward(kernel: Attention) -> Callable[..., Any]:
  """Returns a function of an example: the output at real positions, and the gradients of the inputs."""

  def total(inputs: tuple, visible: Visibility, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    output = kernel(*inputs, visible)
    return jnp.sum(output.astype(jnp.float32) * weights), output * (weights != 0)

  def run(inputs: tuple, visible: Visibility, weights: jax.Array) -> tuple[jax.Array, tuple]:
    (_, output), gradients = jax.value_and_grad(total, has_aux=True)(inputs, visible, weights)
    return output, gradients

  return run


def _kernel(name: str, case: AttentionCase) -> Attention:
  """Returns one of our kernels as a function (q, k, v, bias, visible) → output."""
  return lambda *operands: KERNELS[name].run(Operands(*operands)._replace(softcap=case.softcap))


def _stored_or_fastest(cases: Sequence[AttentionCase], names: Sequence[str]) -> KernelChoice:
  """Returns the choice that an earlier run has stored for the same cases, or makes and stores it."""
  settings: Any = jax.config
  folder = settings.jax_compilation_cache_dir
  if not folder:
    return choose_fastest(cases, names)
  path = pathlib.Path(folder) / f"attention-kernel-{_hash_of_facts(cases, names)}.json"
  try:
    stored = KernelChoice(*json.loads(path.read_text()))
    return KernelChoice(stored.name, f"{stored.reason}, in an earlier run")
  except (OSError, ValueError, TypeError):
    choice = choose_fastest(cases, names)
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
