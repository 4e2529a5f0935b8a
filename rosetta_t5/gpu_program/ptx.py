"""What the kernels of a GPU program need of a streaming multiprocessor, as NVIDIA's assembler reports it."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import re
import subprocess
from collections.abc import Collection, Iterable

from rosetta_t5.gpu_program.compiler import CompiledProgram
from rosetta_t5.telemetry.gpus import Gpu

_REGISTERS = 2**16  # of a streaming multiprocessor
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_TARGET = re.compile(r"\.target\s+(\w+)")
_USED = re.compile(
  r"Function properties for ([\w$]+)\s.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
  r".*?Used (\d+) registers",
  re.DOTALL,
)
_LAUNCH = re.compile(
  r"\] (\w+) grid: \[[\d, ]*\] threads: \[([\d, ]*)\]\s+shared_memory: (\d+) bytes"
)


@dataclasses.dataclass(frozen=True)
class KernelResources:
  """What one kernel needs.

  Attributes:
    name: the kernel's name.
    registers: per thread.
    spilled: the bytes per thread that do not fit into registers, written and read.
    shared_memory: bytes per block.
    threads: per block.
    occupancy: the share of a multiprocessor's threads that can be resident, from 0 to 1.
  """

  name: str
  registers: int
  spilled: int
  shared_memory: int
  threads: int
  occupancy: float


def kernel_resources(
  program: CompiledProgram, names: Collection[str], gpu: Gpu
) -> list[KernelResources]:
  """Returns what the kernels with these names need, each variant of a kernel once.

  Args:
    names: the names of kernels, without the numbers that XLA appends.

  Raises:
    ValueError: the assembler is not installed, or does not accept the code.
  """
  launches = {
    name: (threads, shared) for name, threads, shared in _LAUNCH.findall(program.launches)
  }
  wanted = [text for text in program.ptx if any(_base(e) in names for e in _ENTRY.findall(text))]
  found = []
  for name, stores, loads, registers in (used for text in wanted for used in _assemble(text)):
    if _base(name) not in names or name not in launches:
      continue  # another kernel in the same file, or one that the program does not start
    threads, shared = launches[name]
    block = int(threads.split(",")[0])
    resident = _resident_threads(int(registers), int(shared), block, gpu)
    spilled = int(stores) + int(loads)
    found.append(
      KernelResources(name, int(registers), spilled, int(shared), block, resident / gpu.threads)
    )
  return sorted(found, key=lambda each: each.name)


def _base(entry: str) -> str:
  return re.sub(r"_+\d+$", "", entry)


def _resident_threads(registers: int, shared: int, block: int, gpu: Gpu) -> int:
  """Returns how many threads fit on a multiprocessor, in whole blocks."""
  # Registers are allocated to warps in units of 256, and each block uses 1 kB of shared memory itself.
  per_warp = -(-registers * 32 // 256) * 256
  by_registers = _REGISTERS // (per_warp * (block // 32))
  by_shared_memory = gpu.shared_memory // (shared + 1024)
  return min(by_registers, by_shared_memory, gpu.threads // block) * block


def _assemble(ptx: str) -> Iterable[tuple[str, str, str, str]]:
  """Returns name, bytes of spill stores and loads, and registers of each kernel in a PTX file."""
  target = _TARGET.search(ptx)
  command = [
    _find_ptxas(),
    "-v",
    f"-arch={target[1] if target else 'sm_90'}",
    "-o",
    "/dev/null",
    "-",
  ]
  done = subprocess.run(command, input=ptx, capture_output=True, text=True, check=False)
  if done.returncode:
    raise ValueError(f"ptxas does not accept a kernel of the program: {done.stderr[:500]}")
  return _USED.findall(done.stderr)


def _find_ptxas() -> str:
  """Returns the path of NVIDIA's assembler, which jax[cuda13] installs."""
  spec = importlib.util.find_spec("nvidia")
  for folder in spec.submodule_search_locations or () if spec else ():
    for path in sorted(pathlib.Path(folder).glob("*/bin/ptxas")):
      return str(path)
  raise ValueError("ptxas is not installed: pip install nvidia-cuda-nvcc")
