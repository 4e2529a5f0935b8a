"""The progress of a run on the console: a bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Mapping
from typing import IO, Any

import jax

from rosetta_t5.telemetry import run_metrics

Metrics = Mapping[str, float]

# The loss per target token comes first: it can be compared between runs with different batches.
_LOSSES = ("loss_per_nonpadding_target_token", "loss")
_STEPS_PER_SECOND = "timing/steps_per_second"
_TOKENS_PER_SECOND = "timing/target_tokens_per_second"
_EPOCHS = "data/epochs/"
_LOG_CELLS = {
  run_metrics.SAMPLES: "{:.0f} samples",
  "learning_rate/current": "lr {:.4g}",
  run_metrics.GRADIENT_NORM: "grad norm {:.4g}",
  run_metrics.WEIGHT_NORM: "param norm {:.4g}",
  run_metrics.UTILIZATION: "MFU {:.1%}",
  run_metrics.SKIPPED_STEPS: "skipped {:.0f}",
}
# What a run's line shows where these were not measured: a CPU has no known peak, and only
# optax.apply_if_finite skips steps.
_DEFAULT_CELLS = {run_metrics.UTILIZATION: "MFU n/a", run_metrics.SKIPPED_STEPS: "skipped 0"}
_DATA_PROBLEMS = {
  "data/bad_examples": "bad examples left out:",
  "data/unreadable": "unreadable records:",
}


class Progress(contextlib.AbstractContextManager["Progress"]):
  """Shows steps, loss, speed and the time left: a bar on a terminal, lines elsewhere.

  Only the first process prints.

  Attributes:
    first_loss: the loss in the first report; None if the report had no loss.
    last_loss: the loss in the last report.
  """

  def __init__(
    self,
    first_step: int,
    total_steps: int,
    stream: IO[str] | None = None,
    loss_is_sum: bool = True,
  ):
    """Builds a display, which starts when it is entered as a context.

    Args:
      first_step: the number of steps completed before the run.
      total_steps: the number of steps completed when the run ends.
      stream: where to print; None for standard output.
      loss_is_sum: whether the loss is a sum over tokens, which is shown per token. False if the
        model divides it by a loss_normalizing_factor.
    """
    self._loss_is_sum = loss_is_sum
    self._first_step = first_step
    self._total_steps = total_steps
    self._stream = stream or sys.stdout
    self._bar: Any = None
    self.first_loss: float | None = None
    self.last_loss: float | None = None

  def __enter__(self) -> Progress:
    if _is_terminal(self._stream) and jax.process_index() == 0:
      self._bar = _start_bar(self._first_step, self._total_steps, self._stream)
    return self

  def __exit__(self, *exc_info: object) -> None:
    bar, self._bar = self._bar, None
    if bar is not None:
      bar.stop()

  def report(self, step: int, values: Metrics) -> None:
    """Shows the metrics of the steps up to `step`."""
    loss = loss_to_show(values, self._loss_is_sum)
    self.first_loss = loss if self.first_loss is None else self.first_loss
    self.last_loss = loss
    cells = _loss_cells(loss)
    if values.get(run_metrics.SEQUENCES_PER_SECOND):
      cells.append(f"{values[run_metrics.SEQUENCES_PER_SECOND]:.4g} seq/s")
    if values.get(_STEPS_PER_SECOND):
      seconds_left = (self._total_steps - step) / values[_STEPS_PER_SECOND]
      cells.append(f"eta {format_duration(seconds_left)}")
    cells += _data_cells(values)
    if self._bar is not None:
      self._bar.update(self._bar.task_ids[0], completed=step, description="  ".join(cells))
    else:
      # A log line has room for more cells than a bar, and grep finds them all in one line.
      self.print_line("  ".join([f"step {step}/{self._total_steps}", *cells, *_log_cells(values)]))

  def report_evaluation(self, step: int, values_by_task: Mapping[str, Metrics]) -> None:
    """Shows the loss and the accuracy of each task."""
    for task, values in values_by_task.items():
      cells = _loss_cells(loss_to_show(values, self._loss_is_sum))
      cells += [f"{name} {value:.4g}" for name, value in values.items() if name == "accuracy"]
      self.print_line("  ".join([f"evaluation at step {step}", task, *cells]))

  def report_predictions(self, step: int, values_by_task: Mapping[str, Metrics]) -> None:
    """Shows the metrics of each task's predictions."""
    for task, values in values_by_task.items():
      cells = [f"{name} {value:.4g}" for name, value in values.items()]
      self.print_line("  ".join([f"predictions at step {step}", task, *cells]))

  def print_line(self, text: str) -> None:
    """Prints a line on the first process, above the bar if there is one."""
    if self._bar is not None:
      self._bar.print(text, markup=False)
    else:
      print_line(text, self._stream)


def print_line(text: str, stream: IO[str] | None = None) -> None:
  """Prints `text` on the first process, and flushes: log files are read while a run continues."""
  if jax.process_index() == 0:
    print(text, file=stream or sys.stdout, flush=True)


def loss_to_show(values: Metrics, loss_is_sum: bool = True) -> float | None:
  """Returns the loss per target token if the loss is a sum and it was measured, else the loss."""
  names = _LOSSES if loss_is_sum else _LOSSES[1:]
  return next((float(values[name]) for name in names if name in values), None)


def format_duration(seconds: float) -> str:
  """Formats a duration in its two largest units: 45s, 1m20s, 2h05m, 3d04h."""
  if not math.isfinite(seconds):
    return "?"
  minutes, seconds = divmod(round(max(0.0, seconds)), 60)
  hours, minutes = divmod(minutes, 60)
  days, hours = divmod(hours, 24)
  if days:
    return f"{days}d{hours:02}h"
  if hours:
    return f"{hours}h{minutes:02}m"
  return f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"


def _start_bar(first_step: int, total_steps: int, stream: IO[str]) -> Any:
  from rich import console, progress

  bar = progress.Progress(
    progress.TextColumn("step {task.completed}/{task.total}"),
    progress.BarColumn(),
    progress.TextColumn("{task.description}"),
    progress.TimeElapsedColumn(),
    console=console.Console(file=stream, force_terminal=True, highlight=False),
  )
  bar.add_task("compiling", total=total_steps, completed=first_step)
  bar.start()
  return bar


def _loss_cells(loss: float | None) -> list[str]:
  """Formats a loss with three decimals, or with three digits if it is small."""
  if loss is None:
    return []
  return [f"loss {loss:.3g}" if abs(loss) < 0.1 else f"loss {loss:.3f}"]


def _log_cells(values: Metrics) -> list[str]:
  """Returns the cells that only a log line has."""
  cells = []
  if values.get(_TOKENS_PER_SECOND):
    cells.append(f"{values[_TOKENS_PER_SECOND]:.4g} tokens/s")
  if values.get(_STEPS_PER_SECOND):
    cells.append(f"{1000 / values[_STEPS_PER_SECOND]:.4g} ms/step")
  # The lines of a run always have the same cells, so that a script finds each by its name.
  defaults = _DEFAULT_CELLS if run_metrics.SAMPLES in values else {}
  for name, template in _LOG_CELLS.items():
    if name in values:
      cells.append(template.format(values[name]))
    elif name in defaults:
      cells.append(defaults[name])
  return cells


def _data_cells(values: Metrics) -> list[str]:
  """Returns how often each dataset was read, and how many of its records could not be used."""
  epochs = {name.removeprefix(_EPOCHS): n for name, n in values.items() if name.startswith(_EPOCHS)}
  cells = [
    f"epoch {count:.3g} of {name}" if len(epochs) > 1 else f"epoch {count:.3g}"
    for name, count in epochs.items()
  ]
  problems = [f"{text} {values[n]:.0f}" for n, text in _DATA_PROBLEMS.items() if n in values]
  return cells + problems


def _is_terminal(stream: Any) -> bool:
  # Open MPI gives each of its processes a terminal, even if their output goes to a log file.
  if os.environ.get("TERM") == "dumb" or "OMPI_COMM_WORLD_RANK" in os.environ:
    return False
  return bool(stream.isatty())
