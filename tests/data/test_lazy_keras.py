"""Keras is not imported with TensorFlow, but when it is first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio, import_tensorflow
tf, seqio = import_tensorflow(), import_seqio()
from clu import metric_writers
print("keras" in sys.modules, "sklearn" in sys.modules, "TF_USE_LEGACY_KERAS" in os.environ)
import tensorflow_text
import tensorflow_text.python.keras.layers
print(tensorflow_text.keras.layers.ToDense.__name__, tf.keras.layers.Dense(3)(tf.ones([2, 4])).shape)
"""


@pytest.mark.slow
def test_keras_is_imported_when_it_is_first_used():
  out = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
  assert out.stdout.splitlines() == ["False False False", "ToDense (2, 3)"]
