"""The line of a run's header about number formats, kernels and layer settings."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from rosetta_t5.networks.kernel_choice import KernelChoice, choose_attention_kernel
from rosetta_t5.networks.precision import Fp8Choice


def describe_computation(
  model: Any, fp8: Fp8Choice, measured: KernelChoice | None = None
) -> str | None:
  """Returns one line: the activations' type, fp8, the attention kernel and the settings in use.

  Args:
    model: the model; the result is None unless its module has a config like `T5Config`.
    fp8: the result of `choose_fp8`.
    measured: the attention kernel and the reason, if the run has measured the kernels.
  """
  config = model.network_config
  if not hasattr(config, "dtype"):
    return None
  kernel = measured or choose_attention_kernel(config)
  parts = [
    jnp.dtype(config.dtype).name,
    f"fp8 {fp8.text}",
    f"attention by {kernel.name} ({kernel.reason})",
  ]
  if getattr(config, "fuse_qkv_params", False):
    parts.append("fused qkv")
  if getattr(config, "transpose_batch_sequence", False):
    parts.append("length before batch")
  policy = getattr(config, "remat_policy", "none")
  if policy not in ("none", None):
    parts.append(f"remat {policy}")
  return "; ".join(parts)
