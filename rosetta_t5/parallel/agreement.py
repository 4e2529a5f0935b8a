"""What processes of one run wait for and compare."""

from __future__ import annotations

from typing import Any

import jax


def sync_global_devices(name: str) -> None:
  """Waits until every process has come to the point of this name (T5X)."""
  from jax.experimental import multihost_utils

  multihost_utils.sync_global_devices(name)


def multihost_assert_equal(input_tree: Any, fail_message: str = "") -> None:
  """Raises AssertionError unless all processes have the same values (T5X)."""
  from jax.experimental import multihost_utils

  multihost_utils.assert_equal(input_tree, fail_message)


def set_hardware_rng_ops() -> None:
  """Draws random bits from the devices' own generator from here on: faster, and theirs alone (T5X)."""
  jax.config.update("jax_default_prng_impl", "unsafe_rbg")
