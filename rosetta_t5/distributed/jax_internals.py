"""The private names of jax that this project uses. No other module imports from `jax._src`."""

from __future__ import annotations

from typing import Any


def coordination_client() -> Any:
  """Returns the client of jax's coordination service: a key-value store and barriers.

  jax has no public name for it; Orbax imports the same private one. It exists once
  `jax.distributed.initialize` has returned.
  """
  from jax._src import distributed

  return distributed.global_state.client
