"""TensorFlow is imported only when it is needed, quietly, and sees no GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rosetta_t5.data.tensorflow_import import (
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


PROGRAM = """
import os, sys
from rosetta_t5.data.tensorflow_import import seqio, tf
print("tensorflow" in sys.modules, "seqio" in sys.modules)
seqio.Feature, tf.constant
from clu import metric_writers
print("keras" in sys.modules, "sklearn" in sys.modules, "TF_USE_LEGACY_KERAS" in os.environ)
import tensorflow_text
import tensorflow_text.python.keras.layers
print(tensorflow_text.keras.layers.ToDense.__name__, tf.keras.layers.Dense(3)(tf.ones([2, 4])).shape)
"""


@pytest.mark.slow
def test_tensorflow_seqio_and_keras_are_imported_when_they_are_first_used():
  out = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
  assert out.stdout.splitlines() == ["False False", "False False False", "ToDense (2, 3)"]
