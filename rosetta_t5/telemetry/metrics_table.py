"""Metrics as a table: a row a checkpoint, a column a metric."""

from __future__ import annotations

from collections.abc import Mapping


def metrics_table(metrics: Mapping[int, Mapping[str, Mapping[str, float]]]) -> str:
  """Returns {step: {task: {metric: value}}} as aligned lines, a block a task.

  A task's metrics are the columns; where a step lacks one, its cell is empty.
  """
  tasks = list(dict.fromkeys(task for by_task in metrics.values() for task in by_task))
  return "\n".join(_block(task, metrics) for task in tasks)


def _block(task: str, metrics: Mapping[int, Mapping[str, Mapping[str, float]]]) -> str:
  by_step = {step: by_task[task] for step, by_task in sorted(metrics.items()) if task in by_task}
  names = list(dict.fromkeys(name for values in by_step.values() for name in values))
  rows = [[task, "step", *names]]
  for step, values in by_step.items():
    cells = [f"{values[name]:.5g}" if name in values else "" for name in names]
    rows.append(["", str(step), *cells])
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return "\n".join(_line(row, widths) for row in rows)


def _line(row: list[str], widths: list[int]) -> str:
  task, *cells = row
  aligned = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
  return "  ".join([task.ljust(widths[0]), *aligned]).rstrip()
