"""The position of this process in its run, without importing jax or touching a device."""

from __future__ import annotations

import sys


def index_and_count() -> tuple[int, int]:
  """Returns the index of this process and the number of processes; (0, 1) before they have met."""
  jax = sys.modules.get("jax")
  if jax is None or not jax.distributed.is_initialized():
    return 0, 1
  return jax.process_index(), jax.process_count()
