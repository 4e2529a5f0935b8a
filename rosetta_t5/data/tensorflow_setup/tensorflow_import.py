"""Imports TensorFlow and SeqIO for reading data: on the CPU, quietly and without Keras."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from rosetta_t5.data.tensorflow_setup.lazy_keras import defer_keras_import
from rosetta_t5.data.tensorflow_setup.seqio_internals import replace_model_loader
from rosetta_t5.data.vocabularies.sentencepiece_models import load_vocabulary_model

# TensorFlow's C++ code prints these lines before it reads any setting such as TF_CPP_MIN_LOG_LEVEL.
# They report that there is no GPU driver and that log messages go to standard error.
_START_UP_MESSAGE = re.compile(rb"I0000 |WARNING: All log messages before absl::InitializeLog")


@functools.cache
def import_tensorflow() -> Any:
  """Imports TensorFlow, hides every GPU from it, and returns the module.

  TensorFlow allocates the whole memory of every GPU that it sees, and JAX needs that memory. GPUs can
  be hidden only before TensorFlow touches a device, so all code imports TensorFlow through this
  function. TensorFlow's log is silenced, unless the user has set TF_CPP_MIN_LOG_LEVEL; its errors still
  raise exceptions.
  """
  if os.environ.get("TF_CPP_MIN_LOG_LEVEL") in (None, "1"):  # JAX sets it to 1 if it is unset.
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
  os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # oneDNN logs two lines when it is enabled.
  with defer_keras_import(), quiet_tensorflow_import():
    import tensorflow as tf

  tf.config.set_visible_devices([], "GPU")
  return tf


@contextlib.contextmanager
def quiet_tensorflow_import() -> Iterator[None]:
  """Buffers standard error inside the context, then prints it without TensorFlow's start-up messages."""
  sys.stderr.flush()
  screen = os.dup(2)
  with tempfile.TemporaryFile() as buffer:
    os.dup2(buffer.fileno(), 2)
    try:
      yield
    finally:
      sys.stderr.flush()
      os.dup2(screen, 2)
      os.close(screen)
      buffer.seek(0)
      for line in buffer:
        if not _START_UP_MESSAGE.match(line):
          os.write(2, line)


@functools.cache
def import_seqio() -> Any:
  """Imports seqio after TensorFlow, and makes it read vocabularies from local copies."""
  import_tensorflow()
  with defer_keras_import():
    import seqio

  replace_model_loader(load_vocabulary_model)
  logging.getLogger("absl").addFilter(_is_useful)
  return seqio


def _is_useful(record: logging.LogRecord) -> bool:
  """Returns whether a log message helps: not what every run does, nor what is raised as an error."""
  is_raised = record.exc_info is not None and "/orbax/" in record.pathname
  return not is_raised and not str(record.msg).startswith(
    (
      "Features not in `features_length`",
      "Given sequence lengths are longer than necessary",
      "T5 library uses PAD_ID",  # reserve_padding says what follows
    )
  )
