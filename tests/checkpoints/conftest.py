"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

import pytest
from tiny_state import Counter, Setup

from rosetta_t5.training.optimizers.optax_wrapper import adamw


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
  """Returns a function that writes a TensorBoard file: write_scalars(folder, tag, {step: value})."""
  from tensorboard.compat.proto import event_pb2, summary_pb2
  from tensorboard.summary.writer.record_writer import RecordWriter

  def write(folder, tag, values):
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "events.out.tfevents.0.test", "ab") as file:
      writer = RecordWriter(file)
      for step, value in values.items():
        scalar = summary_pb2.Summary.Value(tag=tag, simple_value=value)
        summary = summary_pb2.Summary(value=[scalar])
        writer.write(event_pb2.Event(step=step, summary=summary).SerializeToString())

  return write
