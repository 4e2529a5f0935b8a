"""Compiles programs in a fifth of the time; they run slower, but these tests run each only a few times."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest
from jax.sharding import AbstractDevice

from rosetta_t5.networks.layers import embedding


@pytest.fixture(scope="package", autouse=True)
def quick_compilation() -> Iterator[None]:
  """Disables most of XLA's optimizations; the partitioning of arrays and the collectives stay the same."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def lookups_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
  """Lets devices exchange rows of tables, as programs for GPUs do."""
  gpu = AbstractDevice("NVIDIA H200", num_cores=None, platform="gpu")
  monkeypatch.setattr(embedding, "target_device", lambda: gpu)
