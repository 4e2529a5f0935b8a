"""TensorFlow and SeqIO as modules `tf` and `seqio` that are imported when they are first used.

They are imported on the CPU, quietly and without Keras and pyglove. Other modules of `data` import `tf` and `seqio` from
here at their top, and remain fast to import. SeqIO's private names that are used are in this file too; setup.cfg
limits SeqIO's version, because a new one may be used only if `tests/data/test_tensorflow_import.py` passes with it.
"""

import contextlib
import functools
import importlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Set
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rosetta_t5.data.vocabularies.sentencepiece_models import load_vocabulary_model

# TensorFlow's C++ code prints these lines before it reads any setting such as TF_CPP_MIN_LOG_LEVEL.
# They report that there is no GPU driver and that log messages go to standard error.
_START_UP_MESSAGE = re.compile(rb"I0000 |WARNING: All log messages before absl::InitializeLog")
# With this variable set and without the package tf_keras, `import tensorflow` skips Keras. TensorFlow
# reads the variable again when tf.keras is first used, and by then it is unset.
_KERAS_VARIABLE = "TF_USE_LEGACY_KERAS"
# Modules that are imported with TensorFlow and SeqIO, take long, and are hardly ever used: for three layers, for a
# callback, and for SeqIO's mixtures with rates to be searched.
_RARELY_USED = ("tensorflow_text.python.keras", "tensorboard.plugins.hparams.api", "pyglove")

# The modules whose functions and classes need no AutoGraph, and call a user's function only if a partial contains it.
_WITHOUT_AUTOGRAPH = re.compile(
  r"rosetta_t5\.|seqio\.(dataset_providers|evaluation|feature_converters|preprocessors|vocabularies)$"
)


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
  with _defer_rare_imports(), quiet_tensorflow_import():
    import tensorflow

  tensorflow.config.set_visible_devices([], "GPU")
  return tensorflow


@functools.cache
def import_seqio() -> Any:
  """Imports seqio after TensorFlow, and makes it read vocabularies from local copies."""
  import_tensorflow()
  with _defer_rare_imports():
    import seqio

  vocabularies = seqio.vocabularies
  vocabularies._load_model = functools.partial(load_vocabulary_model, vocabularies._load_model)
  logging.getLogger("absl").addFilter(_is_useful)
  return seqio


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


@contextlib.contextmanager
def _defer_rare_imports() -> Iterator[None]:
  """Makes `import tensorflow` and `import seqio` skip Keras and pyglove, which are imported when first used.

  Without Keras, which imports scikit-learn, TensorFlow's import takes 2.3 s less of 10.6 s; without pyglove,
  SeqIO's takes 0.3 s less of 1 s. Does nothing if the user has chosen a Keras by setting the variable or
  installing tf_keras.
  """
  if _KERAS_VARIABLE in os.environ or find_spec("tf_keras") is not None:
    yield
    return
  os.environ[_KERAS_VARIABLE] = "1"
  for name in _RARELY_USED:
    sys.modules.setdefault(name, _LazyModule(name))
  try:
    yield
  finally:
    del os.environ[_KERAS_VARIABLE]


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


class _LazyModule(ModuleType):
  """A placeholder that imports the real module when one of its attributes is used."""

  def __init__(self, name: str, load: Callable[[], Any] | None = None):
    super().__init__(name)
    self._load = load or self._import

  def _import(self) -> Any:
    if sys.modules.get(self.__name__) is self:
      del sys.modules[self.__name__]
    return importlib.import_module(self.__name__)

  def __getattr__(self, name: str) -> Any:
    # Python and its tools read attributes such as __file__ of every module. They read a package's
    # __path__ only when they import one of its submodules.
    if name.startswith("__") and name != "__path__":
      raise AttributeError(name)
    return getattr(self._load(), name)


if TYPE_CHECKING:
  import seqio
  import tensorflow as tf
else:
  seqio = _LazyModule("seqio", import_seqio)
  tf = _LazyModule("tensorflow", import_tensorflow)


def without_autograph(build: Callable[..., Any], *used: Any) -> Callable[..., Any]:
  """Returns a function that builds the same datasets as `build`, without AutoGraph if they do not need it.

  AutoGraph rewrites each function that a dataset maps, so that its `if`, `for` and `while` may depend on tensors.
  This takes seconds (benchmarks/results/2026-11-28-start.md). SeqIO's functions and those of this package do not
  need it, except for packing; a user's functions may.

  Args:
    build: builds datasets.
    *used: all whose functions they map: tasks, mixtures, feature converters, functions or classes.
  """
  return tf.autograph.experimental.do_not_convert(build) if all(map(_is_own, used)) else build


def _is_own(used: Any) -> bool:
  """Returns whether something and all that it consists of is SeqIO's or this package's."""
  if isinstance(used, functools.partial):
    parts = [used.func, *filter(callable, (*used.args, *used.keywords.values()))]
  elif isinstance(used, seqio.Mixture):
    parts = used.tasks
  elif isinstance(used, seqio.Task):
    source = getattr(used.source, "_dataset_fn", used.source)  # of a seqio.FunctionDataSource
    vocabularies = (feature.vocabulary for feature in used.output_features.values())
    parts = [type(used), source, *used.preprocessors, *vocabularies]
  else:
    return bool(_WITHOUT_AUTOGRAPH.match(getattr(used, "__module__", None) or ""))
  return all(map(_is_own, parts))


def tfds_data_dir_override() -> str | None:
  """Returns the folder given by --tfds_data_dir; SeqIO has a setter for it but no getter."""
  return seqio.utils._TFDS_DATA_DIR_OVERRIDE


def passthrough_features(converter: Any) -> Set[str]:
  """Returns the names of the features that a SeqIO feature converter copies unchanged."""
  return set(getattr(converter, "_passthrough_features", ()))


def replace_loggers(evaluator: Any, replace: Callable[[Any], Callable[..., None]]) -> None:
  """Replaces each logger of a SeqIO evaluator, which has a getter for them but no setter.

  Those that write JSON write UTF-8, where they would write \\u escapes.
  """
  loggers = getattr(evaluator, "_loggers", ())
  for logger in loggers:
    if encoder := getattr(logger, "_json_encoder_cls", None):
      logger._json_encoder_cls = functools.partial(_utf8_encoder, encoder)
  evaluator._loggers = tuple(map(replace, loggers))


def _utf8_encoder(encoder: Callable[..., Any], **options: Any) -> Any:
  return encoder(**{**options, "ensure_ascii": False})
