"""TensorFlow's one way in: it reads data on the CPU and never sees a GPU."""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

from rosetta_t5.data.local_files.local_assets import read_local_vocabularies
from rosetta_t5.data.tensorflow_setup.lazy_keras import keras_later
from rosetta_t5.data.tensorflow_setup.start_notes import without_start_notes


@functools.cache
def import_tensorflow() -> Any:
  """Imports TensorFlow, hides every GPU from it, and returns the module.

  TensorFlow takes all memory of each GPU that it can see; the memory belongs to JAX. Hiding works
  only before TensorFlow touches a device, hence the one door. Its log (start-up notes, and the
  lack of a GPU driver as an "error") is silenced unless the user has set TF_CPP_MIN_LOG_LEVEL;
  what goes wrong in earnest is raised.
  """
  silence_tensorflow()
  with keras_later(), without_start_notes():
    import tensorflow as tf

  tf.config.set_visible_devices([], "GPU")
  return tf


def silence_tensorflow() -> None:
  """Sets the variables that keep TensorFlow's log off the screen, whoever imports it."""
  if os.environ.get("TF_CPP_MIN_LOG_LEVEL") in (None, "1"):  # JAX sets 1 where nothing is set.
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
  os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # It announces itself, twice.


@functools.cache
def import_seqio() -> Any:
  """Imports seqio, TensorFlow first and without GPUs; its vocabularies are read from this machine."""
  import_tensorflow()
  with keras_later():
    import seqio

  read_local_vocabularies(seqio.vocabularies)
  return seqio


def start_importing() -> threading.Thread:
  """Imports TensorFlow and seqio in a thread: ten seconds that something else can use.

  Whoever needs them meanwhile waits on Python's import lock; nothing is imported twice.
  """
  thread = threading.Thread(target=import_seqio, name="import-tensorflow", daemon=True)
  thread.start()
  return thread
