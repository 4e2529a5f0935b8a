"""T5X's functions for runs of several processes."""

from __future__ import annotations

import jax
from jax.experimental.multihost_utils import assert_equal as multihost_assert_equal
from jax.experimental.multihost_utils import sync_global_devices

__all__ = ["multihost_assert_equal", "set_hardware_rng_ops", "sync_global_devices"]


def set_hardware_rng_ops() -> None:
  """Makes jax draw random bits with the devices' own generator: faster, but different numbers."""
  jax.config.update("jax_default_prng_impl", "unsafe_rbg")
