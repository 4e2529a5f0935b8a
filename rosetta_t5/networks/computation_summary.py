"""What a run's header says about number formats and kernels."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from rosetta_t5.networks.kernel_choice import choose_attention_kernel
from rosetta_t5.networks.precision import Fp8Choice


def computation_text(model: Any, fp8: Fp8Choice) -> str | None:
  """Returns one line: type of activations, fp8, attention's kernel and why, and switches in use.

  Args:
    model: the model; None is returned unless its module has a config like `T5Config`.
    fp8: what `choose_fp8` returned.
  """
  config = model.network_config
  if not hasattr(config, "dtype"):
    return None
  kernel = choose_attention_kernel(config)
  parts = [
    jnp.dtype(config.dtype).name,
    f"fp8 {fp8.text}",
    f"attention by {kernel.name} ({kernel.why})",
  ]
  parts += ["fused qkv"] if getattr(config, "fuse_qkv_params", False) else []
  parts += ["length before batch"] if getattr(config, "transpose_batch_sequence", False) else []
  policy = getattr(config, "remat_policy", "none")
  parts += [f"remat {policy}"] if policy not in ("none", None) else []
  return "; ".join(parts)
