"""SeqIO's private names that this package uses. All of them are in this file.

setup.cfg limits SeqIO's version, because a new one may be used only if `tests/data/test_seqio_internals.py`
passes with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from typing import Any


def tfds_data_dir_override() -> str | None:
  """Returns the folder given by --tfds_data_dir; SeqIO has a setter for it but no getter."""
  import seqio

  return seqio.utils._TFDS_DATA_DIR_OVERRIDE


def passthrough_features(converter: Any) -> Set[str]:
  """Returns the names of the features that a SeqIO feature converter copies unchanged."""
  return set(getattr(converter, "_passthrough_features", ()))


def replace_loggers(
  evaluator: Any, replace: Callable[[Callable[..., None]], Callable[..., None]]
) -> None:
  """Replaces each logger of a SeqIO evaluator, which has a getter for them but no setter."""
  evaluator._loggers = tuple(replace(logger) for logger in getattr(evaluator, "_loggers", ()))


def write_utf8(logger: Any) -> None:
  """Makes a SeqIO logger that writes JSON write UTF-8, where it would write \\u escapes."""
  encoder = getattr(logger, "_json_encoder_cls", None)
  if encoder is not None:
    logger._json_encoder_cls = lambda **options: encoder(**{**options, "ensure_ascii": False})


def replace_model_loader(loader: Callable[..., Any]) -> None:
  """Makes every `seqio.SentencePieceVocabulary` load its model with `loader`.

  Args:
    loader: called with SeqIO's own loader, the path, the number of extra ids and further options.
  """
  import seqio

  vocabularies = seqio.vocabularies
  vocabularies._load_model = functools.partial(loader, vocabularies._load_model)
