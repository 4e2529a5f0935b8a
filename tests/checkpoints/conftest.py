"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

import struct

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


@pytest.fixture
def write_scalars():
  """Writes TensorBoard's file by hand: write_scalars(folder, tag, {step: value})."""

  def write(folder, tag, values):
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "events.out.tfevents.0.test", "ab") as file:
      for step, value in values.items():
        name = tag.encode()
        entry = b"\x0a" + bytes([len(name)]) + name + b"\x15" + struct.pack("<f", value)
        summary = b"\x0a" + bytes([len(entry)]) + entry
        event = b"\x10" + bytes([step]) + b"\x2a" + bytes([len(summary)]) + summary
        # The checksums are not looked at.
        file.write(struct.pack("<Q", len(event)) + b"????" + event + b"????")

  return write
