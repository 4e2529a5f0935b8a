"""What a run prints: a header, its progress, and a summary; and its files model-info.txt and run-log.jsonl.

The progress is a bar on a terminal, and plain lines in a log file.
"""

import contextlib
import json
import math
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import traverse_util

from rosetta_t5 import terminal
from rosetta_t5.telemetry import run_metrics

Metrics = Mapping[str, float]
Rows = Sequence[tuple[str, str]]  # a name and a text

# The loss per target token comes first: it can be compared between runs with different batches.
LOSS_PER_TOKEN = "loss_per_nonpadding_target_token"
_STEPS_PER_SECOND = "timing/steps_per_second"
_EPOCHS = "data/epochs/"
# What a line shows after the loss and the time, as far as it was measured.
_CELLS = {
  "data/bad_examples": "bad examples left out: {:.0f}",
  run_metrics.SKIPPED_STEPS: "skipped {:.0f} steps",
  "experts/fraction_tokens_left_behind": "{:.1%} of tokens without expert",
  run_metrics.GRADIENT_NORM: "grad norm {:.4g}",
  "learning_rate/current": "lr {:.4g}",
  run_metrics.SEQUENCES_PER_SECOND: "{:,.2f} seq/s",
  run_metrics.UTILIZATION: "MFU {:.1%}",
}
# On a terminal the bar shows the rest.
_SECONDS_BETWEEN_LINES = 5.0
_HEADER_WIDTH = len("computes")


class Progress(contextlib.ExitStack):
  """Shows steps, loss, speed and the time left: a moving bar on a terminal, and lines.

  Only the first process prints.
  """

  def __init__(self, first_step: int, total_steps: int, loss_per_token: str = LOSS_PER_TOKEN):
    """Builds a display, which starts when it is entered as a context.

    Args:
      first_step: the number of steps completed before the run.
      total_steps: the number of steps completed when the run ends.
      loss_per_token: the metric that is the loss in nats per target token; "" if the model divides
        the loss by something else.
    """
    super().__init__()
    self._loss_per_token = loss_per_token
    self._first_step = first_step
    self._total_steps = total_steps
    self._bar: terminal.Bar | None = None
    self._line_printed = -math.inf
    self._losses: list[float] = []  # the first one that was shown, and the last one

  def __enter__(self) -> "Progress":
    shown = terminal.progress_bar("step", self._total_steps, "", self._first_step, line_period_s=0)
    self._bar = self.enter_context(shown)
    return self

  def follow(self, step: int) -> None:
    """Moves the bar to a step that was started; the devices may still be computing it."""
    if self._bar is not None:
      self._bar.update(step)

  def report(self, step: int, values: Metrics) -> None:
    """Shows the metrics of the steps up to `step`."""
    if (loss := loss_to_show(values, self._loss_per_token)) is not None:
      self._losses = [*self._losses[:1], loss]
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
      terminal.print_line("  ".join([*cells, *_measured_cells(values)]))

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

  def summary(self, step: int, seconds: float, model_dir: str, checkpoint: Any) -> str:
    """Returns the lines printed when a run has ended.

    Args:
      step: the number of completed steps.
      seconds: the duration of the run.
      model_dir: the folder of all output.
      checkpoint: the path of the last saved checkpoint; None if there is none.
    """
    count = step - self._first_step
    done = f"{count} steps in {terminal.format_duration(seconds)}"
    if count == 0:
      done = "nothing was left to do: set a larger TRAIN_STEPS (or TRAIN_STEPS_RELATIVE)"
    rows = [("done", f"step {step}: {done}")]
    if self._losses:
      rows.append(("loss", f"{self._losses[0]:.3f} at first, {self._losses[-1]:.3f} at the end"))
    if checkpoint is not None:
      rows.append(("checkpoint", os.fspath(checkpoint)))
    return _format_rows([*rows, ("metrics", f"tensorboard --logdir={model_dir}")])

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
  saves = f"checkpoints {save_cfg.times()}" if save_cfg else "no checkpoints"
  kind = f"{devices.flat[0].device_kind} device{'s' * (devices.size > 1)}"
  batch = f"batch {dataset_cfg.batch_size}{': ' * bool(lengths)}{lengths}"
  rows = [
    ("devices", f"{devices.size} {kind}, mesh {axes}{f' ({reason})' if reason else ''}"),
    ("data", f"{dataset_cfg.name}, {batch}"),
    ("writes", f"{os.fspath(model_dir)}, {saves}"),
  ]
  return _format_rows(rows, width=_HEADER_WIDTH)


def describe_training(
  model: Any, params: Any, flops: float | None, steps: tuple[int, int], base: str | None, more: Rows
) -> str:
  """Returns the lines of the header that are printed before the first step.

  Args:
    model: the model.
    params: the parameters, or their shapes.
    flops: the FLOPs of a training sequence; None if they are unknown.
    steps: the completed steps at the start and at the end of the run.
    base: the path of the checkpoint; None if the run starts from scratch.
    more: further lines: "examples" of the training data, what "computes", and each "note".
  """
  about = f"{type(model).__name__}, {describe_parameters(model, params)}"
  if flops is not None:
    about += f", {terminal.format_number(flops / 1e9)} GFLOP a training sequence"
  span = f"{steps[0]} to {steps[1]}, from {base or 'scratch'}"
  return _format_rows([("model", about), ("steps", span), *more], width=_HEADER_WIDTH)


def log_start(
  model_dir: str, header: str, mesh: Any, batch: Mapping[str, Any], steps: tuple[int, int]
) -> None:
  """Logs what `rosetta-t5 report` shows about a run that starts.

  Args:
    model_dir: the folder of all output.
    header: what the run has printed.
    mesh: the mesh.
    batch: the arrays or shapes of a batch, by feature.
    steps: the completed steps at the start and at the end of the run.
  """
  log_event(
    model_dir,
    "start",
    header=header,
    step=steps[0],
    total_steps=steps[1],
    device=mesh.devices.flat[0].device_kind,
    devices=mesh.devices.size,
    mesh=dict(mesh.shape),
    batch_size=next(iter(batch.values())).shape[0],
    lengths={name: leaf.shape[1] for name, leaf in batch.items() if len(leaf.shape) > 1},
  )


def format_metrics_table(metrics: Mapping[int, Mapping[str, Mapping[str, float]]]) -> str:
  """Formats {step: {task: {metric: value}}} as one table of aligned columns per task.

  The cell of a metric that a step does not have is empty.
  """
  lines = []
  for task in dict.fromkeys(task for by_task in metrics.values() for task in by_task):
    by_step = {step: by_task[task] for step, by_task in sorted(metrics.items()) if task in by_task}
    names = list(dict.fromkeys(name for values in by_step.values() for name in values))
    rows = [[task, "step", *names]]
    for step, values in by_step.items():
      cells: list[Any] = [values.get(name, "") for name in names]
      texts = (str(x) if isinstance(x, int | str) else f"{x:.5g}" for x in cells)
      rows.append(["", str(step), *texts])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for title, *row in rows:
      aligned = map(str.rjust, row, widths[1:])
      lines.append("  ".join([title.ljust(widths[0]), *aligned]).rstrip())
  return "\n".join(lines)


def _format_rows(rows: Rows, width: int = 0) -> str:
  width = max(width, *(len(name) for name, _ in rows))
  return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def log_event(model_dir: str | os.PathLike[str], event: str, **fields: Any) -> None:
  """Appends a JSON object to MODEL_DIR/run-log.jsonl, on the first process only.

  Args:
    event: `start` or `end`.
    **fields: numbers, texts, and lists and dictionaries of them.
  """
  if jax.process_index() != 0:
    return
  log_file = pathlib.Path(model_dir, "run-log.jsonl")
  with terminal.optional_output(log_file.name):
    if event == "start":  # A folder that was moved during the run is not created again.
      log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("a", encoding="utf-8") as file:
      file.write(json.dumps({"event": event, "time": time.time(), **fields}) + "\n")


def log_model_info(log_file: str, full_train_state: Any, partitioner: Any) -> None:
  """Writes `model_info` to `log_file`, on the first process only."""
  if jax.process_index() != 0:
    return
  with terminal.optional_output("model-info.txt"):
    os.makedirs(os.path.dirname(log_file), exist_ok=True)
    pathlib.Path(log_file).write_text(model_info(full_train_state, partitioner))


def model_info(full_train_state: Any, partitioner: Any) -> str:
  """Lists a train state in T5X's format: parameters, their number, then the rest of the state.

  Args:
    full_train_state: a train state of arrays or of their shapes.
    partitioner: its `get_logical_axes` and `get_mesh_axes` return the axes of each array.
  """
  arrays = _flatten(full_train_state)
  logical_axes = _flatten(partitioner.get_logical_axes(full_train_state))
  mesh_axes = _flatten(partitioner.get_mesh_axes(full_train_state))

  def section(name: str) -> list[str]:
    return [
      _format_array(path, arrays[path], logical_axes.get(path), mesh_axes.get(path))
      for path in sorted(arrays)
      if path[0] == name
    ]

  total = f"Total number of parameters: {count_parameters(full_train_state.params)}"
  lines = [*section("target"), total, "", *section("state"), *section("flax_mutables")]
  return "".join(f"{line}\n" for line in lines)


def describe_parameters(model: Any, params: Any) -> str:
  """Returns the number of parameters, and how many of them an adapter trains."""
  text = f"{count_parameters(params):,} parameters"
  if model.adapter is None or model.optimizer_def is None:
    return text
  trained = count_parameters(model.optimizer_def.trained(params))
  return f"{text}, of which {type(model.adapter).__name__} trains {trained:,}"


def count_parameters(params: Any) -> int:
  """Returns the number of scalars in a tree of arrays or shapes."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _flatten(train_state: Any) -> Mapping[tuple[str, ...], Any]:
  leaves = traverse_util.flatten_dict(train_state.state_dict())
  return {path: leaf for path, leaf in leaves.items() if leaf is not None}


def _format_array(path: tuple[str, ...], array: Any, logical_axes: Any, mesh_axes: Any) -> str:
  name = "/".join(path if path[0] == "flax_mutables" else path[1:])
  # T5X prints None as the partition spec of an array without logical axes, which is replicated.
  size, shape = math.prod(array.shape), str(tuple(array.shape))
  spec = tuple(mesh_axes) if logical_axes else None
  if logical_axes and len(logical_axes) == len(array.shape):  # They may be fewer, as in T5X.
    dims = (f"{axis}={size}" for axis, size in zip(logical_axes, array.shape, strict=True))
    shape = f"({', '.join(dims)})"
  return f"Variable {name:80} size {size:<12} shape {shape:40} partition spec {spec}"
