"""Evaluates a model by inference: it predicts or scores examples, of which the metrics of their task are computed."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from etils import epath

from rosetta_t5 import data, terminal
from rosetta_t5.checkpoints.saved_items import get_local_data
from rosetta_t5.data.pipeline.datasets import make_evaluator
from rosetta_t5.distributed import until_interrupted
from rosetta_t5.inference.infer_fn import (
  InferFn,
  as_numpy,
  check_buckets,
  get_infer_fn,
  inference_step,
  notes_on_tokens_left_behind,
)
from rosetta_t5.inference.sample_predictions import Sample, token_text
from rosetta_t5.models.batch_metrics import LEFT_BEHIND
from rosetta_t5.parallel import BasePartitioner

FOLDER = "inference_eval"
Metrics = Mapping[str, Mapping[str, Any]]


class MetricError(ValueError):
  """A task's metric function, or the code that prepares its arguments, raised an error."""


class InferenceEvaluator:
  """Evaluates a model's predictions and scores on a task or mixture (T5X's class).

  It writes files to `log_dir/inference_eval`: TASK-metrics.jsonl with one line for each evaluation,
  TASK-STEP.jsonl with all predictions, and TASK/ for TensorBoard.
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
    """Reads the data.

    Args:
      infer_eval_dataset_cfg: the task or mixture, its split and batch size.
      inference_evaluator_cls: `seqio.Evaluator`, possibly with bound arguments; None for one that
        writes TensorBoard and JSON files.
      model: the model.
      partitioner: splits batches over the devices.
      log_dir: the parent of the folder with the files; None writes no files.
      verify_matching_vocabs_fn: compares the vocabularies of task and model; None skips the check.
      input_length_buckets: shorter lengths for batches of short inputs; see `get_infer_fn`.

    Raises:
      ValueError: the data cannot be evaluated, its vocabularies are not the model's, or its batch
        size cannot be split over the devices.
    """
    if verify_matching_vocabs_fn is not None:
      verify_matching_vocabs_fn(infer_eval_dataset_cfg, model)
    partitioner.get_data_layout(infer_eval_dataset_cfg.batch_size)
    self._model = model
    self._get_infer_fn = functools.partial(
      get_infer_fn,
      batch_size=infer_eval_dataset_cfg.batch_size,
      partitioner=partitioner,
      input_length_buckets=check_buckets(input_length_buckets, model),
      limit=data.token_limit(model),
    )
    self._folder = None if log_dir is None else epath.Path(log_dir) / FOLDER
    self._infer_fns: dict[str, InferFn] = {}
    self._outputs: Mapping[str, Mapping[Any, Any]] = {}
    self._evaluator = make_evaluator(
      infer_eval_dataset_cfg, model.FEATURE_CONVERTER_CLS, inference_evaluator_cls, self._folder
    )

  @property
  def model_feature_shapes(self) -> Mapping[str, tuple[int, ...]]:
    """The shape of each of the model's features, without the batch dimension."""
    return self._evaluator.model_feature_shapes

  @property
  def eval_tasks(self) -> Sequence[Any]:
    """The tasks that are evaluated: those that have the split and metrics."""
    return self._evaluator.eval_tasks

  def num_examples(self) -> dict[str, int]:
    """Returns the number of examples of each task, after an evaluation."""
    return {
      task.name: max(len(_without_aux(outputs)) for outputs in self._outputs[task.name].values())
      for task in self.eval_tasks
    }

  def evaluate(self, train_state: Any, train_state_axes: Any) -> Future[Any]:
    """Runs the inference, and computes the metrics in the background.

    Args:
      train_state: contains the parameters, and the step for the names of the files.
      train_state_axes: the train state with PartitionSpecs in place of arrays.

    Returns:
      A future of {task: {metric: value}}, or of None on processes other than the first. If a metric
      fails, the future raises MetricError, and the model's outputs are in TASK-STEP.without_metrics.jsonl.
    """
    first_process = jax.process_index() == 0
    if first_process and self._folder is not None:
      with terminal.optional_output(os.fspath(self._folder)):
        self._folder.mkdir(parents=True, exist_ok=True)

    def infer_fn(method: str, **arguments: Any) -> InferFn:
      if method not in self._infer_fns:
        self._infer_fns[method] = self._get_infer_fn(
          inference_step(self._model, method),
          train_state_axes=train_state_axes,
          is_scoring=method == "score_batch",
        )
      kind = "scoring" if method == "score_batch" else "predicting"

      def infer(ds: Any) -> Any:
        rows = terminal.track(until_interrupted(as_numpy(ds)), kind, _count(ds), "examples")
        with contextlib.closing(rows):
          result = self._infer_fns[method](rows, train_state=train_state, **arguments)
        pairs, aux = result if isinstance(result, tuple) else (result, {})
        for note in notes_on_tokens_left_behind(aux):
          terminal.print_line(f"note     {note}")
        is_all = method != "predict_batch_with_aux" and aux.keys() == {LEFT_BEHIND}
        return pairs if is_all else result

      return infer

    # The key is always the same, so that evaluations of a model differ only by its parameters.
    rng = jax.random.PRNGKey(0)
    step = int(get_local_data(train_state.step))
    metrics, outputs = self._evaluator.evaluate(
      compute_metrics=first_process,
      step=step,
      predict_fn=infer_fn("predict_batch", rng=rng),
      score_fn=infer_fn("score_batch"),
      predict_with_aux_fn=infer_fn("predict_batch_with_aux", rng=rng),
    )
    self._outputs = outputs
    result: Future[Any] = Future()

    def finish(done: Future[Any]) -> None:
      error = done.exception()
      if error is None:
        result.set_result(done.result())
        return
      failure = MetricError(_failure_text(error, self._save_outputs(outputs, step)))
      failure.__cause__ = error
      result.set_exception(failure)

    metrics.add_done_callback(finish)
    return result

  def _save_outputs(self, outputs: Mapping[str, Mapping[Any, Any]], step: int) -> list[str]:
    """Saves the model's outputs, which may have taken hours, and returns the files."""
    if self._folder is None:
      return []
    files = []
    vocabularies = {t.name: t.output_features["targets"].vocabulary for t in self.eval_tasks}
    for task, kinds in outputs.items():
      files.append(os.fspath(self._folder / f"{task}-{step}.without_metrics.jsonl"))
      with epath.Path(files[-1]).open("w") as file:
        for output in kinds.values():
          for row in _without_aux(output):
            value = vocabularies[task].decode(row) if isinstance(row, list) else row
            file.write(json.dumps({"output": value}, ensure_ascii=False) + "\n")
    return files

  def samples(self, number: int) -> list[Sample]:
    """Returns each task's first examples with their predictions in the last evaluation.

    Tasks whose metrics need only scores have none.
    """
    samples = []
    for task in self.eval_tasks:
      kinds = self._outputs.get(task.name, {}).items()
      predicted = next((x for kind, x in kinds if kind.name.startswith("PREDICTION")), ())
      examples = self._evaluator.cached_task_datasets[task.name].take(number)
      for example, tokens in zip(
        examples.as_numpy_iterator(), _without_aux(predicted), strict=False
      ):
        given, target = (_feature_text(task, example, name) for name in ("inputs", "targets"))
        prediction = token_text(task.output_features["targets"].vocabulary, tokens)
        samples.append(Sample(task.name, given, target, prediction))
    return samples

  def close(self) -> None:
    """Waits until all files are written."""
    self._evaluator.close()


def _count(ds: Any) -> int | None:
  """Returns the number of examples in a dataset, if it is known without reading them."""
  try:
    return len(ds)
  except TypeError:
    return None


def plain_numbers(metrics: Metrics | None) -> dict[str, dict[str, float]]:
  """Returns those metrics of each task that are numbers or SeqIO's Scalars; {} for None."""
  numbers: dict[str, dict[str, float]] = {}
  for task, values in (metrics or {}).items():
    arrays = {str(name): np.asarray(getattr(x, "value", x)) for name, x in values.items()}
    is_number = {name: x.ndim == 0 and x.dtype.kind in "fiub" for name, x in arrays.items()}
    numbers[task] = {name: float(x) for name, x in arrays.items() if is_number[name]}
  return numbers


def _without_aux(output: Any) -> Sequence[Any]:
  """Returns the model's output for each example, without the auxiliary values if there are any."""
  return output[0] if isinstance(output, tuple) and output else output


def _feature_text(task: Any, example: Mapping[str, Any], name: str) -> str:
  """Returns a feature's text before tokenization if the task keeps it, else its decoded tokens."""
  text = example.get(f"{name}_pretokenized")
  if isinstance(text, bytes):
    return text.decode("utf-8", errors="replace")
  if name not in example:
    return ""
  return token_text(task.output_features[name].vocabulary, example[name].tolist())


def _failure_text(error: BaseException, files: list[str]) -> str:
  text, cause = str(error), error.__cause__
  if cause is not None:
    text = f"{text.partition(': ')[0]}: {type(cause).__name__}: {cause}"
  frame = traceback.extract_tb((cause or error).__traceback__)[-1]
  saved = f". The model's outputs are saved in {', '.join(files)}" if files else ""
  return (
    f"{text} ({frame.filename}, line {frame.lineno}, in {frame.name}){saved}. Correct the task's "
    "metric_fns or postprocess_fn, and start the run again"
  )
