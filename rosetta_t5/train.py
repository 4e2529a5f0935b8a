"""A training run, from top to bottom: seeds, data, state, loop, end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from rosetta_t5 import checkpoints, config, data, distributed
from rosetta_t5.inference.during_training import LossEvaluation, PredictionEvaluation
from rosetta_t5.memory_advice import answered_when_evaluating, answered_when_out_of_memory
from rosetta_t5.networks.computation_summary import computation_text
from rosetta_t5.networks.precision import Fp8Choice, choose_fp8, with_fp8
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.plan import describe_run
from rosetta_t5.telemetry import console
from rosetta_t5.telemetry.metrics_manager import as_floats
from rosetta_t5.telemetry.model_info import log_model_info
from rosetta_t5.telemetry.nonfinite import check_finite
from rosetta_t5.telemetry.report import end_report, header
from rosetta_t5.telemetry.run_measures import RunMeasures
from rosetta_t5.training import Hook, TrainState, automatic_garbage_collection, run_due, stretches
from rosetta_t5.training.actions import ActionMode, BaseAction, run_actions

Actions = Mapping[ActionMode, Sequence[BaseAction]]


@checkpoints.exclusive_model_dir
def train(
  *,
  model: Any,
  train_dataset_cfg: data.DatasetConfig,
  train_eval_dataset_cfg: data.DatasetConfig | None,
  infer_eval_dataset_cfg: data.DatasetConfig | None,
  checkpoint_cfg: checkpoints.CheckpointConfig,
  partitioner: BasePartitioner,
  trainer_cls: Callable[..., Any],
  model_dir: str,
  total_steps: int,
  eval_steps: int,
  eval_period: int,
  relative_steps: int | None = None,
  stats_period: int | None = None,
  random_seed: int | None,
  use_hardware_rng: bool = False,
  summarize_config_fn: Callable[[str, Any, int], None],
  inference_evaluator_cls: Any = None,
  get_dataset_fn: Callable[..., Any] = data.get_dataset,
  concurrent_metrics: bool = True,
  actions: Actions | None = None,
  train_eval_get_dataset_fn: Callable[..., Any] = data.get_training_eval_datasets,
  run_eval_before_training: bool = False,
  train_state_initializer_cls: Any = checkpoints.TrainStateInitializer,
  use_orbax: bool = True,
  verify_matching_vocabs_fn: Callable[..., None] | None = data.verify_matching_vocabs,
  gc_period: int = 0,
  te_config_cls: Any = None,
) -> tuple[int, TrainState]:
  """Trains a model; MODEL_DIR's latest checkpoint, if there is one, is continued.

  Args:
    model: the model.
    train_dataset_cfg: what it learns from.
    train_eval_dataset_cfg: what its loss is measured on from time to time; None for nothing.
    infer_eval_dataset_cfg: what it makes predictions on at each evaluation; None for nothing.
    checkpoint_cfg: what is saved, and where to start from if MODEL_DIR has no checkpoint.
    partitioner: how arrays are split over devices.
    trainer_cls: makes the trainer, such as `training.Trainer` with a schedule bound.
    model_dir: where checkpoints, metrics and the configuration go.
    total_steps: updates to have been made at the end.
    eval_steps: batches of an evaluation.
    eval_period: updates between evaluations.
    relative_steps: updates from the start on; overrides total_steps.
    stats_period: updates that a line of metrics is about; None for eval_period.
    random_seed: seeds initialisation and dropout; None draws one and keeps it in the checkpoints.
    use_hardware_rng: whether random bits come from a faster generator, one that depends on the
      devices; so too where random_seed is None.
    summarize_config_fn: called as f(model_dir, summary_writer, step) to write the configuration.
    inference_evaluator_cls: judges the predictions, such as `seqio.Evaluator` with loggers bound;
      None for one that writes TensorBoard's files and JSON.
    get_dataset_fn: makes the training data.
    concurrent_metrics: compute the metrics of predictions while training goes on; actions then see
      them at the next evaluation.
    actions: by mode, what is done with metrics; an action can end training.
    train_eval_get_dataset_fn: makes the evaluation data.
    run_eval_before_training: whether the first evaluation comes before the first step.
    train_state_initializer_cls: makes the train state.
    use_orbax: T5X's choice of layout; checkpoints are Orbax's either way.
    verify_matching_vocabs_fn: checks the vocabularies of task and model; None for no check.
    gc_period: updates between garbage collections, which are otherwise off; 0 leaves Python's own.
    te_config_cls: makes the `TransformerEngineConfig` that turns fp8 on (NVIDIA's T5X); None for no fp8.

  Returns:
    (updates made, the train state at the end).

  Raises:
    ValueError: something given does not fit together; nothing has been written over.
    ModelDirInUseError: another run trains in model_dir.
    OutOfMemoryError: a device's memory is full; the text says what to change.
    NonFiniteError: the loss or a gradient became NaN or infinite.
    RunInterrupted: SIGTERM or SIGUSR1 came; the state is saved, and the process exits with 143.
  """
  started = time.monotonic()
  fp8 = choose_fp8(te_config_cls)
  model = with_fp8(model, fp8)

  # Seeds. One that was drawn is kept with the checkpoints, so that a restart goes on with it.
  restore_cfg, restore_path = checkpoints.find_start_checkpoint(checkpoint_cfg, model_dir)
  facts = _run_facts(model_dir, restore_path, random_seed, train_dataset_cfg, checkpoint_cfg)
  if use_hardware_rng or random_seed is None:
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
  init_rng, trainer_rng = jax.random.split(jax.random.PRNGKey(facts["random_seed"]), 2)

  # Data. The feed begins to draw its first batch at once; what evaluates is made meanwhile.
  train_cfg = dataclasses.replace(train_dataset_cfg, seed=facts["train_dataset_seed"])
  if verify_matching_vocabs_fn is not None:
    verify_matching_vocabs_fn(train_cfg, model)
  feed = _make_feed(get_dataset_fn, train_cfg, model, partitioner, checkpoint_cfg)
  evaluation = LossEvaluation(
    train_eval_dataset_cfg, train_eval_get_dataset_fn, eval_steps, model, partitioner
  ).start()
  predictions = PredictionEvaluation(
    infer_eval_dataset_cfg, inference_evaluator_cls, model, partitioner, model_dir,
    verify_matching_vocabs_fn
  ).start()  # fmt: skip

  # State: MODEL_DIR's own, else that of the checkpoint to start from, else a fresh one.
  initializer = _make_initializer(train_state_initializer_cls, model, feed, partitioner)
  fitting = functools.partial(answered_when_out_of_memory, model, partitioner, initializer, feed)
  with fitting():
    state, manager = checkpoints.create_checkpoint_manager_and_restore(
      initializer, partitioner, restore_cfg, restore_path, init_rng, checkpoint_cfg.save, model_dir,
      feed, run_facts=facts
    )  # fmt: skip
    state = initializer.from_scratch(init_rng) if state is None else state
    first_step = int(jax.block_until_ready(state).step)
  if relative_steps:
    total_steps = facts.setdefault("total_steps", first_step + relative_steps)

  # Trainer: holds the state from here on, and the step compiles while the feed draws a batch.
  trainer = trainer_cls(
    model=model, train_state=state, partitioner=partitioner, eval_names=evaluation.task_names(),
    summary_dir=model_dir, train_state_axes=initializer.train_state_axes, rng=trainer_rng
  )  # fmt: skip
  del state
  loop = _Loop(
    trainer, initializer.train_state_axes, manager if checkpoint_cfg.save else None, feed,
    evaluation, predictions, concurrent_metrics, actions, first_step, total_steps, model_dir, started,
    RunMeasures(model, feed.element_spec, partitioner.mesh.devices.flat),
    functools.partial(answered_when_evaluating, model, partitioner, initializer, feed)
  )  # fmt: skip
  _say_header(loop, model, partitioner, train_cfg, checkpoint_cfg, restore_path, fp8)
  if first_step < total_steps:
    with fitting(trainer):
      loop.compile()
      log_model_info(os.path.join(model_dir, "model-info.txt"), trainer.train_state, partitioner)
      summarize_config_fn(model_dir, trainer.train_metrics_manager.summary_writer, first_step)
      with automatic_garbage_collection(on=not gc_period):
        loop.run(checkpoint_cfg.save, eval_period, stats_period, gc_period, run_eval_before_training)  # fmt: skip
  return loop.finish()


def main(argv: Sequence[str] | None = None) -> None:
  """Runs `train` as the command line and its gin files say (`python -m t5x.train`)."""
  config.run_from_command_line(train, argv, describe_run)


@dataclasses.dataclass
class _Loop:
  """Stretches of steps, and between them the hooks that are due."""

  trainer: Any
  state_axes: Any
  manager: checkpoints.OrbaxCheckpointManagerInterface | None
  feed: Any
  evaluation: LossEvaluation
  predictions: PredictionEvaluation
  concurrent_metrics: bool
  actions: Actions | None
  first_step: int
  total_steps: int
  model_dir: str
  started: float
  measures: RunMeasures
  answered: Callable[..., contextlib.AbstractContextManager[None]]

  def __post_init__(self) -> None:
    self.step = self.first_step
    self.stopped = False
    factor = getattr(self.evaluation.model, "_loss_normalizing_factor", None)
    self.progress = console.Progress(self.first_step, self.total_steps, loss_is_sum=factor is None)
    self.watchdog = distributed.Watchdog()

  def compile(self) -> None:
    compiling = time.monotonic()
    self._write("timing/init_or_restore_seconds", compiling - self.started, self.first_step)
    self.trainer.compile_train(self.feed.element_spec)
    self._write("timing/compilation_seconds", time.monotonic() - compiling, self.first_step)
    self.predictions.wait_until_read()

  def run(
    self,
    save: checkpoints.SaveCheckpointConfig | None,
    eval_period: int,
    stats_period: int | None,
    gc_period: int,
    run_eval_before_training: bool,
  ) -> None:
    # The checkpoint comes first: an evaluation that fails must not cost the steps before it.
    hooks = [
      *([Hook("checkpoint", self.save, save.period, save.checkpoint_steps or ())] if save else []),
      Hook("evaluation", self.evaluate, eval_period, at_end=True),
      Hook("garbage collection", lambda _: gc.collect(), gc_period),
    ]
    saves = checkpoints.finish_saves_on_error(self.manager)
    with saves, self.progress, distributed.InterruptionListener() as interruption, self.watchdog:
      self.trainer.should_stop = interruption.should_stop
      self.save(self.first_step)
      if run_eval_before_training:
        self.evaluate(self.first_step)
      longest = stats_period or eval_period
      for start, stop in stretches(self.first_step, self.total_steps, hooks, longest):
        self.train(start, stop)
        run_due(hooks, self.step, self.total_steps)
        if self.stopped:
          break
      self.save(self.step)
      self._collect_predictions()

  def train(self, start: int, stop: int) -> None:
    batches = self.watchdog.watch_batches(self.feed, start)
    values = as_floats(self.trainer.train(batches, stop - start, start_step=start).result())
    self.step = self.trainer.stopped_at or stop
    self.stopped |= self.trainer.stopped_at is not None or self.trainer.stop_training
    state = self.trainer.train_state
    of_run = self.feed.measures() | self.measures(self.step, values, state)
    check_finite(self.trainer.first_nonfinite, state, self.manager, of_run)
    self.trainer.train_metrics_manager.write_scalars(self.step, of_run)
    values |= of_run
    self.progress.report(self.step, values)
    self._act(ActionMode.TRAIN, {"train": values})

  def save(self, step: int) -> None:
    """Starts to save the state, if the run saves any; one that is there is left as it is."""
    if self.manager is None or step in self.manager.all_steps():
      return
    self.watchdog.set_phase(f"saving step {step}")
    started = time.monotonic()
    self.manager.save(self.trainer.train_state)
    self._write("timing/checkpoint_seconds", time.monotonic() - started, step)
    self._write("timing/uptime", time.monotonic() - self.started, step)

  def evaluate(self, step: int) -> None:
    self.watchdog.set_phase(f"evaluating step {step}")
    started = time.monotonic()
    with self.answered(self.evaluation.cfg, is_scoring=True, scope="train_eval/"):
      values = self.evaluation.run(self.trainer)
    for task, task_values in values.items():
      self.progress.report_evaluation(step, task, task_values)
    self._act(ActionMode.TRAIN_EVAL, values)
    self._collect_predictions()  # of the evaluation before this one
    show = functools.partial(self._show_predictions, step)
    with self.answered(self.predictions.cfg, is_scoring=False, scope="infer_eval/"):
      self.predictions.run(self.trainer.train_state, self.state_axes, show)
    if not self.concurrent_metrics:
      self._collect_predictions()
    self._write("timing/evaluate_seconds", time.monotonic() - started, step)

  def _show_predictions(self, step: int, values: Mapping[str, Mapping[str, float]]) -> None:
    for task, task_values in values.items():
      self.progress.report_predictions(step, task, task_values)

  def _collect_predictions(self) -> None:
    if (values := self.predictions.collect()) is not None:
      self._act(ActionMode.INFER_EVAL, values)

  def finish(self) -> tuple[int, TrainState]:
    """Waits for what is written in the background, and says where everything is.

    Returns:
      (updates made, the train state at the end).

    Raises:
      RunInterrupted: a signal ended the run, and a job manager is to be told.
    """
    self.feed.close()
    self.predictions.close()
    self.trainer.close()
    checkpoint = None
    if self.manager is not None:
      self.manager.close()
      if (latest := self.manager.latest_step()) is not None:
        checkpoint = checkpoints.checkpoint_path(self.model_dir, latest)
    console.say(
      end_report(
        steps=(self.first_step, self.step),
        seconds=time.monotonic() - self.started,
        losses=(self.progress.first_loss, self.progress.last_loss),
        model_dir=self.model_dir,
        checkpoint=checkpoint,
      )
    )
    if self.trainer.stopped_at is not None:
      console.say(f"interrupted  after step {self.step}: the same command goes on from there")
      raise distributed.RunInterrupted(self.step)
    state = self.trainer.train_state
    return int(state.step), state

  def _act(self, mode: ActionMode, values: Mapping[str, Mapping[str, float]]) -> None:
    if run_actions(mode, self.actions, self.trainer.train_state, values):
      self.stopped = True

  def _write(self, name: str, value: float, step: int) -> None:
    self.trainer.train_metrics_manager.write_scalar(name, value, step)


def _make_feed(
  get_dataset_fn: Callable[..., Any],
  train_cfg: data.DatasetConfig,
  model: Any,
  partitioner: BasePartitioner,
  checkpoint_cfg: checkpoints.CheckpointConfig,
) -> Any:
  layout = partitioner.get_data_layout(train_cfg.batch_size)
  return data.prepare_train_iter(
    get_dataset_fn(train_cfg, layout.shard_id, layout.num_shards, model.FEATURE_CONVERTER_CLS),
    partitioner=partitioner,
    checkpoint_cfg=checkpoint_cfg,
    data_layout=layout,
  )


def _make_initializer(cls: Any, model: Any, feed: Any, partitioner: BasePartitioner) -> Any:
  return cls(
    optimizer_def=model.optimizer_def,
    init_fn=model.get_initial_variables,
    input_shapes={name: spec.shape for name, spec in feed.element_spec.items()},
    input_types={name: spec.dtype for name, spec in feed.element_spec.items()},
    partitioner=partitioner,
  )


def _say_header(
  loop: _Loop,
  model: Any,
  partitioner: BasePartitioner,
  train_cfg: data.DatasetConfig,
  checkpoint_cfg: checkpoints.CheckpointConfig,
  restore_path: str | None,
  fp8: Fp8Choice,
) -> None:
  notes = [f"changed since the last run: {line}" for line in config.changes_since(loop.model_dir)]
  notes += [f"fp8 {fp8.text}"] if fp8.warning else []
  if not model.optimizer_def.uses_learning_rate:
    notes.append(
      "optax optimizers follow their own learning rate; Trainer.learning_rate_fn is only logged"
    )
  console.say(
    header(
      model=model,
      params=loop.trainer.train_state.params,
      mesh=partitioner.mesh,
      mesh_reason=getattr(partitioner, "mesh_reason", None),
      task=train_cfg.name,
      batch=loop.feed.element_spec,
      steps=(loop.first_step, loop.total_steps),
      model_dir=loop.model_dir,
      restored_from=restore_path,
      save_period=checkpoint_cfg.save.period if checkpoint_cfg.save else None,
      computation=computation_text(model, fp8),
      notes=notes,
    )
  )


def _run_facts(
  model_dir: str,
  restore_path: str | None,
  random_seed: int | None,
  train_dataset_cfg: data.DatasetConfig,
  checkpoint_cfg: checkpoints.CheckpointConfig,
) -> dict[str, Any]:
  """Returns what started the run, and its seeds: as given, else as it had before, else drawn."""
  facts: dict[str, Any] = {}
  if restore_path is not None and epath.Path(restore_path).parent == epath.Path(model_dir):
    facts = checkpoints.read_run_facts(restore_path)
  drawn = distributed.draw_seed()
  facts["random_seed"] = facts.get("random_seed", drawn) if random_seed is None else random_seed
  seed = facts.get("train_dataset_seed", drawn)
  facts["train_dataset_seed"] = data.resolve_seed(train_dataset_cfg, seed)
  facts["started_from"] = checkpoints.find_base_checkpoint(checkpoint_cfg, model_dir, restore_path)
  return facts
