"""What a run shows while it goes: a progress bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Mapping
from typing import IO, Any

import jax

from rosetta_t5.telemetry.run_measures import (
  GRADIENT_NORM,
  SAMPLES,
  SKIPPED_STEPS,
  UTILIZATION,
  WEIGHT_NORM,
)

# The loss a reader can compare between runs: in nats a token, whatever the batch.
_LOSSES = ("loss_per_nonpadding_target_token", "loss")
_SEQUENCES = "timing/seqs_per_second"
_STEPS = "timing/steps_per_second"
_TOKENS = "timing/target_tokens_per_second"
_LEARNING_RATE = "learning_rate/current"
_EPOCHS = "data/epochs/"
_MORE = {
  SAMPLES: "{:.0f} samples",
  _LEARNING_RATE: "lr {:.4g}",
  GRADIENT_NORM: "grad norm {:.4g}",
  WEIGHT_NORM: "param norm {:.4g}",
  UTILIZATION: "MFU {:.1%}",
  SKIPPED_STEPS: "skipped {:.0f}",
}
# The peak of a CPU is not known; other optimizers than optax.apply_if_finite end the run instead.
_UNMEASURED = {UTILIZATION: "MFU n/a", SKIPPED_STEPS: "skipped 0"}
_LEFT_OUT = {
  "data/bad_examples": "bad examples left out:",
  "data/unreadable": "unreadable records:",
}


class Progress(contextlib.AbstractContextManager["Progress"]):
  """Shows steps, loss, speed and the time left; on the first process only.

  Attributes:
    first_loss: the loss in the first report, if it had one.
    last_loss: the loss in the last report.
  """

  def __init__(
    self,
    first_step: int,
    total_steps: int,
    stream: IO[str] | None = None,
    on_terminal: bool | None = None,
    loss_is_sum: bool = True,
  ):
    """Builds a display; enter it as a context to start.

    Args:
      first_step: updates made before.
      total_steps: updates to have been made at the end.
      stream: where to; None for standard output.
      on_terminal: a bar rather than lines; None looks whether `stream` is a terminal.
      loss_is_sum: whether the model's loss is a sum over tokens, so that it is shown per token; False
        where a loss_normalizing_factor has divided it.
    """
    self._loss_is_sum = loss_is_sum
    self._first_step = first_step
    self._total_steps = total_steps
    self._stream = stream or sys.stdout
    self._on_terminal = _is_terminal(self._stream) if on_terminal is None else on_terminal
    self._bar: _Bar | None = None
    self.first_loss: float | None = None
    self.last_loss: float | None = None

  def __enter__(self) -> Progress:
    if self._on_terminal and jax.process_index() == 0:
      self._bar = _Bar(self._first_step, self._total_steps, self._stream)
    return self

  def __exit__(self, *exc_info: object) -> None:
    bar, self._bar = self._bar, None
    if bar is not None:
      bar.stop()

  def report(self, step: int, values: Mapping[str, float]) -> None:
    """Shows the metrics of the steps up to `step`."""
    loss = shown_loss(values, self._loss_is_sum)
    self.first_loss = loss if self.first_loss is None else self.first_loss
    self.last_loss = loss
    if jax.process_index() != 0:
      return
    cells = self._cells(step, loss, values)
    if self._bar is not None:
      self._bar.update(step, cells)
    else:
      # More than fits beside a bar, and all of it in one line for grep.
      cells += _more_cells(values)
      self._print("  ".join([f"step {step}/{self._total_steps}", *cells]))

  def report_evaluation(self, step: int, task: str, values: Mapping[str, float]) -> None:
    """Shows what an evaluation of `task` measured."""
    loss = shown_loss(values, self._loss_is_sum)
    numbers = _loss_cells(loss)
    numbers += [f"{name} {value:.4g}" for name, value in values.items() if name == "accuracy"]
    self.say("  ".join([f"evaluation at step {step}", task, *numbers]))

  def report_predictions(self, step: int, task: str, values: Mapping[str, float]) -> None:
    """Shows the metrics of predictions for `task`."""
    numbers = [f"{name} {value:.4g}" for name, value in values.items()]
    self.say("  ".join([f"predictions at step {step}", task, *numbers]))

  def say(self, text: str) -> None:
    """Prints a line; above the bar where there is one."""
    if jax.process_index() != 0:
      return
    if self._bar is not None:
      self._bar.print(text)
    else:
      self._print(text)

  def _print(self, line: str) -> None:
    # Flushed: a log file is read while the run goes, and is all that is left after a crash.
    print(line, file=self._stream, flush=True)

  def _cells(self, step: int, loss: float | None, values: Mapping[str, float]) -> list[str]:
    cells = _loss_cells(loss)
    if values.get(_SEQUENCES):
      cells.append(f"{values[_SEQUENCES]:.4g} seq/s")
    if values.get(_STEPS):
      cells.append(f"eta {duration_text((self._total_steps - step) / values[_STEPS])}")
    return cells + _data_cells(values)


class _Bar:
  """The display on a terminal, drawn by rich."""

  def __init__(self, first_step: int, total_steps: int, stream: IO[str]):
    from rich import console, progress

    self._progress = progress.Progress(
      progress.TextColumn("step {task.completed}/{task.total}"),
      progress.BarColumn(),
      progress.TextColumn("{task.description}"),
      progress.TimeElapsedColumn(),
      console=console.Console(file=stream, force_terminal=True, highlight=False),
    )
    self._task = self._progress.add_task("compiling", total=total_steps, completed=first_step)
    self._progress.start()

  def update(self, step: int, cells: list[str]) -> None:
    self._progress.update(self._task, completed=step, description="  ".join(cells))

  def print(self, text: str) -> None:
    self._progress.print(text, markup=False)

  def stop(self) -> None:
    self._progress.stop()


def _loss_cells(loss: float | None) -> list[str]:
  """Three decimals, and more of a loss that they would round away."""
  if loss is None:
    return []
  return [f"loss {loss:.3f}" if not abs(loss) < 0.1 else f"loss {loss:.3g}"]


def _more_cells(values: Mapping[str, float]) -> list[str]:
  """Tokens of targets a second, time of a step, and what else was measured of `_MORE`."""
  cells = [f"{values[_TOKENS]:.4g} tokens/s"] if values.get(_TOKENS) else []
  if values.get(_STEPS):
    cells.append(f"{1000 / values[_STEPS]:.4g} ms/step")
  # A line of a run has every cell, so that a script finds them by name whatever was measured.
  told = _UNMEASURED if SAMPLES in values else {}
  texts = {name: form.format(values[name]) for name, form in _MORE.items() if name in values}
  return cells + [text for name in _MORE if (text := texts.get(name) or told.get(name))]


def _data_cells(values: Mapping[str, float]) -> list[str]:
  """How often the data was read, dataset by dataset where there are several, and what was not."""
  epochs = {name.removeprefix(_EPOCHS): n for name, n in values.items() if name.startswith(_EPOCHS)}
  several = len(epochs) > 1
  told = [f"epoch {count:.3g}{f' of {name}' if several else ''}" for name, count in epochs.items()]
  return told + [f"{text} {values[name]:.0f}" for name, text in _LEFT_OUT.items() if name in values]


def say(text: str, stream: IO[str] | None = None) -> None:
  """Prints `text` on the first process."""
  if jax.process_index() == 0:
    print(text, file=stream or sys.stdout, flush=True)


def shown_loss(values: Mapping[str, float], loss_is_sum: bool = True) -> float | None:
  """Returns the loss to show: a sum per target token if that was measured, else as it is."""
  names = _LOSSES if loss_is_sum else _LOSSES[1:]
  return next((float(values[name]) for name in names if name in values), None)


def duration_text(seconds: float) -> str:
  """Returns a time as people say it: 45s, 1m20s, 2h05m, 3d04h."""
  if not math.isfinite(seconds):
    return "?"
  total = round(max(0.0, seconds))
  if total < 60:
    return f"{total}s"
  if total < 3600:
    return f"{total // 60}m{total % 60:02}s"
  hours = total // 3600
  return f"{hours}h{total // 60 % 60:02}m" if hours < 24 else f"{hours // 24}d{hours % 24:02}h"


def _is_terminal(stream: Any) -> bool:
  """Whether a person looks on. Open MPI gives its processes a terminal each, even where they write to a log."""
  if os.environ.get("TERM") == "dumb" or "OMPI_COMM_WORLD_RANK" in os.environ:
    return False
  return bool(getattr(stream, "isatty", lambda: False)())
