"""How many devices a run here would have, without asking jax, which would take hold of them."""

from __future__ import annotations

import os
import pathlib
import re

import jax


def expected_devices() -> tuple[int, str]:
  """Returns the number of this machine's devices, and what they are: "GPU" or "CPU"."""
  wants_cpu = os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu"
  gpus = 0 if wants_cpu else _visible_gpus()
  return (gpus, "GPU") if gpus else (_cpu_devices(), "CPU")


def _visible_gpus() -> int:
  """NVIDIA's GPUs, of which CUDA_VISIBLE_DEVICES may leave some out."""
  visible = os.environ.get("CUDA_VISIBLE_DEVICES")
  there = len(list(pathlib.Path("/proc/driver/nvidia/gpus").glob("*")))
  if visible is None or not there:
    return there
  return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])


def _cpu_devices() -> int:
  """A processor is one device unless jax is told to make it several."""
  flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
  set_number = getattr(jax.config, "jax_num_cpu_devices", -1)
  return set_number if set_number > 0 else int(flag[1]) if flag else 1
