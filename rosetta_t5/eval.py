"""An evaluation, from top to bottom: data, checkpoints, and for each of them metrics and a table."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from rosetta_t5 import checkpoints, config, data
from rosetta_t5.distributed import Watchdog
from rosetta_t5.inference.during_training import LossEvaluation
from rosetta_t5.inference.inference_evaluator import FOLDER, InferenceEvaluator, plain_numbers
from rosetta_t5.inference.results import check_output_dir
from rosetta_t5.memory_advice import Inference
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.plan import describe_run
from rosetta_t5.telemetry import console
from rosetta_t5.telemetry.metrics_table import format_metrics_table
from rosetta_t5.telemetry.model_info import log_model_info

Values = dict[str, dict[str, float]]


def evaluate(
  *,
  model: Any,
  dataset_cfg: data.DatasetConfig,
  restore_checkpoint_cfg: checkpoints.RestoreCheckpointConfig,
  partitioner: BasePartitioner,
  output_dir: str,
  inference_evaluator_cls: Callable[..., Any] | None = None,
  training_evaluator_cls: Callable[..., Any] | None = None,
  summarize_config_fn: Callable[..., None] = config.summarize_gin_config,
  train_state_initializer_cls: Any = checkpoints.TrainStateInitializer,
  train_eval_get_dataset_fn: Callable[..., Any] = data.get_training_eval_datasets,
  fallback_init_rng: int | None = None,
  use_orbax: bool = True,
  input_length_buckets: Sequence[int] | None = (),
) -> dict[int, Values]:
  """Lets checkpoints predict and score a task's examples, and the task's metrics judge them.

  Args:
    model: the model.
    dataset_cfg: the task or mixture, its split, the batch size. `task_feature_lengths` None takes
      the longest example's.
    restore_checkpoint_cfg: one checkpoint, a list of them, or with mode 'all' every one in a folder;
      of these, those that an earlier call with this output_dir has evaluated are left out.
    partitioner: how arrays are split over devices.
    output_dir: where config.gin, model-info.txt and inference_eval/ go.
    inference_evaluator_cls: judges, such as `seqio.Evaluator` with loggers bound; None for one that
      writes TensorBoard's files and JSON.
    training_evaluator_cls: a trainer, to measure the loss too; None for no loss.
    summarize_config_fn: called as f(model_dir, summary_writer, step) to write the configuration.
    train_state_initializer_cls: makes the train state.
    train_eval_get_dataset_fn: makes the data for the loss; with its `eval_steps` bound.
    fallback_init_rng: a seed for what a checkpoint lacks, if the config allows that.
    use_orbax: T5X's choice of layout; it is found by looking.
    input_length_buckets: shorter lengths for batches of short inputs, such as (64, 128); see
      `inference.get_infer_fn`.

  Returns:
    {step: {task: {metric: value}}}; without values on processes other than the first.

  Raises:
    ValueError: something given does not fit together; nothing has been written.
  """
  del use_orbax
  check_output_dir("evaluate.output_dir", output_dir)
  evaluator = InferenceEvaluator(
    dataset_cfg,
    inference_evaluator_cls,
    model,
    partitioner,
    log_dir=output_dir,
    input_length_buckets=input_length_buckets,
  )
  if not evaluator.eval_tasks:
    raise ValueError(_no_metrics_text(dataset_cfg))
  batch = dataset_cfg.batch_size
  shapes = {name: (batch, *shape) for name, shape in evaluator.model_feature_shapes.items()}
  initializer = train_state_initializer_cls(
    optimizer_def=None,  # its state is not read from the checkpoints
    init_fn=model.get_initial_variables,
    input_shapes=shapes,
    partitioner=partitioner,
  )
  fitting = Inference(
    model, partitioner, initializer, shapes, evaluator.only_scores, restore_checkpoint_cfg.dtype
  )
  done = _Evaluated(output_dir, dataset_cfg.name)
  restore_cfg = _those_to_evaluate(restore_checkpoint_cfg, done)
  summarize_config_fn(model_dir=output_dir, summary_writer=None, step=0)
  log_model_info(
    os.path.join(output_dir, "model-info.txt"), initializer.global_train_state_shape, partitioner
  )
  loss, trainer = _loss_evaluation(
    training_evaluator_cls,
    train_eval_get_dataset_fn,
    dataset_cfg,
    model,
    partitioner,
    output_dir,
    initializer.train_state_axes,
  )

  results: dict[int, Values] = {}
  init_rng = None if fallback_init_rng is None else jax.random.PRNGKey(fallback_init_rng)
  with Watchdog() as watchdog:
    # One position for all: the first process alone computes metrics, which may take long.
    watchdog.set_phase("evaluating checkpoints")
    states = initializer.from_checkpoints([restore_cfg], init_rng=init_rng)
    for state, path in _restored(states, fitting):
      started = time.monotonic()
      if trainer is not None:
        _measure_loss(loss, trainer, state, fitting)
      with fitting.answered_when_out_of_memory():
        metrics = evaluator.evaluate(state, initializer.train_state_axes).result()
      results[int(state.step)] = plain_numbers(metrics)
      done.add(path)
      took = console.format_duration(time.monotonic() - started)
      console.print_line(f"evaluated {path} in {took}")
  evaluator.close()
  if trainer is not None:
    trainer.close()
  if results:
    console.print_line(
      f"{format_metrics_table(results)}\nresults  {os.path.join(output_dir, FOLDER)}"
    )
  return results


def main(argv: Sequence[str] | None = None) -> None:
  """Runs `evaluate` as the command line and its gin files say (`python -m t5x.eval`)."""
  config.run_from_command_line(evaluate, argv, describe_run)


class _Evaluated:
  """The checkpoints evaluated so far: a path a line in OUTPUT_DIR/eval.TASK.ckpt, as T5X keeps them."""

  def __init__(self, output_dir: str, task: str):
    self._file = epath.Path(output_dir) / f"eval.{task}.ckpt"
    self.paths = self._file.read_text().split("\n") if self._file.exists() else []

  def add(self, path: str) -> None:
    self.paths = [*dict.fromkeys([*filter(None, self.paths), path])]
    if jax.process_index() == 0:
      self._file.write_text("\n".join(self.paths))


def _restored(states: Iterator[tuple[Any, str]], fitting: Inference) -> Iterator[tuple[Any, str]]:
  """Yields what `states` does; a full memory is answered."""
  while True:
    with fitting.answered_when_out_of_memory(is_restoring=True):
      found = jax.block_until_ready(next(states, None))
    if found is None:
      return
    yield found


def _measure_loss(loss: LossEvaluation, trainer: Any, state: Any, fitting: Inference) -> None:
  trainer.train_state = state
  with dataclasses.replace(fitting, is_scoring=True).answered_when_out_of_memory():
    loss.run(trainer)


def _those_to_evaluate(
  cfg: checkpoints.RestoreCheckpointConfig, done: _Evaluated
) -> checkpoints.RestoreCheckpointConfig:
  """Returns the config of the checkpoints that are there and, with mode 'all', not yet evaluated."""
  found, paths = checkpoints.get_first_valid_restore_config_and_paths([cfg])
  if found is None:
    raise ValueError(
      f"there is no checkpoint to evaluate in {cfg.path} (mode = {cfg.mode!r}): set "
      "CHECKPOINT_PATH (RestoreCheckpointConfig.path) to a checkpoint, or mode = 'all' and a folder "
      "that holds checkpoint_STEP folders"
    )
  checkpoints.check_checkpoints_exist(paths)
  if cfg.mode == "all":
    left_out = [path for path in paths if path in done.paths]
    paths = tuple(path for path in paths if path not in done.paths)
    if left_out:
      console.print_line(f"left out, as they have been evaluated before: {', '.join(left_out)}")
  return dataclasses.replace(cfg, path=list(paths), mode="specific")


def _loss_evaluation(
  trainer_cls: Callable[..., Any] | None,
  get_datasets: Callable[..., Mapping[str, Any]],
  cfg: data.DatasetConfig,
  model: Any,
  partitioner: BasePartitioner,
  output_dir: str,
  train_state_axes: Any,
) -> tuple[LossEvaluation, Any]:
  """Returns the data for the loss, and a trainer to measure it with; (nothing, None) without one."""
  if trainer_cls is None:
    return LossEvaluation(None, get_datasets, None, model, partitioner), None
  loss = LossEvaluation(cfg, get_datasets, None, model, partitioner).start()
  trainer = trainer_cls(
    model=model,
    train_state=None,
    partitioner=partitioner,
    eval_names=loss.task_names(),
    summary_dir=output_dir,
    train_state_axes=train_state_axes,
    rng=jax.random.PRNGKey(0),
    learning_rate_fn=None,
    num_microbatches=None,
  )
  return loss, trainer


def _no_metrics_text(cfg: data.DatasetConfig) -> str:
  return (
    f"'{cfg.name}' has no task with metrics for the split '{cfg.split}': give its task metric_fns "
    "(seqio.TaskRegistry.add), or set DatasetConfig.split to a split that it has"
  )
