"""The texts printed before and after a training run, and after an evaluation of checkpoints."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from rosetta_t5.telemetry.console import format_duration
from rosetta_t5.telemetry.flops import flops_of_model
from rosetta_t5.telemetry.run_files import count_parameters

_HEADER_WIDTH = len("computes")


@dataclasses.dataclass(frozen=True)
class RunSetup:
  """What is known about a training run before it reads data: the first part of its header.

  Attributes:
    mesh: the devices.
    mesh_reason: the settings that determine the mesh.
    task: the task or mixture that the model trains on.
    batch_size: the examples in a global batch.
    lengths: the tokens of each feature of the task; None if the task determines them.
    model_dir: the folder of all output.
    save_period: steps between checkpoints; None if none are saved.
  """

  mesh: jax.sharding.Mesh
  mesh_reason: str | None
  task: str
  batch_size: int
  lengths: Mapping[str, Any] | None
  model_dir: str | os.PathLike[str]
  save_period: int | None

  def text(self) -> str:
    """Returns the lines printed at the start of a run."""
    count, device = self.mesh.devices.size, self.mesh.devices.flat[0]
    axes = " ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
    axes += f" ({self.mesh_reason})" if self.mesh_reason else ""
    lengths = ", ".join(f"{name} {length}" for name, length in (self.lengths or {}).items())
    saves = f"a checkpoint every {self.save_period} steps" if self.save_period else "no checkpoints"
    rows = [
      ("devices", f"{count} {device.device_kind} device{'s' * (count > 1)}, mesh {axes}"),
      ("data", f"{self.task}, batch {self.batch_size}{': ' * bool(lengths)}{lengths}"),
      ("writes", f"{os.fspath(self.model_dir)}, {saves}"),
    ]
    return _format_rows(rows, width=_HEADER_WIDTH)


@dataclasses.dataclass(frozen=True)
class RunDescription:
  """What a training run is about to do, for the rest of its header and for its log.

  Attributes:
    setup: the first part of the header.
    model: the model; its `network_config` determines the FLOPs.
    params: the parameters, or their shapes.
    batch: the arrays or shapes of a batch, by feature.
    steps: the completed steps at the start and at the end of the run.
    restored_from: the path of the checkpoint; None if the run starts from scratch.
    examples: lines about the training data: numbers of examples, truncation, epochs.
    computation: number formats and kernels, with reasons.
    notes: warnings about the run, one per line.
  """

  setup: RunSetup
  model: Any
  params: Any
  batch: Mapping[str, Any]
  steps: tuple[int, int]
  restored_from: str | None = None
  examples: Sequence[str] = ()
  computation: str | None = None
  notes: Sequence[str] = ()

  def text(self) -> str:
    """Returns the lines printed before the first step."""
    flops = flops_of_model(self.model, self.batch)
    cost = "" if flops is None else f", {flops / 1e9:,.4g} GFLOP a training sequence"
    start = f"from {self.restored_from}" if self.restored_from else "from scratch"
    parameters = count_parameters(self.params)
    rows = [
      ("model", f"{type(self.model).__name__}, {parameters:,} parameters{cost}"),
      ("steps", f"{self.steps[0]} to {self.steps[1]}, {start}"),
    ]
    rows += [("examples", text) for text in self.examples]
    if self.computation:
      rows.append(("computes", self.computation))
    return _format_rows(
      [*rows, *(("note", note) for note in self.notes)],
      width=_HEADER_WIDTH,
    )

  def facts(self) -> dict[str, Any]:
    """Returns what `rosetta-t5 report` needs to know, as numbers and texts."""
    mesh = self.setup.mesh
    return {
      "header": f"{self.setup.text()}\n{self.text()}",
      "step": self.steps[0],
      "total_steps": self.steps[1],
      "device": mesh.devices.flat[0].device_kind,
      "devices": mesh.devices.size,
      "processes": jax.process_count(),
      "mesh": dict(mesh.shape),
      "mesh_reason": self.setup.mesh_reason,
      "batch_size": self.setup.batch_size,
      "lengths": {
        name: int(leaf.shape[1]) for name, leaf in self.batch.items() if len(leaf.shape) > 1
      },
      "computes": self.computation,
    }


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
