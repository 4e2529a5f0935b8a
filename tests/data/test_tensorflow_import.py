"""TensorFlow is imported only when it is needed, quietly, and sees no GPU."""

from __future__ import annotations

import os

import pytest

from rosetta_t5.data.tensorflow_setup.tensorflow_import import (
  import_tensorflow,
  quiet_tensorflow_import,
)


def test_tensorflow_sees_no_gpu() -> None:
  assert import_tensorflow().config.get_visible_devices("GPU") == []


MESSAGES = b"""WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795227485.927581    7104 cudart_stub.cc:31] Could not find cuda drivers
"""


def test_start_up_messages_are_hidden_and_other_lines_are_printed(capfd):
  with quiet_tensorflow_import():
    os.write(2, MESSAGES + b"a line of another thread\n")
  os.write(2, b"after\n")
  assert capfd.readouterr().err == "a line of another thread\nafter\n"


def test_lines_before_an_error_are_printed(capfd):
  def fail():
    os.write(2, b"missing library\n")
    raise ImportError

  with pytest.raises(ImportError), quiet_tensorflow_import():
    fail()
  assert capfd.readouterr().err == "missing library\n"
