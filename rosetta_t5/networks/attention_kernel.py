"""Which kernel computes attention, and why."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class KernelChoice(NamedTuple):
  """A kernel's name, and why it was chosen."""

  name: str
  why: str


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
  if name == "flash" and jax.default_backend() != "gpu":
    return KernelChoice("flash", "set; interpreted, as there is no GPU: slow")
  return KernelChoice(name, "set")


def _check_cudnn(config: Any) -> None:
  if jax.default_backend() != "gpu":
    raise ValueError(
      "T5Config.attention_kernel = 'cudnn' needs an NVIDIA GPU, and jax runs on "
      f"{jax.default_backend()}: set it to 'auto'"
    )
  if jnp.dtype(config.dtype) != jnp.bfloat16:
    raise ValueError(
      f"T5Config.attention_kernel = 'cudnn' computes in bfloat16, but T5Config.dtype is "
      f"{jnp.dtype(config.dtype).name}: set dtype = 'bfloat16', or attention_kernel = 'xla'"
    )
  if config.head_dim % 8:
    raise ValueError(
      f"T5Config.attention_kernel = 'cudnn' needs a head_dim that is a multiple of 8, not "
      f"{config.head_dim}: set attention_kernel = 'xla'"
    )
