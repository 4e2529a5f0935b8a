"""The texts printed before and after a training run, and after an evaluation of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from rosetta_t5.telemetry.flops import flops_of_model
from rosetta_t5.telemetry.run_files import count_parameters, log_event
from rosetta_t5.terminal import format_duration

_HEADER_WIDTH = len("computes")


def describe_setup(
  partitioner: Any, dataset_cfg: Any, save_cfg: Any, model_dir: str | os.PathLike[str]
) -> str:
  """Returns the first lines of a training run's header, before it reads data.

  Args:
    partitioner: its `mesh`, and the settings that determine it, `mesh_config.setting`.
    dataset_cfg: the `DatasetConfig` of the training data.
    save_cfg: the `SaveCheckpointConfig`; None if no checkpoints are saved.
    model_dir: the folder of all output.
  """
  devices, reason = partitioner.mesh.devices, partitioner.mesh_config.setting
  axes = " ".join(f"{name}={size}" for name, size in partitioner.mesh.shape.items())
  given = dataset_cfg.task_feature_lengths or {}
  lengths = ", ".join(f"{name} {length}" for name, length in given.items())
  saves = f"a checkpoint every {save_cfg.period} steps" if save_cfg else "no checkpoints"
  kind = f"{devices.flat[0].device_kind} device{'s' * (devices.size > 1)}"
  batch = f"batch {dataset_cfg.batch_size}{': ' * bool(lengths)}{lengths}"
  rows = [
    ("devices", f"{devices.size} {kind}, mesh {axes}{f' ({reason})' if reason else ''}"),
    ("data", f"{dataset_cfg.name}, {batch}"),
    ("writes", f"{os.fspath(model_dir)}, {saves}"),
  ]
  return _format_rows(rows, width=_HEADER_WIDTH)


def describe_training(
  model: Any,
  params: Any,
  batch: Mapping[str, Any],
  steps: tuple[int, int],
  restored_from: str | None = None,
  examples: Sequence[str] = (),
  computation: str | None = None,
  notes: Sequence[str] = (),
) -> str:
  """Returns the lines of the header that are printed before the first step.

  Args:
    model: the model; its `network_config` determines the FLOPs.
    params: the parameters, or their shapes.
    batch: the arrays or shapes of a batch, by feature.
    steps: the completed steps at the start and at the end of the run.
    restored_from: the path of the checkpoint; None if the run starts from scratch.
    examples: lines about the training data: numbers of examples, truncation, epochs.
    computation: number formats and kernels, with reasons.
    notes: warnings about the run, one per line.
  """
  flops = flops_of_model(model, batch)
  cost = "" if flops is None else f", {flops / 1e9:,.4g} GFLOP a training sequence"
  start = f"from {restored_from}" if restored_from else "from scratch"
  rows = [
    ("model", f"{type(model).__name__}, {count_parameters(params):,} parameters{cost}"),
    ("steps", f"{steps[0]} to {steps[1]}, {start}"),
    *(("examples", text) for text in examples),
    *([("computes", computation)] if computation else []),
    *(("note", note) for note in notes),
  ]
  return _format_rows(rows, width=_HEADER_WIDTH)


def log_start(
  model_dir: str,
  setup: str,
  description: str,
  partitioner: Any,
  batch: Mapping[str, Any],
  steps: tuple[int, int],
  computation: str | None,
) -> None:
  """Logs what `rosetta-t5 report` shows about a run that starts; the arguments are those of its header."""
  mesh = partitioner.mesh
  sizes = {name: leaf.shape for name, leaf in batch.items()}
  fields = {
    "header": f"{setup}\n{description}",
    "step": steps[0],
    "total_steps": steps[1],
    "device": mesh.devices.flat[0].device_kind,
    "devices": mesh.devices.size,
    "processes": jax.process_count(),
    "mesh": dict(mesh.shape),
    "mesh_reason": partitioner.mesh_config.setting,
    "batch_size": int(next(iter(sizes.values()))[0]),
    "lengths": {name: int(shape[1]) for name, shape in sizes.items() if len(shape) > 1},
    "computes": computation,
  }
  log_event(model_dir, "start", **fields)


def run_summary(
  *,
  steps: tuple[int, int],
  seconds: float,
  losses: tuple[float | None, float | None],
  model_dir: str | os.PathLike[str],
  checkpoint: str | os.PathLike[str] | None,
) -> str:
  """Returns the lines printed when a run has ended.

  Args:
    steps: the completed steps before and after the run.
    seconds: the duration of the run.
    losses: the first and the last loss that were shown; None if there was none.
    model_dir: the folder of all output.
    checkpoint: the last saved checkpoint; None if there is none.
  """
  first, last = losses
  count = steps[1] - steps[0]
  done = f"{count} steps in {format_duration(seconds)}"
  if count == 0:
    done = "nothing was left to do; set a larger TRAIN_STEPS (or TRAIN_STEPS_RELATIVE) to continue"
  rows = [("done", f"step {steps[1]}: {done}")]
  if first is not None and last is not None:
    rows.append(("loss", f"{first:.3f} at first, {last:.3f} at the end"))
  if checkpoint is not None:
    rows.append(("checkpoint", os.fspath(checkpoint)))
  rows.append(("metrics", f"tensorboard --logdir={os.fspath(model_dir)}"))
  return _format_rows(rows)


def format_metrics_table(metrics: Mapping[int, Mapping[str, Mapping[str, float]]]) -> str:
  """Formats {step: {task: {metric: value}}} as one table of aligned columns per task.

  The cell of a metric that a step does not have is empty.
  """
  tasks = list(dict.fromkeys(task for by_task in metrics.values() for task in by_task))
  return "\n".join(_format_task(task, metrics) for task in tasks)


def _format_rows(rows: Sequence[tuple[str, str]], width: int = 0) -> str:
  width = max(width, *(len(name) for name, _ in rows))
  return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def _cell(value: Any) -> str:
  """Returns a measured number in five digits, and a count or a text as it is."""
  return str(value) if isinstance(value, int | str) else f"{value:.5g}"


def _format_task(task: str, metrics: Mapping[int, Mapping[str, Mapping[str, float]]]) -> str:
  by_step = {step: by_task[task] for step, by_task in sorted(metrics.items()) if task in by_task}
  names = list(dict.fromkeys(name for values in by_step.values() for name in values))
  rows = [["step", *names]]
  for step, values in by_step.items():
    cells = [_cell(values.get(name, "")) for name in names]
    rows.append([str(step), *cells])
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = []
  for row in rows:
    title = task if row is rows[0] else " " * len(task)
    cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
    lines.append("  ".join([title, *cells]).rstrip())
  return "\n".join(lines)
