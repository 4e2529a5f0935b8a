"""The flash kernels as compiled for GPUs that this machine does not have."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
from collections.abc import Iterator

import jax
import pytest

pytest.importorskip(
  "jax_cuda13_plugin", reason="XLA's GPU compiler is not installed here; see `make gpu-compiler`"
)
pytestmark = pytest.mark.gpu_program
# Set before jax looks for GPUs: its check of versions fails where cuPTI finds no driver.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

from benchmarks.flash_kernels import (  # noqa: E402
  KERNELS,
  compile_attention,
  kernel_resources,
)
from rosetta_t5.telemetry.gpus import GPUS  # noqa: E402

# The instruction of each generation's tensor cores.
MATMULS = {"a100": "mma.sync", "h200": "wgmma.mma_async", "b200": "tcgen05.mma"}


@pytest.fixture(autouse=True)
def _nothing_is_written_to_the_compilation_cache() -> Iterator[None]:
  # jax cannot read the program of a GPU that is not here, and warns.
  name = "jax_persistent_cache_min_compile_time_secs"
  least = jax.config.jax_persistent_cache_min_compile_time_secs
  jax.config.update(name, 1e9)
  yield
  jax.config.update(name, least)


def assembler_messages(code: str) -> str:
  """Returns what ptxas reports, such as that a kernel's matmuls wait for each other (C7515)."""
  (folder,) = importlib.util.find_spec("nvidia").submodule_search_locations
  (ptxas,) = pathlib.Path(folder).glob("*/bin/ptxas")
  target = re.search(r"\.target\s+(\w+)", code)[1]
  command = [ptxas, "-v", f"-arch={target}", "-o", "/dev/null", "-"]
  done = subprocess.run(command, input=code, capture_output=True, text=True, check=True)
  return done.stderr


@pytest.mark.parametrize("gpu", MATMULS)
def test_kernels_for_the_heads_of_gemma_do_not_spill(gpu):
  kernels = kernel_resources(compile_attention(gpu, 256, "cross"), GPUS[gpu])
  assert len(kernels) == 3
  assert not any(kernel.spilled for kernel in kernels), kernels


@pytest.mark.parametrize(
  ("size", "place"), [(64, "encoder"), (64, "decoder"), (128, "encoder"), (128, "decoder")]
)
@pytest.mark.parametrize("gpu", MATMULS)
def test_kernels_use_tensor_cores_and_do_not_spill(gpu, size, place):
  program = compile_attention(gpu, size, place)
  kernels = kernel_resources(program, GPUS[gpu])
  assert {kernel.name for kernel in kernels} == set(KERNELS)
  for kernel in kernels:
    (code,) = (text for text in program.ptx if re.search(rf"\.entry {kernel.name}\b", text))
    assert MATMULS[gpu] in code, kernel.name
    assert kernel.spilled == 0, kernel
    assert "Performance Loss" not in assembler_messages(code), kernel.name
    # At least two programs fit on a multiprocessor, so that one computes while the other waits.
    assert kernel.occupancy * GPUS[gpu].threads >= 2 * kernel.threads, kernel
