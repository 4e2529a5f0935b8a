"""XLA's GPU compiler on a machine without a GPU.

The compiler needs no driver, only the packages of jax[cuda13] and a description of the GPU. Without a
GPU nothing is timed, so XLA selects no algorithms; `OPTIONS` makes it use cuBLASLt for matmuls, as
NVIDIA's own flags do.
"""

import contextlib
import importlib.util
import os
from typing import Any

import jax

from rosetta_t5.jax_internals import cudnn_of_another_machine
from rosetta_t5.telemetry.gpus import GPUS_PER_NODE, Gpu

INSTALL = "pip install 'rosetta-t5[gpu]'"
# The versions of cuDNN and CUDA that programs are compiled for: those that jax[cuda13] installs.
_CUDNN = (9, 28, 0)
_CUDA = (13, 0)
# Without measurements on a GPU, XLA would otherwise compute all matmuls by Triton kernels.
OPTIONS: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}


def check_installed() -> None:
  """Raises ValueError if the GPU compiler is not installed."""
  if importlib.util.find_spec("jax_cuda13_plugin") is None:
    raise ValueError(
      "XLA's GPU compiler is not installed in this environment. It needs no GPU, but 3 GB of "
      f"packages: {INSTALL}, or in a checkout `make gpu-compiler` and then "
      ".venv-gpu/bin/rosetta-t5 compile …"
    )


def use_compiler_without_gpu() -> None:
  """Prepares jax to compile for GPUs; to be called before jax initializes its devices.

  Arrays stay on the CPU even if this machine has GPUs, because another program may be using them.
  """
  os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # cuPTI does not load without a driver
  jax.config.update("jax_platforms", "cpu")
  # How long compiling takes is shown.
  jax.config.update("jax_enable_compilation_cache", False)


def gpu_devices(gpu: Gpu, count: int) -> list[Any]:
  """Returns `count` devices of this kind in nodes of eight. They can be compiled for, but not used.

  Raises:
    ValueError: the last node would not be full.
  """
  from jax.experimental import topologies

  nodes, rest = divmod(count, GPUS_PER_NODE)
  if nodes and rest:
    raise ValueError(
      f"--devices must be at most {GPUS_PER_NODE} (one node), or a multiple of {GPUS_PER_NODE}, got {count}"
    )
  shape = f"1x{nodes or 1}x{GPUS_PER_NODE if nodes else count}"
  topology = topologies.get_topology_desc(
    platform="cuda", target_config=_target_config(gpu), topology=shape
  )
  return list(topology.devices)


def tracing_for(gpu: Gpu) -> contextlib.AbstractContextManager[None]:
  """Returns a context in which jax traces for this GPU, of which the mesh in use must consist."""
  major, minor, patch = _CUDNN
  return cudnn_of_another_machine(major * 10_000 + minor * 100 + patch, gpu.capability)


def _target_config(gpu: Gpu) -> str:
  """Returns XLA's description of a GPU (GpuTargetConfigProto, as text)."""
  capability = f"major: {gpu.capability[0]} minor: {gpu.capability[1]}"
  device = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 48 * 1024,
    "shared_memory_per_core": gpu.shared_memory,
    "shared_memory_per_block_optin": gpu.shared_memory - 1024,
    "threads_per_core_limit": gpu.threads,
    "core_count": gpu.cores,
    "fpus_per_core": 64 if gpu.capability == (8, 0) else 128,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "memory_bandwidth": int(gpu.bandwidth),
    "l2_cache_size": gpu.l2,
    "clock_rate_ghz": gpu.clock,
    "device_memory_size": int(gpu.memory),
    "registers_per_core_limit": 2**16,
    "registers_per_block_limit": 2**16,
  }
  fields = " ".join(f"{name}: {value}" for name, value in device.items())
  cudnn = "major: {} minor: {} patch: {}".format(*_CUDNN)
  cuda = "major: {} minor: {} patch: 0".format(*_CUDA)
  return (
    f"gpu_device_info {{ {fields} cuda_compute_capability {{ {capability} }} }} "
    f'platform_name: "CUDA" dnn_version_info {{ {cudnn} }} runtime_version {{ {cuda} }} '
    f'device_description_str: "{gpu.kind}"'
  )
