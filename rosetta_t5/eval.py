"""An evaluation, from top to bottom: data, checkpoints, the metrics of each, and a table."""

import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from rosetta_t5 import checkpoints, config, data, terminal
from rosetta_t5.argument_types import FolderName, NonNegative, Positive, Seed
from rosetta_t5.distributed import Watchdog
from rosetta_t5.inference import evaluation as evaluations
from rosetta_t5.inference.evaluation import LossEvaluation, Values
from rosetta_t5.inference.result_files import check_output_dir
from rosetta_t5.inference.sample_predictions import SampleLog
from rosetta_t5.models import BaseModel
from rosetta_t5.out_of_memory import INFERENCE, explain_out_of_memory
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.plan.description import describe_run
from rosetta_t5.telemetry import console
from rosetta_t5.telemetry.console import format_metrics_table, log_model_info
from rosetta_t5.trained_model import OpenedModel
from rosetta_t5.training.losses import METRIC_PER_TOKEN


def evaluate(
  *,
  model: BaseModel,
  dataset_cfg: data.DatasetConfig,
  restore_checkpoint_cfg: checkpoints.RestoreCheckpointConfig,
  partitioner: BasePartitioner,
  output_dir: FolderName,
  inference_evaluator_cls: Callable[..., Any] | None = None,
  training_evaluator_cls: Callable[..., Any] | None = None,
  summarize_config_fn: Callable[..., None] = config.summarize_gin_config,
  train_state_initializer_cls: Any = checkpoints.TrainStateInitializer,
  train_eval_get_dataset_fn: Callable[..., Any] = data.get_training_eval_datasets,
  fallback_init_rng: Seed | None = None,
  use_orbax: bool = True,
  input_length_buckets: Sequence[Positive] | None = (),
  num_eval_samples: NonNegative = 3,
) -> dict[int, Values]:
  """Evaluates checkpoints: predictions and scores for a task's examples, and the task's metrics.

  Args:
    model: the model.
    dataset_cfg: the task or mixture, its split and the batch size. With `task_feature_lengths` None,
      features are as long as the longest example.
    restore_checkpoint_cfg: one checkpoint, a list of checkpoints, or with mode 'all' all those of a
      folder that no earlier call with this output_dir has evaluated.
    partitioner: shards arrays and computations over the devices.
    output_dir: the folder for config.gin, model-info.txt and inference_eval/.
    inference_evaluator_cls: evaluates the predictions, such as `seqio.Evaluator` with loggers bound;
      None for an evaluator that writes TensorBoard and JSON files.
    training_evaluator_cls: a trainer class that also evaluates the loss; None does not evaluate it.
    summarize_config_fn: called as f(model_dir, summary_writer, step) to write the configuration.
    train_state_initializer_cls: builds the train state.
    train_eval_get_dataset_fn: builds the datasets for the loss, with its `eval_steps` bound.
    fallback_init_rng: a seed to initialize parameters that a checkpoint lacks, if
      restore_checkpoint_cfg allows it.
    use_orbax: accepted as in T5X; the checkpoint's layout is detected.
    input_length_buckets: shorter lengths for batches of short inputs, such as (64, 128); see
      `inference.get_infer_fn`.
    num_eval_samples: the number of examples of each task that are shown with their predictions, on
      the console and in OUTPUT_DIR/samples.jsonl. 0 shows none.

  Returns:
    {step: {task: {metric: value}}}; processes other than the first have no values.

  Raises:
    ValueError: the arguments do not fit together; nothing has been written.
    OutOfMemoryError: a device has run out of memory; the text suggests what to change.
  """
  check_output_dir("evaluate.output_dir", output_dir)

  # Data, and the shapes of the state.
  data.check_same_files(dataset_cfg)
  evaluator = evaluations.InferenceEvaluator(
    dataset_cfg,
    inference_evaluator_cls,
    model=model,
    partitioner=partitioner,
    log_dir=output_dir,
    input_length_buckets=input_length_buckets,
  )
  if not evaluator.eval_tasks:
    raise ValueError(
      f"'{dataset_cfg.name}' has no task with metrics for the split '{dataset_cfg.split}': give its "
      "task metric_fns (seqio.TaskRegistry.add), or set DatasetConfig.split to a split that it has"
    )
  batch_size = dataset_cfg.batch_size
  shapes = {name: (batch_size, *shape) for name, shape in evaluator.model_feature_shapes.items()}
  initializer = train_state_initializer_cls(
    optimizer_def=None,  # The optimizer's state is not restored.
    init_fn=model.get_initial_variables,
    input_shapes=shapes,
    partitioner=partitioner,
  )

  # Checkpoints that are yet to be evaluated.
  evaluated_file = epath.Path(output_dir) / f"eval.{dataset_cfg.name}.ckpt"  # as in T5X
  evaluated = evaluated_file.read_text().splitlines() if evaluated_file.exists() else []
  restore_cfg = _select_checkpoints(restore_checkpoint_cfg, evaluated)
  if restore_checkpoint_cfg.mode == "all":
    _check_split(output_dir, dataset_cfg.split, [task.name for task in evaluator.eval_tasks])
  checkpoints.check_model(model, data.vocabulary_digests(model), restore_cfg)
  summarize_config_fn(model_dir=output_dir, summary_writer=None, step=0)
  state_axes = initializer.train_state_axes
  info_file = os.path.join(output_dir, "model-info.txt")
  log_model_info(info_file, initializer.global_train_state_shape, partitioner)

  # The loss, if it is evaluated too.
  trainer = None
  if training_evaluator_cls is not None:
    losses = LossEvaluation(dataset_cfg, train_eval_get_dataset_fn, None, model, partitioner)
    trainer = _make_trainer(training_evaluator_cls, losses, state_axes, output_dir)

  samples = SampleLog(num_eval_samples, output_dir)
  results: dict[int, Values] = {}
  table: dict[int, dict[str, Any]] = {}
  init_rng = None if fallback_init_rng is None else jax.random.PRNGKey(fallback_init_rng)
  with Watchdog() as watchdog, explain_out_of_memory(INFERENCE):
    # One phase for everything: only the first process computes metrics, which may take long.
    watchdog.set_phase("evaluating checkpoints")
    for state, path in initializer.from_checkpoints([restore_cfg], init_rng=init_rng):
      started, step = time.monotonic(), int(state.step)
      if step in results:
        raise ValueError(
          f"{path} has step {step}, like another checkpoint of this evaluation, whose results it would "
          "replace: evaluate it by itself, with another EVAL_OUTPUT_DIR"
        )
      if trainer is not None:
        trainer.train_state = state
        _print_loss(model, step, losses.run(trainer))
      results[step] = evaluations.plain_numbers(evaluator.evaluate(state, state_axes).result())
      counts = evaluator.num_examples()
      table[step] = {
        task: {"examples": counts[task], **values} for task, values in results[step].items()
      }
      samples.write(step, evaluator.samples)
      evaluated = [*dict.fromkeys([*evaluated, path])]
      if jax.process_index() == 0:  # Other processes have no metrics.
        about = {"checkpoint": os.fspath(path), "step": step, "split": dataset_cfg.split}
        _write_results(output_dir, about, table[step])
        evaluated_file.write_text("\n".join(evaluated))
      duration = terminal.format_duration(time.monotonic() - started)
      terminal.print_line(f"evaluated {path} in {duration}")
  evaluator.close()
  if trainer is not None:
    trainer.close()
  if results:
    terminal.print_line(format_metrics_table(table))
    terminal.print_line(f"results  {os.path.join(output_dir, evaluations.FOLDER)}")
  return results


def _check_split(output_dir: str, split: str, tasks: Sequence[str]) -> None:
  """Raises ValueError if OUTPUT_DIR/results.jsonl has results of these tasks, but none of this split."""
  file = epath.Path(output_dir) / "results.jsonl"
  lines = map(json.loads, file.read_text().splitlines() if file.exists() else ())
  earlier = {line["split"] for line in lines if line["task"] in tasks}
  if earlier and split not in earlier:
    raise ValueError(
      f"{output_dir} has results of the split '{min(earlier)}', with which those of '{split}' would be "
      "mixed: set another EVAL_OUTPUT_DIR"
    )


def _write_results(output_dir: str, about: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
  """Adds a line for each task to OUTPUT_DIR/results.jsonl: about the evaluation, the task and its metrics."""
  with (epath.Path(output_dir) / "results.jsonl").open("a") as file:
    for task, values in metrics.items():
      line = {**about, "task": task, **values}
      file.write(json.dumps(line, ensure_ascii=False) + "\n")


def evaluate_loss(
  opened: OpenedModel,
  dataset_cfg: data.DatasetConfig,
  trainer_cls: Callable[..., Any],
  num_batches: int | None,
  output_dir: str,
) -> dict[int, Values]:
  """Evaluates the loss of one checkpoint, and prints it.

  Args:
    opened: the model with its parameters.
    dataset_cfg: the task or mixture, its split, its feature lengths and the batch size.
    trainer_cls: computes the loss, such as `training.Trainer`.
    num_batches: the number of batches; None for all examples of the split.
    output_dir: the folder for TensorBoard's files.

  Returns:
    {step: {task: {metric: value}}}.

  Raises:
    ValueError: the data cannot be read with these feature lengths and this batch size.
  """
  check_output_dir("--output_dir", output_dir)
  get_data = functools.partial(data.get_training_eval_datasets, eval_steps=num_batches)
  evaluation = LossEvaluation(dataset_cfg, get_data, num_batches, opened.model, opened.partitioner)
  trainer = _make_trainer(trainer_cls, evaluation, opened.state_axes, output_dir)
  trainer.train_state = opened.state
  values = evaluation.run(trainer)
  trainer.close()
  step = int(opened.state.step)
  terminal.print_line(f"data     {num_batches or 'all'} batches of the split '{dataset_cfg.split}'")
  _print_loss(opened.model, step, values)
  terminal.print_line(f"results  {os.path.join(output_dir, 'training_eval')}")
  return {step: values}


def _print_loss(model: BaseModel, step: int, values: Values) -> None:
  per_token = METRIC_PER_TOKEN.get(model.loss_normalizing_factor, "")
  console.Progress(step, step, loss_per_token=per_token).report_evaluation(step, values)


def _make_trainer(
  trainer_cls: Callable[..., Any], evaluation: LossEvaluation, state_axes: Any, output_dir: str
) -> Any:
  """Returns a trainer that evaluates the loss; its state is set before each evaluation."""
  return trainer_cls(
    model=evaluation.model,
    train_state=None,
    partitioner=evaluation.partitioner,
    eval_names=evaluation.task_names(),
    summary_dir=output_dir,
    train_state_axes=state_axes,
    rng=jax.random.PRNGKey(0),
    learning_rate_fn=None,
    num_microbatches=None,
  )


def main(argv: Sequence[str] | None = None) -> None:
  """Runs `evaluate` with the arguments of the command line and its gin files (`python -m t5x.eval`)."""
  config.run_from_command_line(evaluate, argv, describe_run)


def _select_checkpoints(
  cfg: checkpoints.RestoreCheckpointConfig, evaluated: Sequence[str]
) -> checkpoints.RestoreCheckpointConfig:
  """Returns the config of the checkpoints that exist and, with mode 'all', are not yet evaluated."""
  _, paths = checkpoints.find_checkpoints([cfg])
  skipped = [path for path in paths if path in evaluated and cfg.mode == "all"]
  if skipped:
    terminal.print_line(f"skipped, because they have been evaluated before: {', '.join(skipped)}")
  new = [path for path in paths if path not in skipped]
  return dataclasses.replace(cfg, path=new, mode="specific")
