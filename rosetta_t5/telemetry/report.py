"""The run's header, which says what is about to happen, and its end report, which says where it is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from rosetta_t5.telemetry.console import duration_text
from rosetta_t5.telemetry.flops import flops_of_model
from rosetta_t5.telemetry.model_info import count_parameters


def header(
  *,
  model: Any,
  params: Any,
  mesh: jax.sharding.Mesh,
  task: str,
  batch: Mapping[str, Any],
  steps: tuple[int, int],
  model_dir: str | os.PathLike[str],
  restored_from: str | None = None,
  save_period: int | None = None,
  computation: str | None = None,
  notes: Sequence[str] = (),
  mesh_reason: str | None = None,
) -> str:
  """Returns the lines printed before the first step.

  Args:
    model: the model; `model.module.config`, if it has one, gives the FLOPs.
    params: its parameters, or their shapes.
    mesh: the devices.
    task: the task or mixture it learns from.
    batch: the batch's arrays or shapes, by feature.
    steps: (updates made, updates to have been made at the end).
    model_dir: where everything is written.
    restored_from: the checkpoint's path; None from scratch.
    save_period: steps between checkpoints; None for no checkpoints.
    computation: number formats and kernels, and why these.
    notes: warnings about the run, a line each.
    mesh_reason: which settings the mesh is made of.
  """
  device = mesh.devices.flat[0]
  axes = " ".join(f"{name}={size}" for name, size in mesh.shape.items())
  axes += f" ({mesh_reason})" if mesh_reason else ""
  count = mesh.devices.size
  features = ", ".join(
    f"{name} {batch[name].shape[1]}"
    for name in ("encoder_input_tokens", "decoder_target_tokens")
    if name in batch
  )
  size = next(iter(batch.values())).shape[0]
  start = f"from {restored_from}" if restored_from else "from scratch"
  saves = f"a checkpoint every {save_period} steps" if save_period else "no checkpoints"
  rows = [
    (
      "model",
      f"{type(model).__name__}, {count_parameters(params):,} parameters{_flops(model, batch)}",
    ),
    ("devices", f"{count} {device.device_kind} device{'s' * (count > 1)}, mesh {axes}"),
    ("data", f"{task}, batch {size}: {features}"),
    ("steps", f"{steps[0]} to {steps[1]}, {start}"),
    ("writes", f"{os.fspath(model_dir)}, {saves}"),
    *([("computes", computation)] if computation else []),
    *(("note", note) for note in notes),
  ]
  return _rows(rows)


def end_report(
  *,
  steps: tuple[int, int],
  seconds: float,
  losses: tuple[float | None, float | None],
  model_dir: str | os.PathLike[str],
  checkpoint: str | os.PathLike[str] | None,
) -> str:
  """Returns the lines printed when a run has ended.

  Args:
    steps: (updates made before the run, updates made now).
    seconds: how long it took.
    losses: the loss first and last shown, where there was one.
    model_dir: where everything was written.
    checkpoint: the last one saved; None if there is none.
  """
  first, last = losses
  made = steps[1] - steps[0]
  rows = [("done", f"step {steps[1]}: {made} steps in {duration_text(seconds)}")]
  if made == 0:
    rows = [("done", f"step {steps[1]}: nothing was left to do; a larger TRAIN_STEPS goes on")]
  if first is not None and last is not None:
    rows.append(("loss", f"{first:.3f} at first, {last:.3f} at the end"))
  if checkpoint is not None:
    rows.append(("checkpoint", os.fspath(checkpoint)))
  rows.append(("metrics", f"tensorboard --logdir={os.fspath(model_dir)}"))
  return _rows(rows)


def _rows(rows: Sequence[tuple[str, str]]) -> str:
  width = max(len(name) for name, _ in rows)
  return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def _flops(model: Any, batch: Mapping[str, Any]) -> str:
  flops = flops_of_model(model, batch)
  return "" if flops is None else f", {flops / 1e9:,.4g} GFLOP a training sequence"
