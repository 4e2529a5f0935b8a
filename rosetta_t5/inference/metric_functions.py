"""Metrics as functions of targets and of what a model made of them (SeqIO's metric_fns)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_ARGUMENTS = (
  ("targets", "scores"),
  ("targets", "predictions"),
  ("targets", "predictions", "aux_values"),
)


def needed_arguments(metric_fn: Callable[..., Any]) -> tuple[str, ...]:
  """Returns what a metric function is to be given.

  Raises:
    ValueError: it has other arguments than SeqIO's metric functions.
  """
  parameters = inspect.signature(metric_fn).parameters.values()
  names = tuple(p.name for p in parameters if p.default is p.empty)
  if names not in _ARGUMENTS:
    wanted = " or ".join(f"({', '.join(arguments)})" for arguments in _ARGUMENTS)
    raise ValueError(f"a metric_fn has the arguments ({', '.join(names)}), but takes {wanted}")
  return names


def compute_metrics(
  metric_fns: Sequence[Callable[..., Any]], given: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns all metrics by name.

  Args:
    metric_fns: the functions; each returns {name: value}.
    given: their arguments by name.

  Raises:
    ValueError: two functions give metrics of one name.
  """
  metrics: dict[str, Any] = {}
  for metric_fn in metric_fns:
    arguments = (given[name] for name in needed_arguments(metric_fn))
    for name, value in metric_fn(*arguments).items():
      if name in metrics:
        raise ValueError(f"two metric_fns give a metric called {name!r}: rename one of them")
      metrics[name] = value
  return metrics
