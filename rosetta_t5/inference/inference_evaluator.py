"""Evaluation by prediction: the model decodes or scores a task's examples, the task's metrics judge."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from rosetta_t5 import data
from rosetta_t5.checkpoints.saved_state import get_local_data
from rosetta_t5.data.pipeline.seqio_evaluator import make_evaluator
from rosetta_t5.inference.infer_fn import InferFn, get_infer_fn
from rosetta_t5.inference.length_buckets import check_buckets
from rosetta_t5.inference.unscored_predictions import kept_where_metrics_fail
from rosetta_t5.parallel import BasePartitioner

FOLDER = "inference_eval"
Metrics = Mapping[str, Mapping[str, Any]]


class InferenceEvaluator:
  """Evaluates a model's predictions and scores on a task or mixture (T5X's class).

  Files go to `log_dir/inference_eval`: TASK-metrics.jsonl with a line for each evaluation,
  TASK-STEP.jsonl with all predictions, TASK/ for TensorBoard.
  """

  def __init__(
    self,
    infer_eval_dataset_cfg: data.DatasetConfig,
    inference_evaluator_cls: Callable[..., Any] | None,
    model: Any,
    partitioner: BasePartitioner,
    log_dir: str | os.PathLike[str] | None = None,
    verify_matching_vocabs_fn: Callable[..., None] | None = data.verify_matching_vocabs,
    input_length_buckets: Sequence[int] | None = (),
  ):
    """Reads the data once.

    Args:
      infer_eval_dataset_cfg: the task or mixture, its split and batch size.
      inference_evaluator_cls: `seqio.Evaluator`, with arguments bound as one likes; None for one
        that writes TensorBoard's files and JSON.
      model: the model.
      partitioner: splits batches over the devices.
      log_dir: the folder above the files; None writes none.
      verify_matching_vocabs_fn: checks the vocabularies of task and model; None for no check.
      input_length_buckets: shorter lengths for batches of short inputs; see `get_infer_fn`.

    Raises:
      ValueError: something given does not fit together, or the batch not the devices.
    """
    if verify_matching_vocabs_fn is not None:
      verify_matching_vocabs_fn(infer_eval_dataset_cfg, model)
    partitioner.get_data_layout(infer_eval_dataset_cfg.batch_size)
    self._batch_size = infer_eval_dataset_cfg.batch_size
    self._buckets = check_buckets(input_length_buckets)
    self._model = model
    self._partitioner = partitioner
    self._folder = None if log_dir is None else epath.Path(log_dir) / FOLDER
    self._infer_fns: dict[str, InferFn] = {}
    self._evaluator = make_evaluator(
      infer_eval_dataset_cfg, model.FEATURE_CONVERTER_CLS, inference_evaluator_cls, self._folder
    )

  @property
  def model_feature_shapes(self) -> Mapping[str, tuple[int, ...]]:
    """The shape of each of the model's features, without the batch."""
    return self._evaluator.model_feature_shapes

  @property
  def eval_tasks(self) -> Sequence[Any]:
    """The tasks that are evaluated: those that have the split, and metrics."""
    return self._evaluator.eval_tasks

  @property
  def only_scores(self) -> bool:
    """Whether the tasks' metrics are of scores alone, so that nothing is predicted."""
    return all(
      task.score_metric_fns and not (task.predict_metric_fns or task.predict_with_aux_metric_fns)
      for task in self.eval_tasks
    )

  def evaluate(self, train_state: Any, train_state_axes: Any) -> Any:
    """Predicts, and computes the metrics in the background.

    Args:
      train_state: its parameters are evaluated, its step names the files.
      train_state_axes: the same with PartitionSpecs in place of arrays.

    Returns:
      A future of {task: {metric: value}}; of None on processes other than the first. Where the
      metrics fail it raises MetricError, and what the model said is in TASK-STEP.unjudged.jsonl.
    """
    first_process = jax.process_index() == 0
    if first_process and self._folder is not None:
      self._folder.mkdir(parents=True, exist_ok=True)

    def infer_fn(method: str, **arguments: Any) -> InferFn:
      if method not in self._infer_fns:
        self._infer_fns[method] = get_infer_fn(
          getattr(self._model, method),
          self._batch_size,
          train_state_axes,
          self._partitioner,
          input_length_buckets=self._buckets,
          is_scoring=method == "score_batch",
        )
      return functools.partial(self._infer_fns[method], train_state=train_state, **arguments)

    # The same key each time: evaluations of one model are to differ by its parameters alone.
    rng = jax.random.PRNGKey(0)
    step = int(get_local_data(train_state.step))
    metrics, outputs = self._evaluator.evaluate(
      compute_metrics=first_process,
      step=step,
      predict_fn=infer_fn("predict_batch", rng=rng),
      score_fn=infer_fn("score_batch"),
      predict_with_aux_fn=infer_fn("predict_batch_with_aux", rng=rng),
    )
    return kept_where_metrics_fail(metrics, outputs, self._vocabulary, self._folder, step)

  def _vocabulary(self, task_name: str) -> Any:
    (task,) = (task for task in self.eval_tasks if task.name == task_name)
    return task.output_features["targets"].vocabulary

  def close(self) -> None:
    """Waits until everything is written."""
    self._evaluator.close()


def plain_numbers(metrics: Metrics | None) -> dict[str, dict[str, float]]:
  """Returns the numbers among tasks' metrics, SeqIO's Scalar unwrapped; {} for None."""
  return {
    task: {name: float(np.asarray(number)) for name, number in _numbers(values)}
    for task, values in (metrics or {}).items()
  }


def _numbers(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
  found = ((name, getattr(value, "value", value)) for name, value in values.items())
  return [(name, x) for name, x in found if np.ndim(x) == 0 and np.asarray(x).dtype.kind in "fiub"]
