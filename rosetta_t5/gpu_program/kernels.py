"""Which kernels and collectives a GPU program starts, what each computes, and which bytes it moves."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from rosetta_t5.gpu_program.hlo import Computation, Instruction, short_source

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
# Instructions of a fusion that only moves values.
_MOVES = {*_FREE, "copy", "transpose", "convert", "reshape", "slice", "concatenate", "pad"}
# Part of the target of a call → the kind of the library's kernel. The first that fits counts.
_LIBRARIES = {
  "$f8": FP8_MATMUL,
  "__cublas": MATMUL,
  "__cudnn$fmha": CUDNN_ATTENTION,
  "triton": TRITON,
}
# Reads of a part of an operand.
_SLICES = ("dynamic-slice", "slice", "gather")
# Instructions that a fusion computes only for the elements that are read of their result.
_PER_ELEMENT = ("bitcast", "convert", "select", "multiply", "divide", "tanh")
# The matmuls of our attention kernels, each of the size of the logits times the head size. The program
# does not say what a kernel computes.
_OUR_MATMULS = {
  "forward_kernel": 2,
  "query_gradient_kernel": 3,
  "key_gradient_kernel": 4,
  "bias_gradient_kernel": 2,
}


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
    count: how often a step starts it.
    seconds: the minimum time of one run.
    bound: what bounds that time (see `roofline`).
  """

  name: str
  kind: str
  source: str
  flops: float
  dtype: str
  bytes: float
  count: int = 1
  seconds: float = 0.0
  bound: str = ""


def kernel_of(instruction: Instruction) -> Kernel | None:
  """Returns the kernel that an instruction starts; None if it starts none."""
  if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
    return None
  flops, dtype = _matmul_flops(instruction)
  return Kernel(
    name=instruction.name,
    kind=_kind_of(instruction, flops),
    source=short_source(instruction.text("op_name")),
    flops=flops,
    dtype=dtype,
    bytes=_bytes_moved(instruction),
  )


def _kind_of(instruction: Instruction, flops: float) -> str:
  target = instruction.text("custom_call_target")
  called = [kind for part, kind in _LIBRARIES.items() if part in target]
  if called:
    return called[0]
  if instruction.opcode == "fusion":
    return _kind_of_fusion(list(_fused(instruction)), has_matmul=flops > 0)
  if flops:
    return MATMUL
  return COPY if instruction.opcode in ("copy", "copy-start", "transpose") else OTHER


def _kind_of_fusion(inside: list[Instruction], has_matmul: bool) -> str:
  if has_matmul:
    calls_cublas = any(i.text("custom_call_target").startswith("__cublas") for i in inside)
    return MATMUL if calls_cublas else TRITON_MATMUL
  opcodes = {fused.opcode for fused in inside}
  if "reduce" in opcodes:
    return REDUCTION
  return COPY if opcodes <= _MOVES else LOOP


def _fused(fusion: Instruction) -> Iterator[Instruction]:
  """Yields all instructions inside a fusion."""
  for fused in fusion.called[0].values():
    yield fused
    if fused.opcode == "fusion":
      yield from _fused(fused)


def _matmul_flops(instruction: Instruction) -> tuple[float, str]:
  """Returns the FLOPs of the matmuls in a kernel, and the type of their operands."""
  operands = instruction.operands
  target = instruction.text("custom_call_target")
  if target.startswith("__cublas"):
    config = instruction.backend_config.get("gemm_backend_config", {})
    numbers = config.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", [])
    return _dot_flops(instruction, [int(number) for number in numbers])
  if target.startswith("__cudnn$fmha"):
    logits = instruction.backend_config["cudnn_fmha_backend_config"]["intermediate_tensor_shape"]
    matmuls = 5 if "Backward" in target else 2
    number = math.prod(int(size) for size in logits["dimensions"])
    return _attention_flops(matmuls, number, operands[0])
  if "triton" in target:
    source = instruction.text("op_name")
    matmuls = next((number for name, number in _OUR_MATMULS.items() if name in source), 0)
    if not matmuls:
      return 0.0, ""
    q, k = operands[0].arrays[0], operands[1].arrays[0]
    return _attention_flops(matmuls, math.prod(q.shape[:3]) * k.shape[1], operands[0])
  if instruction.opcode == "dot":
    return _dot_flops(instruction, instruction.dimensions("lhs_contracting_dims"))
  if instruction.opcode != "fusion":
    return 0.0, ""
  found = [_matmul_flops(fused) for fused in instruction.called[0].values()]
  dtypes = (dtype for _, dtype in found if dtype)
  return sum(flops for flops, _ in found), next(dtypes, "")


def _dot_flops(dot: Instruction, contracting: Iterable[int]) -> tuple[float, str]:
  left = dot.operands[0].arrays[0]
  contracted = math.prod(left.shape[number] for number in contracting)
  return 2.0 * dot.arrays[0].size * contracted, left.dtype


def _attention_flops(matmuls: int, logits: int, query: Instruction) -> tuple[float, str]:
  """Returns the FLOPs of attention, counted for all logits, also those that a mask excludes."""
  array = query.arrays[0]
  return 2.0 * matmuls * logits * array.shape[-1], array.dtype


def _bytes_moved(instruction: Instruction) -> float:
  """Returns the bytes that a kernel reads and writes; of a slice, only those of the slice."""
  operands = instruction.operands
  if instruction.opcode in _SLICES:
    return 2 * instruction.bytes
  if instruction.opcode == "dynamic-update-slice":
    return 2 * operands[1].bytes
  if instruction.opcode == "copy-start":  # its results are the copy, the original and a context
    return 2 * operands[0].bytes
  if instruction.opcode != "fusion":
    is_library = instruction.text("custom_call_target").startswith("__cu")
    written = [a.bytes for a in instruction.arrays if not (is_library and a.dtype in ("s8", "u8"))]
    return sum({operand.name: operand.bytes for operand in operands}.values()) + sum(written)
  return _bytes_of_fusion(instruction)


def _bytes_of_fusion(fusion: Instruction) -> float:
  (fused,) = fusion.called
  # An update of a parameter happens in place; only the update itself is written.
  updates = [i for i in fused.values() if i.opcode == "dynamic-update-slice"]
  updates = [i for i in updates if i.operands[0].opcode in ("parameter", "bitcast")]
  read = sum(_bytes_read(fused, number, op) for number, op in enumerate(fusion.operands))
  written_in_place = sum(update.bytes for update in updates)
  update_bytes = sum(update.operands[1].bytes for update in updates)
  return read + max(fusion.bytes - written_in_place, 0) + update_bytes


def _bytes_read(fused: Computation, number: int, operand: Instruction) -> float:
  """Returns the bytes that a fusion reads of its operand: slices of it, or all."""
  parameters = [i for i in fused.values() if i.opcode == "parameter"]
  parameter = next(i for i in parameters if i.arguments == str(number))
  read = 0.0
  for user, value in _users(fused, parameter):
    if user.opcode in _SLICES and user.operands[0] is value:
      read += user.bytes
    elif not (user.opcode == "dynamic-update-slice" and user.operands[0] is value):
      return operand.bytes
  return min(read, operand.bytes)


def _users(fused: Computation, value: Instruction) -> Iterator[tuple[Instruction, Instruction]]:
  """Yields the instructions that use a value or what is computed from its elements, and which of these."""
  for user in fused.values():
    if value in user.operands:
      further = list(_users(fused, user)) if user.opcode in _PER_ELEMENT else []
      yield from further or [(user, value)]


# Kind → the bytes that one of n devices sends in a ring, for one byte of its operand.
_SENT = {
  "all-reduce": lambda n: 2 * (n - 1) / n,
  "all-gather": lambda n: n - 1,
  "reduce-scatter": lambda n: (n - 1) / n,
  "all-to-all": lambda n: (n - 1) / n,
  "collective-permute": lambda n: 1,
}
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(
  r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?\s*\{([^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective of the program.

  Attributes:
    name: the instruction that starts it.
    kind: such as all-reduce.
    source: what in the model needs it.
    axes: the mesh axes whose devices take part.
    size: the bytes of its operands on one device.
    sent: the bytes that one device sends.
    count: how often a step starts it.
    seconds: the minimum time of one run.
    exposed_seconds: the part of these seconds in which the kernels wait for it.
    leaves_node: whether it uses the network between nodes.
  """

  name: str
  kind: str
  source: str
  axes: tuple[str, ...]
  size: float
  sent: float
  count: int = 1
  seconds: float = 0.0
  exposed_seconds: float = 0.0
  leaves_node: bool = False


def collective_of(instruction: Instruction, mesh: Mapping[str, int]) -> Collective | None:
  """Returns the collective that an instruction starts; None if it starts none."""
  operands = instruction.operands
  if instruction.opcode == "async-start":
    inside = instruction.called[0].values()
    instruction = next((i for i in inside if i.opcode in _SENT), instruction)
  kind = instruction.opcode.removesuffix("-start")
  if kind not in _SENT:
    return None
  group = _group(instruction.attributes, math.prod(mesh.values()))
  size = float(sum(operand.bytes for operand in operands))
  return Collective(
    name=instruction.name,
    kind=kind,
    source=short_source(instruction.text("op_name")),
    axes=_axes(group, mesh),
    size=size,
    sent=size * _SENT[kind](max(len(group), 1)),
  )


def _group(attributes: str, devices: int) -> list[int]:
  """Returns the first group of devices, as positions in the mesh; of pairs, the first that moves data."""
  if found := _LISTED.search(attributes):
    return [int(number) for number in found[1].split(",") if number]
  if found := _PAIRS.search(attributes):
    pairs = re.findall(r"(\d+),(\d+)", found[1])
    return next(([int(a), int(b)] for a, b in pairs if a != b), [0])
  if found := _IOTA.search(attributes):
    return _device_grid(found[3], found[4]).reshape(int(found[1]), int(found[2]))[0].tolist()
  if found := _NAMED.search(attributes):
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
    named = re.findall(r"'([^']+)'", found[4])
    grid = _device_grid(found[2] or ",".join(sizes.values()), found[3])
    grid = grid.reshape([int(size) for size in sizes.values()])
    return grid[tuple(slice(None) if name in named else 0 for name in sizes)].ravel().tolist()
  assert "replica_groups=" not in attributes or "replica_groups={}" in attributes, attributes[:300]
  return list(range(devices))


def _device_grid(shape: str, order: str | None) -> np.ndarray:
  """Returns the numbers of the devices in this shape, such as "4,2", with transposed dimensions."""
  sizes = [int(size) for size in shape.split(",")]
  axes = [int(axis) for axis in order.split(",")] if order else range(len(sizes))
  return np.arange(math.prod(sizes)).reshape(sizes).transpose(axes)


def _axes(group: list[int], mesh: Mapping[str, int]) -> tuple[str, ...]:
  """Returns the mesh axes along which the devices of a group differ."""
  coordinates = np.array(np.unravel_index(group, tuple(mesh.values())))
  differs = (coordinates != coordinates[:, :1]).any(axis=1)
  return tuple(name for name, is_different in zip(mesh, differs, strict=True) if is_different)
