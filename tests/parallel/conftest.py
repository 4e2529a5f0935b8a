"""Compiles programs in a fifth of the time; they run slower, but these tests run each only a few times."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def quick_compilation() -> Iterator[None]:
  """Disables most of XLA's optimizations; the partitioning of arrays and the collectives stay the same."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)
