"""T5's postprocessors, which convert a model's text to what the metrics compare.

SeqIO calls each with the decoded text, and passes the example and `is_target` by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def string_to_float(text: str, default: float = -1.0, **_: Any) -> float:
  """Returns the text as a number, or `default` if it is not one."""
  try:
    return float(text)
  except ValueError:
    return default


def label_to_class(text: str, label_classes: Sequence[str], **_: Any) -> int:
  """Returns the index of a label, or -1 for any other text."""
  return label_classes.index(text) if text in label_classes else -1


def answers(
  text: str, example: Mapping[str, Any] | None = None, is_target: bool = False, **_: Any
) -> str | list[str]:
  """Returns a prediction unchanged, and all answers of the example for a target."""
  if not is_target or example is None:
    return text
  return [a.decode() if isinstance(a, bytes) else str(a) for a in example["answers"]]
