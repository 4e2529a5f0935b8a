"""Leaves Keras out of TensorFlow's import until somebody uses it: 2.3 s of 10.6 s on two cores.

TensorFlow imports Keras at its end, tensorflow-text defines three Keras layers and TensorBoard a Keras
callback; Keras imports scikit-learn if it is there. Nothing on the way from text to batches to metrics
needs any of them.
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

# If set, and without the package tf_keras, TensorFlow's own import goes on without Keras. It reads
# the variable again when somebody uses tf.keras, and by then it is unset.
_VARIABLE = "TF_USE_LEGACY_KERAS"
_KERAS_USERS = ("tensorflow_text.python.keras", "tensorboard.plugins.hparams.api")


@contextlib.contextmanager
def keras_later() -> Iterator[None]:
  """Inside, `import tensorflow` and `import seqio` leave Keras out; afterwards it comes when used.

  Does nothing where the user has chosen a Keras: by the variable, or by installing tf_keras.
  """
  if _VARIABLE in os.environ or find_spec("tf_keras") is not None:
    yield
    return
  os.environ[_VARIABLE] = "1"
  for name in _KERAS_USERS:
    sys.modules.setdefault(name, _Later(name))
  try:
    yield
  finally:
    del os.environ[_VARIABLE]


class _Later(ModuleType):
  """Stands for a module until something of it is used."""

  def __getattr__(self, name: str) -> Any:
    # Python and its tools look for __file__ and the like in every module; only a package's path
    # is asked for when one of its modules is imported.
    if name.startswith("__") and name != "__path__":
      raise AttributeError(name)
    if sys.modules.get(self.__name__) is self:
      del sys.modules[self.__name__]
    return getattr(importlib.import_module(self.__name__), name)
