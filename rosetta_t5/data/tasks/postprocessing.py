"""From a model's text to what the metrics compare: T5's postprocessors.

Each is called with the decoded text and, by name, the example and whether the text is the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Postprocess = Callable[..., Any]


def string_to_float(text: str, default: float = -1.0, **_: Any) -> float:
  """Returns the number that the text spells, or `default`."""
  try:
    return float(text)
  except ValueError:
    return default


def label_to_class(label_classes: Sequence[str]) -> Postprocess:
  """Returns a function from a label's text to its index, -1 for any other text."""
  index = {label: place for place, label in enumerate(label_classes)}

  def to_class(text: str, **_: Any) -> int:
    return index.get(text, -1)

  return to_class


def answers(
  text: str, example: Mapping[str, Any] | None = None, is_target: bool = False, **_: Any
) -> str | list[str]:
  """Returns a predicted answer as it is, and for a target all answers of the example."""
  if not is_target or example is None:
    return text
  return [a.decode() if isinstance(a, bytes) else str(a) for a in example["answers"]]
