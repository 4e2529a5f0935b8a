"""Converts XLA's out-of-memory errors to errors that list the changes that would save most memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import jax

from rosetta_t5.plan.fitting import USABLE
from rosetta_t5.plan.memory import size_text

# The value of loss_chunk_length that the advice suggests.
LOSS_CHUNK = 16
_MAX_CHANGES = 3

_Option = TypeVar("_Option")


class OutOfMemoryError(RuntimeError):
  """A device does not have enough memory for the run. The text suggests what to change."""


class Change(NamedTuple):
  """A change of the configuration that saves memory.

  Attributes:
    saved: bytes per device.
    line: the line to add to the gin file.
    condition: what the change requires or causes, such as "on 16 devices: "; "" for nothing.
  """

  saved: float
  line: str
  condition: str = ""


@contextmanager
def explain_with(advice: Callable[[], list[str]], general_advice: str) -> Iterator[None]:
  """Adds advice to XLA's out-of-memory errors inside the `with`.

  Args:
    advice: returns the lines of the advice.
    general_advice: replaces it for a model whose network or inputs are unknown.

  Raises:
    OutOfMemoryError: instead of XLA's error.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    first = str(error).splitlines()[0]
    try:
      lines = advice()
    except (KeyError, AttributeError):  # The model is a user's own.
      lines = [general_advice]
    raise OutOfMemoryError("\n".join([f"a device is out of memory: {first}", *lines])) from error


def advice_lines(now: Mapping[str, float], changes: Iterable[Change]) -> list[str]:
  """Returns lines with the memory that is needed now, and the changes that would save most."""
  parts = ", ".join(f"{name} {size_text(size)}" for name, size in now.items())
  lines = [
    f"  {change.line}   # {change.condition}saves about {size_text(change.saved)}"
    for change in sorted(changes, reverse=True)[:_MAX_CHANGES]
    if change.saved > 0
  ]
  return [f"Estimated on each device: {parts}. What would save most:", *lines]


def first_that_fits(options: Sequence[_Option], needed: Callable[[_Option], float]) -> _Option:
  """Returns the first option whose bytes fit into a device's memory, else the last option."""
  return next((option for option in options if needed(option) <= usable_bytes()), options[-1])


def usable_bytes() -> float:
  """Returns the bytes that a run can use on a device. For a CPU, it is a share of the host's memory."""
  stats = jax.local_devices()[0].memory_stats() or {}
  host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  return USABLE * stats.get("bytes_limit", host / jax.local_device_count())
