"""Programs here are run a few times each: they are compiled in a fifth of the time, and run slower."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def quick_compilation() -> Iterator[None]:
  """Turns most of XLA's optimisations off; how arrays are split and summed over devices stays."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)
