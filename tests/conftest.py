"""Eight CPU devices for every test, strict arrays, and the way to the oracle's data where it is at hand."""

from __future__ import annotations

import os
import pathlib

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# On several CPU devices, jaxlib 0.11's default order of operations can wait for itself for ever.
if jax.__version_info__ >= (0, 11):
  os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_enable_concurrency_optimized_scheduler=false"
  )

_SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
  """The folder of reference numbers and real data beside the checkout; skips where it is absent."""
  if not _SHARED.is_dir():
    pytest.skip("no folder ../shared with T5X's reference numbers beside this checkout")
  return _SHARED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Skips what is marked `gpu` where jax sees none."""
  marked = [item for item in items if item.get_closest_marker("gpu")]
  if marked and jax.default_backend() != "gpu":
    for item in marked:
      item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
