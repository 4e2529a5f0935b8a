"""What the flash kernels need of each GPU: registers, spills, shared memory, occupancy. Needs no GPU.

.venv-gpu/bin/python -m benchmarks.flash_kernels --gpus a100 h200 b200 --sizes 64 128
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rosetta_t5.gpu_program.compiler import (
  CompiledProgram,
  compile_program,
  gpu_devices,
  tracing_for,
  use_compiler_without_gpu,
)
from rosetta_t5.gpu_program.kernels import kernel_resources
from rosetta_t5.kernels.flash_attention import flash_attention
from rosetta_t5.kernels.flash_kernels import Segments
from rosetta_t5.telemetry.gpus import GPUS

KERNELS = tuple(
  f"{name}_kernel" for name in ["forward", "query_gradient", "key_gradient", "bias_gradient"]
)
# Name → (queries, keys, whether there is a bias, whether it is causal).
ATTENTIONS = {
  "encoder": (512, 512, True, False),
  "decoder": (128, 128, True, True),
  "cross": (128, 512, False, False),
}


def compile_attention(
  gpu: str, size: int, attention: str, batch: int = 8, heads: int = 12
) -> CompiledProgram:
  """Returns the program of one attention, forward and backward, in bfloat16."""
  queries, keys, has_bias, causal = ATTENTIONS[attention]
  mesh = Mesh(np.array(gpu_devices(GPUS[gpu], 1)), ("data",), axis_types=(AxisType.Auto,))

  def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

  def loss(operands: tuple, segments: Segments) -> jax.Array:
    out = flash_attention(*operands, segments, causal)
    return jnp.sum(out.astype(jnp.float32))

  shapes = ((batch, length, heads, size) for length in (queries, keys, keys))
  operands = [array(*shape) for shape in shapes]
  operands.append(array(1, heads, queries, keys) if has_bias else None)
  segments = Segments(*(array(batch, length, dtype=jnp.int32) for length in (queries, keys)))
  with jax.set_mesh(mesh), tracing_for(GPUS[gpu]):
    lowered = jax.jit(jax.grad(loss)).lower(tuple(operands), segments)
  return compile_program(lowered)


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
        for used in kernel_resources(program, KERNELS, GPUS[gpu]):
          name, warps = used.name.removesuffix("_kernel"), used.occupancy * GPUS[gpu].threads / 32
          print(
            f"| {gpu} | {size} | {attention} | {name} | {used.registers} | {used.spilled} | "
            f"{used.shared_memory / 1024:.0f} kB | {warps:.0f} |",
            flush=True,
          )


if __name__ == "__main__":
  main()
