"""The data sheets of NVIDIA's GPUs. Everything that depends on a kind of GPU reads this table."""

import dataclasses
import json
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
  shared_memory: int
  threads: int

  def peak(self, dtype: str) -> float:
    """Returns the peak in FLOP/s of matmuls whose operands have a type that XLA calls `dtype`."""
    if dtype.startswith("f8"):
      return self.fp8 or self.bfloat16
    return self.bfloat16 if dtype in ("bf16", "f16") else self.tf32


# Sources: NVIDIA's data sheets and architecture white papers; dense rates, without sparsity. The columns are the
# attributes of `Gpu` after `kind`; TF/s are 10^12 FLOP/s, and `fp8` is 0 where a GPU has none.
_DATA_SHEETS = """
key       CUDA  bf16   fp8 tf32 RAM       NVL  net SMs clock  L2 shared threads name | jax's name without NVIDIA
                TF/s  TF/s TF/s  GB GB/s GB/s GB/s       GHz MiB    KiB
a100-40    8.0   312     0  156  40 1555  300   25 108  1.41  40    164    2048 A100 40 GB | A100-SXM4-40GB
a100       8.0   312     0  156  80 2039  300   25 108  1.41  40    164    2048 A100 80 GB | A100-SXM4-80GB
h100       9.0   989  1979  495  80 3350  450   50 132  1.98  50    228    2048 H100 80 GB | H100 80GB HBM3
h100-pcie  9.0   756  1513  378  80 2000  300   50 114 1.755  50    228    2048 H100 PCIe 80 GB | H100 PCIe
h200       9.0   989  1979  495 141 4800  450   50 132  1.98  50    228    2048 H200 141 GB | H200
b200      10.0  2250  4500 1125 180 8000  900   50 148 1.965 126    228    2048 B200 180 GB | B200
l40s       8.9   362   733  183  48  864   32   25 142  2.52  96    100    1536 L40S 48 GB | L40S
rtx4090    8.9 165.2 330.3 82.6  24 1008   32   25 128  2.52  72    100    1536 RTX 4090 24 GB | GeForce RTX 4090
"""


# What the columns of numbers are multiplied by, from bf16 to threads.
_UNITS = (1e12, 1e12, 1e12, 1e9, 1e9, 1e9, 1e9, 1, 1, 1 << 20, 1 << 10, 1)


def _read_row(row: str) -> tuple[str, Gpu]:
  """Returns the key and the GPU of a row of the data sheets."""
  key, capability, *cells, names = row.split(maxsplit=14)
  name, kind = names.split(" | ")
  major, minor = map(int, capability.split("."))
  # A 0 becomes None.
  numbers: Any = (json.loads(x) * unit or None for x, unit in zip(cells, _UNITS, strict=True))
  return key, Gpu(name, f"NVIDIA {kind}", (major, minor), *numbers)


GPUS: dict[str, Gpu] = dict(map(_read_row, _DATA_SHEETS.strip().splitlines()[2:]))


def gpu_of(device_kind: str) -> Gpu | None:
  """Returns the GPU that jax calls `device_kind`; None if it is not in the table.

  A kind that differs from the table's, such as another A100, is matched by the model's name.
  """
  words = re.split(r"[^A-Z0-9]+", device_kind.upper())
  found = [gpu for gpu in GPUS.values() if gpu.kind == device_kind]
  if "NVL" not in words:  # H100 NVL has other rates
    found += [gpu for key, gpu in GPUS.items() if key.upper() in words]
  return next(iter(found), None)
