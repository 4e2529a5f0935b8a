"""The private names of jax that this project uses. No other module imports from `jax._src`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


def coordination_client() -> Any:
  """Returns the client of jax's coordination service: a key-value store and barriers.

  jax has no public name for it; Orbax imports the same private one. It exists once
  `jax.distributed.initialize` has returned.
  """
  from jax._src import distributed

  return distributed.global_state.client


@contextlib.contextmanager
def cudnn_of_another_machine(version: int, capability: tuple[int, int]) -> Iterator[None]:
  """Inside the `with`, jax traces cuDNN attention for a GPU that this machine does not have.

  jax would ask this machine's driver for the version of cuDNN and for the GPU's capability, and has no
  public way to state them. The functions are replaced only while a program is traced.

  Args:
    version: cuDNN's, such as 92800 for 9.28.0.
    capability: the GPU's compute capability.
  """
  from jax._src.cudnn import fused_attention_stablehlo as fused

  def parse(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))

  with mock.patch.multiple(
    fused,
    check_cudnn_version=lambda: version,
    check_compute_capability=lambda least: capability >= parse(least),
    is_cuda_compute_capability_equal=lambda exact: capability == parse(exact),
  ):
    yield
