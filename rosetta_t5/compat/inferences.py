"""T5X's form of the results of inference, which notebooks written for T5X use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

# Outputs in the order of their examples, and auxiliary values by name.
Inferences = tuple[Sequence[Any], Mapping[str, Any]]


def extract_tokens_and_aux_values(inference_fn_outputs: Any) -> Inferences:
  """Returns the outputs of an inference function in the order of their examples.

  Args:
    inference_fn_outputs: (index, output) pairs, or these pairs and auxiliary values, whose leaves are
      lists or arrays with one entry for each pair.
  """
  has_aux = isinstance(inference_fn_outputs, tuple)
  pairs, aux = inference_fn_outputs if has_aux else (inference_fn_outputs, {})
  order = np.argsort([index for index, _ in pairs])

  def in_order(values: Sequence[Any]) -> list[Any]:
    return [values[position] for position in order]

  def is_leaf(value: Any) -> bool:
    return isinstance(value, (list, np.ndarray))

  return in_order([output for _, output in pairs]), jax.tree.map(in_order, aux, is_leaf=is_leaf)
