"""Imports TensorFlow and SeqIO, which read data on the CPU and never see a GPU."""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

from rosetta_t5.data.local_files.local_assets import load_vocabulary_model
from rosetta_t5.data.tensorflow_setup.lazy_keras import defer_keras_import
from rosetta_t5.data.tensorflow_setup.quiet_import import quiet_tensorflow_import
from rosetta_t5.data.tensorflow_setup.seqio_internals import replace_model_loader


@functools.cache
def import_tensorflow() -> Any:
  """Imports TensorFlow, hides every GPU from it, and returns the module.

  TensorFlow allocates the whole memory of every GPU that it sees, and JAX needs that memory. GPUs can
  be hidden only before TensorFlow touches a device, so all code imports TensorFlow through this
  function. Errors still raise exceptions when the log is silenced.
  """
  silence_tensorflow()
  with defer_keras_import(), quiet_tensorflow_import():
    import tensorflow as tf

  tf.config.set_visible_devices([], "GPU")
  return tf


def silence_tensorflow() -> None:
  """Silences TensorFlow's log, unless the user has set TF_CPP_MIN_LOG_LEVEL."""
  if os.environ.get("TF_CPP_MIN_LOG_LEVEL") in (None, "1"):  # JAX sets it to 1 if it is unset.
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
  os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # oneDNN logs two lines when it is enabled.


@functools.cache
def import_seqio() -> Any:
  """Imports seqio after TensorFlow, and makes it read vocabularies from local copies."""
  import_tensorflow()
  with defer_keras_import():
    import seqio

  replace_model_loader(load_vocabulary_model)
  return seqio


def import_in_background() -> threading.Thread:
  """Imports TensorFlow and seqio in a thread, which takes about ten seconds, and returns the thread.

  Other threads that import them meanwhile wait on Python's import lock.
  """
  thread = threading.Thread(target=import_seqio, name="import-tensorflow", daemon=True)
  thread.start()
  return thread
