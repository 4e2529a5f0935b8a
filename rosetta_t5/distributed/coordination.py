"""Values that all processes of a run share, sent through jax's coordination service.

The service is a key-value store on the host of process 0, so waiting for a value keeps no device busy.
"""

from __future__ import annotations

import itertools
import time

import jax
import numpy as np

from rosetta_t5.jax_internals import coordination_client

# The service keeps every key, so each call needs a new one: calls are numbered.
_call_numbers = itertools.count()


def broadcast_text(text: str, name: str, timeout_s: float) -> str:
  """Returns the text of process 0 on every process.

  All processes must make the same calls in the same order.

  Args:
    text: the text to send. Only that of process 0 is used.
    name: identifies the call in error messages; the same on every process.
    timeout_s: seconds that the other processes wait for process 0.
  """
  if jax.process_count() == 1:
    return text
  client, key = coordination_client(), _next_key(name)
  if jax.process_index() == 0:
    client.key_value_set(key, text)
    return text
  return str(client.blocking_key_value_get(key, int(timeout_s * 1000)))


def allgather_text(text: str, name: str, timeout_s: float) -> list[str]:
  """Returns the texts of all processes, ordered by process index, on every process.

  All processes must make the same calls in the same order.

  Args:
    text: the text of this process.
    name: identifies the call in error messages; the same on every process.
    timeout_s: seconds that each process waits for the others.
  """
  if jax.process_count() == 1:
    return [text]
  client, key = coordination_client(), _next_key(name)
  client.key_value_set(f"{key}/{jax.process_index()}", text)
  keys = [f"{key}/{index}" for index in range(jax.process_count())]
  return [str(client.blocking_key_value_get(key, int(timeout_s * 1000))) for key in keys]


def _next_key(name: str) -> str:
  return f"rosetta_t5/{name}/{next(_call_numbers)}"


def draw_seed() -> int:
  """Returns a seed drawn from the clock, the same on every process."""
  seed = np.int32(int(time.time()) % 2**31)
  if jax.process_count() > 1:
    from jax.experimental import multihost_utils

    seed = multihost_utils.broadcast_one_to_all(seed)
  return int(seed)
