"""Which kernels a GPU program starts, what each computes, and which bytes and registers it needs.

What a kernel needs of a streaming multiprocessor is what NVIDIA's assembler reports.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import pathlib
import re
import subprocess
from collections.abc import Collection, Iterable, Iterator

from rosetta_t5.gpu_program.compiler import CompiledProgram
from rosetta_t5.gpu_program.hlo import Instruction, Program, short_source
from rosetta_t5.telemetry.gpus import Gpu

MATMUL = "matmuls (cuBLASLt)"
FP8_MATMUL = "fp8 matmuls (cuBLASLt)"
TRITON_MATMUL = "matmuls (Triton)"
CUDNN_ATTENTION = "cuDNN attention"
TRITON = "Triton kernels"
REDUCTION = "reduction fusions"
LOOP = "loop fusions"
COPY = "copies and transposes"
OTHER = "other kernels"
KINDS = (MATMUL, FP8_MATMUL, TRITON_MATMUL, CUDNN_ATTENTION, TRITON, REDUCTION, LOOP, COPY, OTHER)

# Instructions that start no kernel.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain"}
_FREE |= {"partition-id", "replica-id", "opt-barrier", "add-dependency"}
# Reads of a part of an operand.
_SLICES = ("dynamic-slice", "slice", "gather")
# The matmuls of our attention kernels, each of the size of the logits times the head size. The program
# does not say what a kernel computes.
_OUR_MATMULS = {
  "forward_kernel": 2,
  "query_gradient_kernel": 3,
  "key_gradient_kernel": 4,
  "bias_gradient_kernel": 2,
}
_CUDNN_FORWARD_MATMULS, _CUDNN_BACKWARD_MATMULS = 2, 5


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A kernel of the program.

  Attributes:
    name: the instruction that starts it.
    kind: one of `KINDS`.
    source: what in the model it computes, such as "backward decoder/layers/mlp/wi_0".
    flops: the floating-point operations of its matmuls.
    dtype: the type of the matmuls' operands, as XLA writes it; "" without matmuls.
    bytes: the bytes that it reads from and writes to the GPU's memory, if each operand is read once.
  """

  name: str
  kind: str
  source: str
  flops: float
  dtype: str
  bytes: float


def kernel_of(program: Program, computation: str, instruction: Instruction) -> Kernel | None:
  """Returns the kernel that an instruction starts; None if it starts none."""
  if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
    return None
  operands = list(program.operands(computation, instruction))
  flops, dtype = _matmul_flops(program, instruction, operands)
  return Kernel(
    name=instruction.name,
    kind=_kind_of(program, instruction, flops),
    source=short_source(instruction.source),
    flops=flops,
    dtype=dtype,
    bytes=_bytes_moved(program, instruction, operands),
  )


def _kind_of(program: Program, instruction: Instruction, flops: float) -> str:
  target = instruction.text("custom_call_target")
  if "$f8" in target:
    return FP8_MATMUL
  if target.startswith("__cublas"):
    return MATMUL
  if target.startswith("__cudnn$fmha"):
    return CUDNN_ATTENTION
  if "triton" in target:
    return TRITON
  inside = list(_fused(program, instruction)) if instruction.opcode == "fusion" else []
  if flops:
    calls_cublas = any(i.text("custom_call_target").startswith("__cublas") for i in inside)
    return TRITON_MATMUL if inside and not calls_cublas else MATMUL
  if instruction.opcode in ("copy", "copy-start", "transpose"):
    return COPY
  if instruction.opcode != "fusion":
    return OTHER
  if any(fused.opcode == "reduce" for fused in inside):
    return REDUCTION
  return COPY if _is_copy(inside) else LOOP


def _is_copy(inside: list[Instruction]) -> bool:
  """Returns whether a fusion only moves and converts elements."""
  moves = {*_FREE, "copy", "transpose", "convert", "reshape", "slice", "concatenate", "pad"}
  return all(fused.opcode in moves for fused in inside)


def _fused(program: Program, instruction: Instruction) -> Iterator[Instruction]:
  """Yields all instructions inside a fusion."""
  for name in instruction.called:
    for fused in program.computations[name].values():
      yield fused
      if fused.opcode == "fusion":
        yield from _fused(program, fused)


def _matmul_flops(
  program: Program, instruction: Instruction, operands: list[Instruction]
) -> tuple[float, str]:
  """Returns the FLOPs of the matmuls in a kernel, and the type of their operands."""
  target = instruction.text("custom_call_target")
  if target.startswith("__cublas"):
    config = instruction.backend_config.get("gemm_backend_config", {})
    numbers = config.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", [])
    return _dot_flops(instruction, operands[0], [int(number) for number in numbers])
  if target.startswith("__cudnn$fmha"):
    logits = instruction.backend_config["cudnn_fmha_backend_config"]["intermediate_tensor_shape"]
    matmuls = _CUDNN_BACKWARD_MATMULS if "Backward" in target else _CUDNN_FORWARD_MATMULS
    number = math.prod(int(size) for size in logits["dimensions"])
    return _attention_flops(matmuls, number, operands[0])
  if "triton" in target:
    matmuls = next((n for name, n in _OUR_MATMULS.items() if name in instruction.source), 0)
    if not matmuls:
      return 0.0, ""
    q, k = operands[0].arrays[0], operands[1].arrays[0]
    return _attention_flops(matmuls, math.prod(q.shape[:3]) * k.shape[1], operands[0])
  if instruction.opcode == "dot":
    return _dot_flops(instruction, operands[0], instruction.dimensions("lhs_contracting_dims"))
  total, dtype = 0.0, ""
  for name in instruction.called if instruction.opcode == "fusion" else ():
    for fused in program.computations[name].values():
      flops, found = _matmul_flops(program, fused, list(program.operands(name, fused)))
      total, dtype = total + flops, dtype or found
  return total, dtype


def _dot_flops(
  dot: Instruction, left: Instruction, contracting: list[int] | tuple[int, ...]
) -> tuple[float, str]:
  contracted = math.prod(left.arrays[0].shape[number] for number in contracting)
  return 2.0 * dot.arrays[0].size * contracted, left.arrays[0].dtype


def _attention_flops(matmuls: int, logits: int, query: Instruction) -> tuple[float, str]:
  """Returns the FLOPs of attention, counted for all logits, also those that a mask excludes."""
  array = query.arrays[0]
  return 2.0 * matmuls * logits * array.shape[-1], array.dtype


def _bytes_moved(program: Program, instruction: Instruction, operands: list[Instruction]) -> float:
  """Returns the bytes that a kernel reads and writes; of a slice, only those of the slice."""
  if instruction.opcode in _SLICES:
    return 2 * instruction.bytes
  if instruction.opcode == "dynamic-update-slice":
    return 2 * operands[1].bytes
  if instruction.opcode == "copy-start":  # its results are the copy, the original and a context
    return 2 * operands[0].bytes
  if instruction.opcode != "fusion" or not instruction.called:
    is_library = instruction.text("custom_call_target").startswith("__cu")
    written = [a.bytes for a in instruction.arrays if not (is_library and a.dtype in ("s8", "u8"))]
    return sum({operand.name: operand.bytes for operand in operands}.values()) + sum(written)
  return _bytes_of_fusion(program.computations[instruction.called[0]], instruction, operands)


def _bytes_of_fusion(
  fused: dict[str, Instruction], fusion: Instruction, operands: list[Instruction]
) -> float:
  # An update of a parameter happens in place; only the update itself is written.
  updates = [
    i
    for i in fused.values()
    if i.opcode == "dynamic-update-slice"
    and fused[i.operands[0]].opcode in ("parameter", "bitcast")
  ]
  read = sum(_bytes_read(fused, number, op) for number, op in enumerate(operands))
  written_in_place = sum(update.bytes for update in updates)
  update_bytes = sum(fused[update.operands[1]].bytes for update in updates)
  return read + max(fusion.bytes - written_in_place, 0) + update_bytes


def _bytes_read(fused: dict[str, Instruction], number: int, operand: Instruction) -> float:
  """Returns the bytes that a fusion reads of its operand: slices of it, or all."""
  parameter = next(
    (i.name for i in fused.values() if i.opcode == "parameter" and i.operands == (str(number),)), ""
  )
  read = 0.0
  for user, name in _users(fused, parameter):
    if user.opcode in _SLICES and user.operands[0] == name:
      read += user.bytes
    elif not (user.opcode == "dynamic-update-slice" and user.operands[0] == name):
      return operand.bytes
  return min(read, operand.bytes)


def _users(fused: dict[str, Instruction], name: str) -> Iterator[tuple[Instruction, str]]:
  """Yields the instructions that use a value or another shape of it, and that value's name."""
  for user in fused.values():
    if user.opcode != "parameter" and name in user.operands:
      if user.opcode == "bitcast":
        yield from _users(fused, user.name)
      else:
        yield user, name


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
