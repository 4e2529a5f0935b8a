"""The progress of a run on the console: a bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import collections
import contextlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from rosetta_t5 import terminal
from rosetta_t5.telemetry import run_metrics
from rosetta_t5.telemetry.metrics_manager import as_floats, compute_values
from rosetta_t5.telemetry.run_metrics import nonfinite_metrics

Metrics = Mapping[str, float]

# The loss per target token comes first: it can be compared between runs with different batches.
LOSS_PER_TOKEN = "loss_per_nonpadding_target_token"
_LOSSES = (LOSS_PER_TOKEN, "loss")
_STEPS_PER_SECOND = "timing/steps_per_second"
_EPOCHS = "data/epochs/"
# What a line shows after the loss, as far as it was measured and there is room: the first come first.
_CELLS = {
  "data/bad_examples": "bad examples left out: {:.0f}",
  run_metrics.SKIPPED_STEPS: "skipped {:.0f} steps",
  "experts/fraction_tokens_left_behind": "{:.1%} of tokens without expert",
  run_metrics.GRADIENT_NORM: "grad norm {:.4g}",
  "learning_rate/current": "lr {:.4g}",
  run_metrics.SEQUENCES_PER_SECOND: "{:,.2f} seq/s",
  run_metrics.UTILIZATION: "MFU {:.1%}",
  "timing/target_tokens_per_second": "{:,.0f} tokens/s",
  run_metrics.SAMPLES: "{:,.0f} samples",
  run_metrics.WEIGHT_NORM: "param norm {:.4g}",
}
_LINE_WIDTH = 120
# On a terminal the bar shows the rest.
_SECONDS_BETWEEN_LINES = 5.0
_POLL_SECONDS = 0.25


class Progress(contextlib.AbstractContextManager["Progress"]):
  """Shows steps, loss, speed and the time left: a moving bar on a terminal, and lines.

  Only the first process prints.

  Attributes:
    first_loss: the loss in the first report; None if the report had no loss.
    last_loss: the loss in the last report.
  """

  def __init__(self, first_step: int, total_steps: int, loss_per_token: str = LOSS_PER_TOKEN):
    """Builds a display, which starts when it is entered as a context.

    Args:
      first_step: the number of steps completed before the run.
      total_steps: the number of steps completed when the run ends.
      loss_per_token: the metric that is the loss in nats per target token; "" if the model divides
        the loss by something else.
    """
    self._loss_per_token = loss_per_token
    self._first_step = first_step
    self._total_steps = total_steps
    self._stack = contextlib.ExitStack()
    self._bar: terminal.Bar | None = None
    self._is_drawn = False
    self._line_printed = -math.inf
    # Steps whose metrics the devices may still be computing.
    self._started: collections.deque[tuple[int, Any]] = collections.deque()
    self._last_poll = 0.0
    self.first_loss: float | None = None
    self.last_loss: float | None = None

  def __enter__(self) -> Progress:
    shown = terminal.progress_bar(
      "step", self._total_steps, completed=self._first_step, line_period_s=0
    )
    self._bar = self._stack.enter_context(shown)
    self._is_drawn = self._bar.is_drawn
    if self._is_drawn:
      ended = threading.Event()
      self._stack.callback(ended.set)
      threading.Thread(target=self._show_done_steps, args=(ended,), daemon=True).start()
    return self

  def __exit__(self, *exc_info: object) -> None:
    self._stack.close()

  def follow(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Shows a step and its loss once the devices have computed them, without waiting for them.

    Args:
      step: a step that was started.
      metrics: its clu metrics by name.
    """
    now = time.monotonic()
    if self._is_drawn and now > self._last_poll + _POLL_SECONDS:
      self._last_poll = now
      self._started.append((step, {name: metrics[name] for name in _LOSSES if name in metrics}))

  def report(self, step: int, values: Metrics) -> None:
    """Shows the metrics of the steps up to `step`."""
    loss = loss_to_show(values, self._loss_per_token)
    self.first_loss = loss if self.first_loss is None else self.first_loss
    self.last_loss = loss
    self._show_step(step, values)
    now = time.monotonic()
    is_due = now > self._line_printed + _SECONDS_BETWEEN_LINES or step == self._total_steps
    if is_due or not self._is_drawn:
      self._line_printed = now
      cells = [f"step {step}/{self._total_steps}", *self._loss_cells(values)]
      if speed := values.get(_STEPS_PER_SECOND):
        left = terminal.format_duration((self._total_steps - step) / speed)
        cells += [f"{1000 / speed:,.2f} ms/step", f"eta {left}"]
      terminal.print_line(_join_cells([*cells, *_measured_cells(values)]))

  def report_evaluation(self, step: int, values_by_task: Mapping[str, Metrics]) -> None:
    """Shows the loss and the accuracy of each task."""
    for task, values in values_by_task.items():
      cells = self._loss_cells(values)
      if "accuracy" in values:  # of the next token; a task's own metrics are those of predictions
        cells.append(f"token accuracy {values['accuracy']:.2%}")
      terminal.print_line("  ".join([f"evaluation at step {step}", task, *cells]))
      self._report_nonfinite(step, task, values)

  def report_predictions(self, step: int, values_by_task: Mapping[str, Metrics]) -> None:
    """Shows the metrics of each task's predictions."""
    for task, values in values_by_task.items():
      cells = [f"{name} {value:.4g}" for name, value in values.items()]
      terminal.print_line("  ".join([f"predictions at step {step}", task, *cells]))
      self._report_nonfinite(step, task, values)

  def _report_nonfinite(self, step: int, task: str, values: Metrics) -> None:
    """Prints which metrics of an evaluation are NaN or infinite. Training continues."""
    if names := nonfinite_metrics(values):
      terminal.print_line(
        f"note     not finite in the evaluation of {task} at step {step}: {', '.join(names)}"
      )

  def _show_done_steps(self, ended: threading.Event) -> None:
    """Moves the bar to the last step that the devices have completed, until the display ends."""
    while not ended.wait(_POLL_SECONDS):
      done = None
      while self._started and _is_computed(self._started[0][1]):
        done = self._started.popleft()
      if done is not None:
        self._show_step(done[0], as_floats(compute_values(done[1])))

  def _show_step(self, step: int, values: Metrics) -> None:
    """Moves the bar to a step, unless it is there already."""
    if self._bar is not None and step >= self._bar.completed:
      self._bar.update(step, text="  ".join(self._loss_cells(values)))

  def _loss_cells(self, values: Metrics) -> list[str]:
    """Formats the loss with three decimals, or with three digits if it is small."""
    loss = loss_to_show(values, self._loss_per_token)
    if loss is None:
      return []
    unit = " nats/token" if self._loss_per_token in values else ""
    return [f"loss {loss:.3g}{unit}" if abs(loss) < 0.1 else f"loss {loss:.3f}{unit}"]


def loss_to_show(values: Metrics, loss_per_token: str = LOSS_PER_TOKEN) -> float | None:
  """Returns the loss per target token if it was measured, else the loss."""
  return next((float(values[name]) for name in (loss_per_token, "loss") if name in values), None)


def _is_computed(metrics: Mapping[str, Any]) -> bool:
  return all(x.is_ready() for x in jax.tree.leaves(metrics) if hasattr(x, "is_ready"))


def _measured_cells(values: Metrics) -> list[str]:
  """Returns what was measured besides loss and time, and how often each dataset was read."""
  cells = [text.format(values[name]) for name, text in _CELLS.items() if values.get(name)]
  epochs = {name.removeprefix(_EPOCHS): n for name, n in values.items() if name.startswith(_EPOCHS)}
  return cells + [
    f"epoch {count:.3g} of {name}" if len(epochs) > 1 else f"epoch {count:.3g}"
    for name, count in epochs.items()
  ]


def _join_cells(cells: Sequence[str]) -> str:
  """Joins as many cells as fit into a line."""
  line = cells[0]
  for cell in cells[1:]:
    if len(line) + 2 + len(cell) <= _LINE_WIDTH:
      line += f"  {cell}"
  return line
