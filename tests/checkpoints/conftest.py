"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

import pytest
from tiny_state import Counter, Setup

from rosetta_t5.training.optimizers import adamw


@pytest.fixture(scope="session")
def make_setup() -> type[Setup]:
  return Setup


@pytest.fixture(scope="session")
def setup() -> Setup:
  return Setup()


@pytest.fixture(scope="session")
def adam_setup() -> Setup:
  return Setup(optimizer=adamw(learning_rate=1e-3))


@pytest.fixture
def counter() -> Counter:
  return Counter()
