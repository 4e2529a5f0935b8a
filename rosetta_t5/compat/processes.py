"""T5X's functions for runs of several processes."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.multihost_utils import assert_equal, sync_global_devices

__all__ = ["multihost_assert_equal", "set_hardware_rng_ops", "sync_global_devices"]


def multihost_assert_equal(input_tree: Any, fail_message: str = "") -> None:
  """Raises AssertionError unless `input_tree` is the same on all processes."""
  assert_equal(input_tree, fail_message)


def set_hardware_rng_ops() -> None:
  """Sets jax's PRNG to the devices' own generator, which is faster but gives other numbers."""
  jax.config.update("jax_default_prng_impl", "unsafe_rbg")
