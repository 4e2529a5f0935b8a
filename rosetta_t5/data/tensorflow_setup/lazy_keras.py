"""Postpones the import of Keras until it is used, which saves 2.3 s of the 10.6 s of TensorFlow's import.

TensorFlow, tensorflow-text (for three layers) and TensorBoard (for a callback) import Keras, and Keras
imports scikit-learn. This package reads text, makes batches and computes metrics without any of them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

# With this variable set and without the package tf_keras, `import tensorflow` skips Keras. TensorFlow
# reads the variable again when tf.keras is first used, and by then it is unset.
_VARIABLE = "TF_USE_LEGACY_KERAS"
_KERAS_USERS = ("tensorflow_text.python.keras", "tensorboard.plugins.hparams.api")
# What is used of these modules without Keras, and the modules that define it.
_WITHOUT_KERAS = {"hparams": "tensorboard.plugins.hparams.summary_v2"}


@contextlib.contextmanager
def defer_keras_import() -> Iterator[None]:
  """Makes `import tensorflow` and `import seqio` skip Keras, which is imported when it is first used.

  Does nothing if the user has chosen a Keras by setting the variable or installing tf_keras.
  """
  if _VARIABLE in os.environ or find_spec("tf_keras") is not None:
    yield
    return
  os.environ[_VARIABLE] = "1"
  for name in _KERAS_USERS:
    sys.modules.setdefault(name, _LazyModule(name))
  try:
    yield
  finally:
    del os.environ[_VARIABLE]


class _LazyModule(ModuleType):
  """A placeholder that imports the real module when one of its attributes is used."""

  def __getattr__(self, name: str) -> Any:
    # Python and its tools read attributes such as __file__ of every module. They read a package's
    # __path__ only when they import one of its submodules.
    if name.startswith("__") and name != "__path__":
      raise AttributeError(name)
    if name in _WITHOUT_KERAS:
      return getattr(importlib.import_module(_WITHOUT_KERAS[name]), name)
    if sys.modules.get(self.__name__) is self:
      del sys.modules[self.__name__]
    return getattr(importlib.import_module(self.__name__), name)
