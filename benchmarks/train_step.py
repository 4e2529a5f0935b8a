"""Runs `rosetta-t5 bench`, and compares the step with what `rosetta-t5 plan` and its GPU's data sheet expect.

python -m benchmarks.train_step --size base --batch 128
"""

from __future__ import annotations

import argparse
from typing import Any

import jax

from rosetta_t5.cli import bench
from rosetta_t5.gpu_program.hlo import parse_program
from rosetta_t5.gpu_program.roofline import time_program
from rosetta_t5.plan.memory import StateMemory
from rosetta_t5.plan.workload import traced_activations, workload_of
from rosetta_t5.telemetry.gpus import gpu_of

# What is counted in the compiled program → how the compiler writes it.
HLO_MARKS = {
  "fp8 matmuls": '"__cublas$lt$matmul$f8"',
  "cuDNN attentions": '"__cudnn$fmha',
  "Triton calls": '"__gpu$xla.gpu.triton"',
  "e4m3 arrays": "f8e4m3fn[",
  "e5m2 arrays": "f8e5m2[",
}


def expectations(program: bench.CompiledStep, microbatches: int | None) -> dict[str, Any]:
  """Returns counts of operations, temporaries beside the planned ones in GB, and the least time in ms if known."""
  mesh = dict(program.partitioner.mesh.shape)
  features = {"encoder": "encoder_input_tokens", "decoder": "decoder_target_tokens"}
  arrays = {side: program.batch[name] for side, name in features.items() if name in program.batch}
  lengths = {side: array.shape[1] for side, array in arrays.items()}
  state = jax.eval_shape(lambda: program.state)
  activations = traced_activations(program.model, program.partitioner, state, lengths)
  batch_size = arrays["decoder"].shape[0]
  inputs = (program.model, program.partitioner, batch_size, mesh, activations)
  work = workload_of(*inputs).replace(microbatches=microbatches or 1)
  specs = program.partitioner.get_mesh_axes(program.state)
  planned = StateMemory.of(state, specs, work).step(work)
  least, gpu = None, gpu_of(jax.devices()[0].device_kind)
  if gpu:  # Each kernel reaches the rates of the data sheet.
    least = 1e3 * time_program(parse_program(program.step.as_text()), gpu, mesh).seconds
  hlo = program.step.as_text()
  return {
    "hlo": {name: count for name, mark in HLO_MARKS.items() if (count := hlo.count(mark))},
    "temporaries_gb": program.step.memory_analysis().temp_size_in_bytes / 1e9,
    "planned_temporaries_gb": (planned["gradients"] + planned["activations"]) / 1e9,
    "least_ms": least,
  }


def main() -> None:
  """Measures the step that the command line describes."""
  parser = argparse.ArgumentParser(description=__doc__)
  bench.add_arguments(parser)
  args = parser.parse_args()
  program = bench.compile_step(args)
  expected = expectations(program, args.microbatches)  # before the steps donate the state
  bench.show(bench.measure_program(args, program) | expected, args.json)
  print(f"HLO {expected['hlo']}")


if __name__ == "__main__":
  main()
