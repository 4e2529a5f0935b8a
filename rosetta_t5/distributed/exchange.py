"""What processes of one run wait for and compare."""

from __future__ import annotations

import itertools
from typing import Any

import jax

# The service keeps what was told; a number makes the next matter of the same name another one.
_told = itertools.count()


def sync_global_devices(name: str) -> None:
  """Waits until every process has come to the point of this name (T5X)."""
  from jax.experimental import multihost_utils

  multihost_utils.sync_global_devices(name)


def told_by_the_first(text: str, name: str, timeout_s: float) -> str:
  """Returns, on every process, the text that process 0 gives; the others' is not looked at.

  It goes through jax's coordination service, so waiting keeps no device busy.

  Args:
    text: what process 0 has to say.
    name: of the matter, the same on all and used once a call.
    timeout_s: how long the others wait.
  """
  if jax.process_count() == 1:
    return text
  from jax._src import distributed

  client: Any = distributed.global_state.client
  key = f"rosetta_t5/told/{name}/{next(_told)}"
  if jax.process_index() == 0:
    client.key_value_set(key, text)
    return text
  return str(client.blocking_key_value_get(key, int(timeout_s * 1000)))


def told_by_all(text: str, name: str, timeout_s: float) -> list[str]:
  """Returns, on every process, the texts that all of them give, in the processes' order.

  Args:
    text: what this process has to say.
    name: as for `told_by_the_first`.
    timeout_s: how long each waits for the others.
  """
  if jax.process_count() == 1:
    return [text]
  from jax._src import distributed

  client: Any = distributed.global_state.client
  key = f"rosetta_t5/told/{name}/{next(_told)}"
  client.key_value_set(f"{key}/{jax.process_index()}", text)
  keys = [f"{key}/{index}" for index in range(jax.process_count())]
  return [str(client.blocking_key_value_get(key, int(timeout_s * 1000))) for key in keys]


def multihost_assert_equal(input_tree: Any, fail_message: str = "") -> None:
  """Raises AssertionError unless all processes have the same values (T5X)."""
  from jax.experimental import multihost_utils

  multihost_utils.assert_equal(input_tree, fail_message)


def set_hardware_rng_ops() -> None:
  """Draws random bits from the devices' own generator from here on: faster, and theirs alone (T5X)."""
  jax.config.update("jax_default_prng_impl", "unsafe_rbg")
