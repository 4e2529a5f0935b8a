"""Restores what the command changes in the process of the tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
  """Restores the handlers of the signals that end the command."""
  before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
  yield
  for number, handler in before.items():
    signal.signal(number, handler)
