"""The data sheets of NVIDIA's GPUs. Everything that depends on a kind of GPU reads this table."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

GPUS_PER_NODE = 8


@dataclasses.dataclass(frozen=True)
class Gpu:
  """A GPU in a node of eight, each with its own network card (DGX, HGX).

  Attributes:
    name: as NVIDIA writes it, with the size of its memory.
    kind: jax's `device_kind`.
    capability: CUDA's compute capability, such as (9, 0).
    bfloat16: the dense peak of the tensor cores in FLOP/s, with float32 sums.
    fp8: the same for 8-bit numbers; None if the GPU has no fp8.
    tf32: the same for float32 operands, which jax rounds to TF32 by default.
    memory: bytes, as on the data sheet.
    bandwidth: bytes/s from and to that memory.
    nvlink: bytes/s that it can send to other GPUs of its node; PCIe where there is no NVLink.
    network: bytes/s that its network card can send to other nodes.
    cores: the number of streaming multiprocessors.
    clock: the highest frequency in GHz.
    l2: bytes of the L2 cache.
    shared_memory: bytes of shared memory per streaming multiprocessor.
    threads: the number of threads that a streaming multiprocessor can hold.
  """

  name: str
  kind: str
  capability: tuple[int, int]
  bfloat16: float
  fp8: float | None
  tf32: float
  memory: float
  bandwidth: float
  nvlink: float
  network: float
  cores: int
  clock: float
  l2: int
  shared_memory: int = 228 * 1024
  threads: int = 2048

  def peak(self, dtype: str) -> float:
    """Returns the peak in FLOP/s of matmuls whose operands have a type that XLA calls `dtype`."""
    if dtype.startswith("f8"):
      return self.fp8 or self.bfloat16
    return self.bfloat16 if dtype in ("bf16", "f16") else self.tf32


# What several rows of the table share.
_A100: dict[str, Any] = {
  "capability": (8, 0),
  "bfloat16": 312e12,
  "fp8": None,
  "tf32": 156e12,
  "nvlink": 300e9,
  "network": 25e9,
  "cores": 108,
  "clock": 1.41,
  "l2": 40 << 20,
  "shared_memory": 164 * 1024,
}
_HOPPER: dict[str, Any] = {"capability": (9, 0), "network": 50e9, "l2": 50 << 20}
_H100: dict[str, Any] = _HOPPER | {
  "bfloat16": 989e12,
  "fp8": 1979e12,
  "tf32": 495e12,
  "nvlink": 450e9,
  "cores": 132,
  "clock": 1.98,
}
_ADA: dict[str, Any] = {
  "capability": (8, 9),
  "nvlink": 32e9,
  "network": 25e9,
  "clock": 2.52,
  "shared_memory": 100 * 1024,
  "threads": 1536,
}

# Sources: NVIDIA's data sheets and architecture white papers; dense rates, without sparsity.
GPUS: dict[str, Gpu] = {
  "a100-40": Gpu("A100 40 GB", "NVIDIA A100-SXM4-40GB", memory=40e9, bandwidth=1.555e12, **_A100),
  "a100": Gpu("A100 80 GB", "NVIDIA A100-SXM4-80GB", memory=80e9, bandwidth=2.039e12, **_A100),
  "h100": Gpu("H100 80 GB", "NVIDIA H100 80GB HBM3", memory=80e9, bandwidth=3.35e12, **_H100),
  "h100-pcie": Gpu(
    "H100 PCIe 80 GB",
    "NVIDIA H100 PCIe",
    bfloat16=756e12,
    fp8=1513e12,
    tf32=378e12,
    memory=80e9,
    bandwidth=2.0e12,
    nvlink=300e9,
    cores=114,
    clock=1.755,
    **_HOPPER,
  ),
  "h200": Gpu("H200 141 GB", "NVIDIA H200", memory=141e9, bandwidth=4.8e12, **_H100),
  "b200": Gpu(
    "B200 180 GB",
    "NVIDIA B200",
    capability=(10, 0),
    bfloat16=2250e12,
    fp8=4500e12,
    tf32=1125e12,
    memory=180e9,
    bandwidth=8e12,
    nvlink=900e9,
    network=50e9,
    cores=148,
    clock=1.965,
    l2=126 << 20,
  ),
  "l40s": Gpu(
    "L40S 48 GB",
    "NVIDIA L40S",
    bfloat16=362e12,
    fp8=733e12,
    tf32=183e12,
    memory=48e9,
    bandwidth=864e9,
    cores=142,
    l2=96 << 20,
    **_ADA,
  ),
  "rtx4090": Gpu(
    "RTX 4090 24 GB",
    "NVIDIA GeForce RTX 4090",
    bfloat16=165.2e12,
    fp8=330.3e12,
    tf32=82.6e12,
    memory=24e9,
    bandwidth=1.008e12,
    cores=128,
    l2=72 << 20,
    **_ADA,
  ),
}


def gpu_of(device_kind: str) -> Gpu | None:
  """Returns the GPU that jax calls `device_kind`; None if it is not in the table.

  A kind that differs from the table's, such as another A100, is matched by the model's name.
  """
  for gpu in GPUS.values():
    if gpu.kind == device_kind:
      return gpu
  words = re.split(r"[^A-Z0-9]+", device_kind.upper())
  found = (gpu for key, gpu in GPUS.items() if key.upper() in words)
  return None if "NVL" in words else next(found, None)  # H100 NVL has other rates
