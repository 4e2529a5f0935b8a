"""The flash kernels as compiled for GPUs that this machine does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator

import jax
import pytest

pytest.importorskip(
  "jax_cuda13_plugin", reason="XLA's GPU compiler is not installed here; see `make gpu-compiler`"
)
pytestmark = pytest.mark.gpu_program

from benchmarks.flash_kernels import KERNELS, compile_attention  # noqa: E402
from rosetta_t5.gpu_program.ptx import kernel_resources  # noqa: E402
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


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("gpu", MATMULS)
def test_kernels_use_tensor_cores_and_do_not_spill(gpu, size):
  program = compile_attention(gpu, size, "decoder")
  kernels = kernel_resources(program, KERNELS, GPUS[gpu])
  assert {kernel.name for kernel in kernels} == set(KERNELS)
  for kernel in kernels:
    (code,) = (text for text in program.ptx if re.search(rf"\.entry {kernel.name}\b", text))
    assert MATMULS[gpu] in code, kernel.name
    assert kernel.spilled == 0, kernel
    # At least two programs fit on a multiprocessor, so that one computes while the other waits.
    assert kernel.occupancy * GPUS[gpu].threads >= 2 * kernel.threads, kernel
