"""What the flash kernels need of each GPU: registers, spills, shared memory, occupancy. Needs no GPU.

.venv-gpu/bin/python -m benchmarks.flash_kernels --gpus a100 h200 b200 --sizes 64 128
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rosetta_t5.gpu_program.compiler import (
  OPTIONS,
  gpu_devices,
  tracing_for,
  use_compiler_without_gpu,
)
from rosetta_t5.kernels.flash_attention import flash_attention
from rosetta_t5.kernels.flash_kernels import FlashOptions, Segments
from rosetta_t5.telemetry.gpus import GPUS, Gpu

KERNELS = tuple(
  f"{name}_kernel" for name in ["forward", "query_gradient", "key_gradient", "bias_gradient"]
)
# Name → (queries, keys, whether there is a bias, whether it is causal).
ATTENTIONS = {
  "encoder": (512, 512, True, False),
  "decoder": (128, 128, True, True),
  "cross": (128, 512, False, False),
}


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


class AttentionProgram(NamedTuple):
  """The code of the kernels, one text per file, and XLA's list of their grids and shared memory."""

  ptx: list[str]
  launches: str


def compile_attention(
  gpu: str, size: int, attention: str, batch: int = 8, heads: int = 12
) -> AttentionProgram:
  """Returns the program of one attention, forward and backward, in bfloat16."""
  queries, keys, has_bias, causal = ATTENTIONS[attention]
  mesh = Mesh(np.array(gpu_devices(GPUS[gpu], 1)), ("data",), axis_types=(AxisType.Auto,))

  def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

  def loss(operands: tuple, segments: Segments) -> jax.Array:
    options = FlashOptions(causal, gpu=GPUS[gpu].kind)
    out = flash_attention(*operands, segments, options)
    return jnp.sum(out.astype(jnp.float32))

  shapes = ((batch, length, heads, size) for length in (queries, keys, keys))
  operands = [array(*shape) for shape in shapes]
  operands.append(array(1, heads, queries, keys) if has_bias else None)
  segments = Segments(*(array(batch, length, dtype=jnp.int32) for length in (queries, keys)))
  with jax.set_mesh(mesh), tracing_for(GPUS[gpu]):
    lowered = jax.jit(jax.grad(loss)).lower(tuple(operands), segments)
  with tempfile.TemporaryDirectory() as folder:
    dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_hlo_module_re": ".*"}
    lowered.compile(compiler_options=OPTIONS | dump)
    ptx, launches = (
      [path.read_text() for path in sorted(pathlib.Path(folder).glob(f"*{suffix}"))]
      for suffix in (".ptx", ".thunk_sequence.txt")
    )
  return AttentionProgram(ptx, max(launches, key=len, default=""))


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


def kernel_resources(program: AttentionProgram, gpu: Gpu) -> list[KernelResources]:
  """Returns what `KERNELS` need, each variant of a kernel once.

  Raises:
    ValueError: the assembler is not installed, or does not accept the code.
  """
  launches = {
    name: (threads, shared) for name, threads, shared in _LAUNCH.findall(program.launches)
  }
  wanted = [text for text in program.ptx if any(_base(e) in KERNELS for e in _ENTRY.findall(text))]
  found = []
  for name, stores, loads, registers in (used for text in wanted for used in _assemble(text)):
    if _base(name) not in KERNELS or name not in launches:
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


def main(argv: list[str] | None = None) -> None:
  """Prints a table with a line for each kernel, as Markdown."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--gpus", nargs="+", default=["a100", "h200", "b200"], choices=GPUS)
  parser.add_argument("--sizes", nargs="+", type=int, default=[64, 128])
  parser.add_argument("--attentions", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
  args = parser.parse_args(argv)
  use_compiler_without_gpu()
  print(
    "| GPU | head size | attention | kernel | registers | spilled | shared memory | warps of 64 |"
  )
  print("| --- | --- | --- | --- | --- | --- | --- | --- |")
  for gpu in args.gpus:
    for size in args.sizes:
      for attention in args.attentions:
        program = compile_attention(gpu, size, attention)
        for used in kernel_resources(program, GPUS[gpu]):
          name, warps = used.name.removesuffix("_kernel"), used.occupancy * GPUS[gpu].threads / 32
          print(
            f"| {gpu} | {size} | {attention} | {name} | {used.registers} | {used.spilled} | "
            f"{used.shared_memory / 1024:.0f} kB | {warps:.0f} |",
            flush=True,
          )


if __name__ == "__main__":
  main()
