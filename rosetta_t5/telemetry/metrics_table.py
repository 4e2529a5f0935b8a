"""Metrics of several checkpoints as a table: one row per checkpoint, one column per metric."""

from __future__ import annotations

from collections.abc import Mapping


def format_metrics_table(metrics: Mapping[int, Mapping[str, Mapping[str, float]]]) -> str:
  """Formats {step: {task: {metric: value}}} as one table of aligned columns per task.

  The cell of a metric that a step does not have is empty.
  """
  tasks = list(dict.fromkeys(task for by_task in metrics.values() for task in by_task))
  return "\n".join(_format_task(task, metrics) for task in tasks)


def _format_task(task: str, metrics: Mapping[int, Mapping[str, Mapping[str, float]]]) -> str:
  by_step = {step: by_task[task] for step, by_task in sorted(metrics.items()) if task in by_task}
  names = list(dict.fromkeys(name for values in by_step.values() for name in values))
  rows = [["step", *names]]
  for step, values in by_step.items():
    cells = [f"{values[name]:.5g}" if name in values else "" for name in names]
    rows.append([str(step), *cells])
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = []
  for row in rows:
    title = task if row is rows[0] else " " * len(task)
    cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
    lines.append("  ".join([title, *cells]).rstrip())
  return "\n".join(lines)
