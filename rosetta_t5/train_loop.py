"""The loop of a training run: optimizer steps, and the hooks that are due between them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from clu import values as clu_values

from rosetta_t5 import checkpoints, distributed, terminal
from rosetta_t5.inference.evaluation import LossEvaluation, PredictionEvaluation
from rosetta_t5.inference.sample_predictions import Sample, SampleLog
from rosetta_t5.models import BaseModel
from rosetta_t5.out_of_memory import INFERENCE, explain_out_of_memory
from rosetta_t5.telemetry import console, run_metrics
from rosetta_t5.telemetry.metrics_manager import as_floats
from rosetta_t5.training import BaseTrainer, TrainState
from rosetta_t5.training.actions import ActionMode, BaseAction, run_actions
from rosetta_t5.training.losses import METRIC_PER_TOKEN
from rosetta_t5.training.train_state import trained_params


@dataclasses.dataclass(frozen=True)
class Hook:
  """A function that runs after certain steps.

  Attributes:
    run: called as run(step).
    period: the hook is due after each multiple of this many steps; None or 0 for never.
    steps: additional steps after which the hook is due.
    at_end: whether the hook is also due after the last step.
  """

  run: Callable[[int], object]
  period: int | None = None
  steps: Collection[int] = ()
  at_end: bool = False

  def is_due(self, step: int, last_step: int) -> bool:
    """Returns whether the hook runs after `step`."""
    is_end = self.at_end and step == last_step
    return is_end or step in self.steps or bool(self.period and step % self.period == 0)


def stopping_steps(
  first_step: int, last_step: int, hooks: Sequence[Hook], period: int | None = None
) -> Iterator[int]:
  """Yields the steps after which training stops to run hooks or to report metrics, in order.

  Args:
    first_step: the number of steps completed before.
    last_step: the number of steps completed at the end; always the last of the yielded steps.
    hooks: training stops after each step after which one of them is due.
    period: training also stops after each multiple of this many steps.
  """
  for step in range(first_step + 1, last_step + 1):
    is_regular_stop = step == last_step or (period and step % period == 0)
    if is_regular_stop or any(hook.is_due(step, last_step) for hook in hooks):
      yield step


def run_due_hooks(hooks: Sequence[Hook], step: int, last_step: int) -> None:
  """Runs the hooks that are due after `step`, in their order."""
  for hook in hooks:
    if hook.is_due(step, last_step):
      hook.run(step)


@dataclasses.dataclass
class TrainLoop:
  """Trains for ranges of steps, and runs the hooks that are due between them.

  Attributes:
    model: the model; the loop needs its optimizer's limits and the unit of its loss.
    trainer: holds the train state and runs the steps.
    train_state_axes: the train state with a PartitionSpec in place of each array.
    feed: the training batches, without end.
    evaluation: measures the loss on held-out data.
    predictions: makes predictions on held-out data and computes their metrics.
    concurrent_metrics: whether training continues while metrics of predictions are computed.
    manager: saves checkpoints; None saves none.
    actions: users' actions, which see the metrics and can end the run.
    measure_run: computes the metrics that the steps do not measure.
    model_dir: the folder of all output.
    first_step: the number of steps completed before the run.
    total_steps: the number of steps completed when the run ends.
    run_started: `time.monotonic()` at the start of the run.
    save_cfg: which steps `manager` saves besides the first and the last.
    eval_period: steps between evaluations; 0 evaluates only the last step.
    stats_period: steps between reports of metrics; None for eval_period or a twentieth of the run.
    gc_period: steps between garbage collections; 0 leaves Python's automatic collection enabled.
    run_eval_before_training: whether to evaluate before the first step.
    num_eval_samples: the number of sample predictions of each task at an evaluation.
  """

  model: BaseModel
  trainer: BaseTrainer
  train_state_axes: Any
  feed: Any
  evaluation: LossEvaluation
  predictions: PredictionEvaluation
  concurrent_metrics: bool
  manager: checkpoints.OrbaxCheckpointManagerInterface | None
  actions: Mapping[ActionMode | str, Sequence[BaseAction]] | None
  measure_run: run_metrics.RunMetrics
  model_dir: str
  first_step: int
  total_steps: int
  run_started: float
  save_cfg: checkpoints.SaveCheckpointConfig | None
  eval_period: int
  stats_period: int | None
  gc_period: int = 0
  run_eval_before_training: bool = False
  num_eval_samples: int = 0

  def __post_init__(self) -> None:
    self._step = self.first_step
    self._seconds_waited = 0.0  # for batches, since the last report
    # How often each step was restored, and {the step at which a restoration happened: the step that it restored},
    # whose parameters a checkpoint has that is saved right after.
    self._restorations: collections.Counter[int] = collections.Counter()
    self._origins: dict[int, int] = {}
    self._is_interrupted = False
    self._is_stopped_by_action = False
    self._progress = console.Progress(
      self.first_step,
      self.total_steps,
      loss_per_token=METRIC_PER_TOKEN.get(self.model.loss_normalizing_factor, ""),
    )
    self._samples = SampleLog(self.num_eval_samples, self.model_dir)
    self._interruption = distributed.InterruptionListener()
    self._watchdog = distributed.Watchdog()

  @contextlib.contextmanager
  def log_failure(self) -> Iterator[None]:
    """Inside the `with`, an error that ends the run is logged in its folder, in case the console is lost."""
    try:
      yield
    except Exception as error:
      console.log_event(self.model_dir, "end", step=self._step, reason="failed", error=str(error))
      raise

  def compile(self) -> None:
    """Compiles the train step, and waits for the data of the evaluations."""
    self._write_scalar("timing/init_or_restore_seconds", time.monotonic() - self.run_started)
    with terminal.progress_bar("compiling the train step"):
      self.trainer.compile_train(self.feed.element_spec)
    self.predictions.wait_until_read()

  def run(self) -> None:
    """Trains until `total_steps`, an interruption, or an action that ends the run."""
    evaluate = Hook(self._evaluate, self.eval_period, at_end=True)
    hooks = [evaluate, Hook(lambda _: gc.collect(), self.gc_period)]
    if (cfg := self.save_cfg) is not None:
      # Checkpoints come first: an evaluation that fails must not lose the steps before it.
      hooks.insert(0, Hook(self._save, cfg.period, cfg.checkpoint_steps or (), at_end=True))
    with (
      checkpoints.finish_saves_on_error(self.manager),
      self._progress,
      self._interruption,
      self._watchdog,
      contextlib.ExitStack() as at_end,
    ):
      if self.gc_period:
        # Python's own collections, at different times on different hosts, would make all hosts wait for each.
        gc.disable()
        at_end.callback(gc.enable)
      self._save(self.first_step)
      try:
        if self.run_eval_before_training:
          self._evaluate(self.first_step)
        period = max(1, (self.total_steps - self.first_step) // 20)  # for 20 reports
        report_period = self.stats_period or min(period, self.eval_period or period)
        for stop in stopping_steps(self.first_step, self.total_steps, hooks, report_period):
          self._train_until(stop)
          run_due_hooks(hooks, self._step, self.total_steps)
          if self._is_interrupted or self._is_stopped_by_action or self.trainer.stop_training:
            break
      except distributed.EvaluationInterrupted:
        self._is_interrupted = True
      self._complete()

  def finish(self) -> tuple[int, TrainState]:
    """Waits for all background writes, and prints where the output is.

    Returns:
      (the number of completed steps, the train state).

    Raises:
      RunInterrupted: a signal ended the run; the exit status makes job managers restart it.
    """
    self.feed.close()
    self.predictions.close()
    self.trainer.close()
    checkpoint = None
    if self.manager is not None:
      self.manager.close()
      if (latest := self.manager.latest_step()) is not None:
        checkpoint = checkpoints.checkpoint_path(self.model_dir, latest)
    seconds = time.monotonic() - self.run_started
    terminal.print_line(self._progress.summary(self._step, seconds, self.model_dir, checkpoint))
    if self.first_step < self.total_steps:
      reason = "interrupted" if self._is_interrupted else "finished"
      console.log_event(self.model_dir, "end", step=self._step, reason=reason)
    if self._is_interrupted:
      hint = "run the same command to continue" if self.manager else "no checkpoint was saved"
      terminal.print_line(f"interrupted  after step {self._step}: {hint}")
      raise distributed.RunInterrupted(self._step, self._interruption.by_ctrl_c)
    return int(self.trainer.train_state.step), self.trainer.train_state

  def _train_until(self, stop: int) -> None:
    """Trains until step `stop` or an interruption, and reports the metrics of these steps."""
    start = self._step
    try:
      result = self.trainer.train(self._draw_batches(), stop - start, start_step=start)
      values = as_floats(result.result())
    except StopIteration:  # A loop like T5X's, which does not expect fewer batches than steps.
      values = {}
    if self._step < stop and not self._is_interrupted:
      raise ValueError(
        f"the training data ended after step {self._step} of {self.total_steps}: "
        "train.get_dataset_fn must return a dataset that repeats"
      )
    self._check_interruption()
    state = self.trainer.train_state
    measured = self.feed.measures() | self.measure_run(self._step, values, state)
    measured[run_metrics.FEED_WAIT] = self._seconds_waited / max(1, self._step - start)
    self._seconds_waited = 0.0
    values |= measured
    self._check_values(values)
    self._restore_after_skips()
    self.trainer.train_metrics_manager.write_scalars(self._step, measured)
    self._progress.report(self._step, values)
    self._run_actions(ActionMode.TRAIN, {"train": values})

  def _check_values(self, values: Mapping[str, float]) -> None:
    """Raises an error if the state after this step must not be saved."""
    record = self.trainer.first_nonfinite
    params = None if record is None else trained_params(self.trainer.train_state)
    run_metrics.raise_if_nonfinite(record, params, self.manager, values, self._step)

  def _restore_after_skips(self) -> None:
    """Restores the last checkpoint before too many skipped steps; the data and the step continue.

    Raises:
      ValueError: there is no such checkpoint, or it was restored too often.
    """
    optimizer = self.model.optimizer_def
    limit = optimizer.max_skipped_steps
    state = self.trainer.train_state
    skipped = run_metrics.skips_in_a_row(state.param_states) if limit else 0
    if not limit or skipped < limit:
      return
    if self.manager:
      self.manager.wait_until_finished()  # A save that is in progress may delete older checkpoints.
    saved = self.manager.all_steps() if self.manager else []
    good = [step for step in saved if step <= self._step - skipped]
    problem = f"the optimizer has skipped the last {skipped} steps, up to step {self._step}"
    if not self.manager or not good:
      raise ValueError(
        f"{problem}, and there is no checkpoint from before them: lower the learning rate, or save or "
        "keep more checkpoints (utils.SaveCheckpointConfig.period, keep)"
      )
    origin = self._origins[self._step] = self._origins.get(good[-1], good[-1])
    self._restorations[origin] += 1
    if self._restorations[origin] > optimizer.max_restorations:
      raise ValueError(
        f"{problem}, although it has continued from step {origin} {optimizer.max_restorations} times "
        "(max_restorations): lower the learning rate, allow larger steps (max_norm_ratio, "
        "max_loss_ratio), or correct the data"
      )
    restored = self.manager.restore(step=good[-1], restore_dataset=False)
    counted = run_metrics.with_skipped_steps(restored.param_states, state.param_states)
    self.trainer.train_state = restored.replace(step=state.step, param_states=counted)
    terminal.print_line(
      f"restored  {problem}: it continues with the parameters of step {good[-1]} and the next data"
    )

  def _draw_batches(self) -> Iterator[Any]:
    """Yields batches, and counts them as steps, until the run is interrupted."""
    waiting_since = time.monotonic()
    for batch in self._watchdog.watch_batches(self.feed, self._step):
      self._seconds_waited += time.monotonic() - waiting_since
      self._step += 1
      yield batch
      self._progress.follow(self._step)
      # Checked before the next batch is drawn: a checkpoint stores the position in the data.
      if self._check_interruption():
        return
      waiting_since = time.monotonic()

  def _check_interruption(self) -> bool:
    self._is_interrupted = self._is_interrupted or self._interruption.should_stop()
    return self._is_interrupted

  def _save(self, step: int) -> None:
    """Starts to save the state in the background, unless a checkpoint of this step exists.

    Raises:
      NonFiniteError: a parameter is not finite.
    """
    if self.manager is None or step in self.manager.all_steps():
      return
    self._check_values(self.measure_run(step, {}, self.trainer.train_state))
    self._watchdog.set_phase(f"saving step {step}")
    save_started = time.monotonic()
    self.manager.save(self.trainer.train_state)
    self._write_scalar("timing/checkpoint_seconds", time.monotonic() - save_started)

  def _complete(self) -> None:
    """Saves the last step, if it is not yet saved, and waits until everything in the background is done."""
    self._save(self._step)
    self._collect_predictions()
    if self.manager is not None:
      self._watchdog.set_phase("completing the last save")
      with terminal.progress_bar("saving"):
        self.manager.wait_until_finished()

  def _evaluate(self, step: int) -> None:
    self._watchdog.set_phase(f"evaluating step {step}")
    eval_started = time.monotonic()
    with explain_out_of_memory(INFERENCE):
      values = self.evaluation.run(self.trainer)
    self._progress.report_evaluation(step, values)
    self._run_actions(ActionMode.TRAIN_EVAL, values)
    self._collect_predictions()  # The metrics of the previous evaluation.
    show = functools.partial(self._progress.report_predictions, step)
    with explain_out_of_memory(INFERENCE):
      self.predictions.run(self.trainer.train_state, self.train_state_axes, show)
    if not self.concurrent_metrics:
      self._collect_predictions()
    if self.evaluation.cfg is not None or self.predictions.cfg is not None:
      self._samples.write(step, self._make_samples)
    self._write_scalar("timing/evaluate_seconds", time.monotonic() - eval_started)

  def _make_samples(self, number: int) -> list[Sample]:
    """Returns predictions that have been evaluated or, if there are none, those of held-out rows."""
    return self.predictions.samples(number) or self.evaluation.samples(
      self.trainer.train_state, self.train_state_axes, number
    )

  def _collect_predictions(self) -> None:
    if (values := self.predictions.collect()) is not None:
      self._run_actions(ActionMode.INFER_EVAL, values)

  def _run_actions(self, mode: ActionMode, values: Mapping[str, Mapping[str, Any]]) -> None:
    # As in T5X, only SeqIO's metrics are plain numbers.
    if mode is not ActionMode.INFER_EVAL:
      values = jax.tree.map(clu_values.Scalar, values)
    if run_actions(mode, self.actions, self.trainer.train_state, values):
      self._is_stopped_by_action = True

  def _write_scalar(self, name: str, value: float) -> None:
    self.trainer.train_metrics_manager.write_scalar(name, value, self._step)
