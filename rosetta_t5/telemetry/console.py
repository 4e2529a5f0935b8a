"""The progress of a run on the console: a bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping

from rosetta_t5 import terminal
from rosetta_t5.telemetry import run_metrics

Metrics = Mapping[str, float]

# The loss per target token comes first: it can be compared between runs with different batches.
LOSS_PER_TOKEN = "loss_per_nonpadding_target_token"
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
    self._line_printed = -math.inf
    self.first_loss: float | None = None
    self.last_loss: float | None = None

  def __enter__(self) -> Progress:
    shown = terminal.progress_bar(
      "step", self._total_steps, completed=self._first_step, line_period_s=0
    )
    self._bar = self._stack.enter_context(shown)
    return self

  def __exit__(self, *exc_info: object) -> None:
    self._stack.close()

  def follow(self, step: int) -> None:
    """Moves the bar to a step that was started; the devices may still be computing it."""
    if self._bar is not None:
      self._bar.update(step)

  def report(self, step: int, values: Metrics) -> None:
    """Shows the metrics of the steps up to `step`."""
    loss = loss_to_show(values, self._loss_per_token)
    self.first_loss = loss if self.first_loss is None else self.first_loss
    self.last_loss = loss
    if self._bar is not None:
      self._bar.update(step, text="  ".join(self._loss_cells(values)))
    now = time.monotonic()
    is_due = now > self._line_printed + _SECONDS_BETWEEN_LINES or step == self._total_steps
    if is_due or self._bar is None or not self._bar.is_drawn:
      self._line_printed = now
      cells = [f"step {step}/{self._total_steps}", *self._loss_cells(values)]
      if speed := values.get(_STEPS_PER_SECOND):
        left = terminal.format_duration((self._total_steps - step) / speed)
        cells += [f"{1000 / speed:,.2f} ms/step", f"eta {left}"]
      line = "  ".join(cells)
      for cell in _measured_cells(values):
        line += f"  {cell}" if len(line) + 2 + len(cell) <= _LINE_WIDTH else ""
      terminal.print_line(line)

  def report_evaluation(self, step: int, values_by_task: Mapping[str, Metrics]) -> None:
    """Shows the loss and the accuracy of each task."""
    for task, values in values_by_task.items():
      cells = self._loss_cells(values)
      if "accuracy" in values:  # of the next token; a task's own metrics are those of predictions
        cells.append(f"token accuracy {values['accuracy']:.2%}")
      terminal.print_line("  ".join([f"evaluation at step {step}", task, *cells]))

  def report_predictions(self, step: int, values_by_task: Mapping[str, Metrics]) -> None:
    """Shows the metrics of each task's predictions."""
    for task, values in values_by_task.items():
      cells = [f"{name} {value:.4g}" for name, value in values.items()]
      terminal.print_line("  ".join([f"predictions at step {step}", task, *cells]))

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


def _measured_cells(values: Metrics) -> list[str]:
  """Returns what was measured besides loss and time, and how often each dataset was read."""
  cells = [text.format(values[name]) for name, text in _CELLS.items() if values.get(name)]
  epochs = {name.removeprefix(_EPOCHS): n for name, n in values.items() if name.startswith(_EPOCHS)}
  return cells + [
    f"epoch {count:.3g} of {name}" if len(epochs) > 1 else f"epoch {count:.3g}"
    for name, count in epochs.items()
  ]
