"""Evaluations: the loss on held-out batches, and metrics of predictions and scores of examples."""

import contextlib
import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from etils import epath

from rosetta_t5 import data, distributed, terminal
from rosetta_t5.checkpoints.saved_items import get_local_data
from rosetta_t5.data.pipeline.datasets import as_batch_iterator
from rosetta_t5.data.pipeline.inference_data import make_evaluator
from rosetta_t5.inference.infer_fn import InferFn, as_numpy, check_buckets, get_infer_fn
from rosetta_t5.inference.sample_predictions import Row, Sample, held_out_sampler, token_text
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.telemetry.metrics_manager import as_floats

FOLDER = "inference_eval"
Values = dict[str, dict[str, float]]


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
      num_token_ids=data.token_limit(model),
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
      fails, the future raises its error.
    """
    first_process = jax.process_index() == 0
    if first_process and self._folder is not None:
      with terminal.optional_output(os.fspath(self._folder)):
        self._folder.mkdir(parents=True, exist_ok=True)

    # The key is always the same, so that evaluations of a model differ only by its parameters.
    rng = jax.random.PRNGKey(0)
    infer = functools.partial(self._infer, train_state, train_state_axes)
    metrics, self._outputs = self._evaluator.evaluate(
      compute_metrics=first_process,
      step=int(get_local_data(train_state.step)),
      predict_fn=functools.partial(infer, "predict_batch", rng=rng),
      score_fn=functools.partial(infer, "score_batch"),
      predict_with_aux_fn=functools.partial(infer, "predict_batch_with_aux", rng=rng),
    )
    return metrics

  def _infer(
    self, train_state: Any, train_state_axes: Any, method: str, ds: Any, **arguments: Any
  ) -> Any:
    is_scoring = method == "score_batch"
    if method not in self._infer_fns:
      self._infer_fns[method] = self._get_infer_fn(
        getattr(self._model, method), train_state_axes=train_state_axes, is_scoring=is_scoring
      )
    kind = "scoring" if is_scoring else "predicting"
    count = operator.length_hint(ds) or None
    rows = terminal.track(distributed.until_interrupted(as_numpy(ds)), kind, count, "examples")
    with contextlib.closing(rows):
      return self._infer_fns[method](rows, train_state=train_state, **arguments)

  def samples(self, number: int) -> list[Sample]:
    """Returns each task's first examples with their predictions in the last evaluation.

    Tasks whose metrics need only scores have none.
    """
    samples = []
    for task in self.eval_tasks:
      kinds = self._outputs.get(task.name, {}).items()
      predicted = next((x for kind, x in kinds if kind.name.startswith("PREDICTION")), ())
      examples = self._evaluator.cached_task_datasets[task.name].take(number).as_numpy_iterator()
      features = task.output_features
      for example, tokens in zip(examples, _without_aux(predicted), strict=False):
        given, target = (
          token_text(features[name].vocabulary, example[name].tolist()) if name in example else ""
          for name in ("inputs", "targets")
        )
        prediction = token_text(features["targets"].vocabulary, tokens)
        samples.append(Sample(task.name, given, target, prediction))
    return samples

  def close(self) -> None:
    """Waits until all files are written."""
    self._evaluator.close()


def plain_numbers(metrics: Mapping[str, Mapping[str, Any]] | None) -> Values:
  """Returns those metrics of each task that are numbers or SeqIO's Scalars; {} for None."""
  numbers: Values = {}
  for task, values in (metrics or {}).items():
    arrays = {str(name): np.asarray(getattr(x, "value", x)) for name, x in values.items()}
    is_number = {name: x.ndim == 0 and x.dtype.kind in "fiub" for name, x in arrays.items()}
    numbers[task] = {name: float(x) for name, x in arrays.items() if is_number[name]}
  return numbers


def _without_aux(output: Any) -> Sequence[Any]:
  """Returns the model's output for each example, without the auxiliary values if there are any."""
  return output[0] if isinstance(output, tuple) and output else output


@dataclasses.dataclass
class LossEvaluation:
  """Measures the loss on held-out data, which a background thread opens.

  Attributes:
    cfg: the data; None for no evaluation.
    get_datasets: returns each task's batches.
    num_batches: number of batches; None if gin has bound `get_datasets`' argument `eval_steps`.
    model: the model.
    partitioner: splits batches over the devices.
  """

  cfg: data.DatasetConfig | None
  get_datasets: Callable[..., Mapping[str, Any]]
  num_batches: int | None
  model: Any
  partitioner: BasePartitioner

  def __post_init__(self) -> None:
    self._datasets = ThreadPoolExecutor(1).submit(self._open_datasets)
    self._sampler: Callable[[Any], list[Sample]] | None = None

  def _open_datasets(self) -> Mapping[str, Any]:
    """Returns each task's batches."""
    if self.cfg is None:
      return {}
    layout = self.partitioner.get_data_layout(self.cfg.batch_size)
    options = {"feature_converter_cls": self.model.FEATURE_CONVERTER_CLS}
    if self.num_batches is not None:
      options["eval_steps"] = self.num_batches
    return self.get_datasets(self.cfg, layout.shard_id, layout.num_shards, **options)

  def task_names(self) -> list[str]:
    """Waits until the data is open and returns the names of its tasks."""
    return list(self._datasets.result())

  def run(self, trainer: Any) -> Values:
    """Returns each task's metrics for the trainer's current state; {} without data."""
    if self.cfg is None:
      return {}
    layout = self.partitioner.get_data_layout(self.cfg.batch_size)
    with contextlib.ExitStack() as stack:
      tracked = {}
      for name, dataset in self._datasets.result().items():
        cfg = dataclasses.replace(self.cfg, mixture_or_task_name=name)
        limit = data.token_limit(self.model)
        feed = data.prepare_train_iter(
          dataset, self.partitioner, None, layout, cfg, limit, is_training=False
        )
        stack.callback(feed.close)
        batches = distributed.until_interrupted(feed)
        tracked[name] = terminal.track(batches, f"evaluating {name}", self.num_batches, "batches")
        stack.callback(tracked[name].close)
      return {name: as_floats(values) for name, values in trainer.eval(tracked).items()}

  def samples(self, train_state: Any, train_state_axes: Any, number: int) -> list[Sample]:
    """Predicts the first rows of each task, at most `number`; [] without data.

    It must be called after `run`, which reads all data: a cache keeps nothing that is read in part.
    """
    if self.cfg is None:
      return []
    if self._sampler is None:
      rows = {name: _first_rows(x, number) for name, x in self._datasets.result().items()}
      self._sampler = held_out_sampler(rows, self.model, self.partitioner, train_state_axes)
    return self._sampler(train_state)


class PredictionEvaluation:
  """Makes predictions on held-out data, which a background thread reads, and computes their metrics.

  Metrics can be computed while training continues. They are then collected at the next evaluation,
  which is at the same step on every process.
  """

  def __init__(self, cfg: data.DatasetConfig | None, *arguments: Any):
    """Starts to read the data.

    Args:
      cfg: the data; None evaluates nothing.
      *arguments: the further arguments of `InferenceEvaluator`.
    """
    self.cfg = cfg
    self._evaluator: Future[Any] = ThreadPoolExecutor(1).submit(
      lambda: None if cfg is None else InferenceEvaluator(cfg, *arguments)
    )
    self._pending: Future[Any] | None = None

  def wait_until_read(self) -> None:
    """Waits until the data has been read, so that its errors are reported before the first step.

    Raises:
      ValueError: the data cannot be evaluated.
    """
    evaluator = self._evaluator.result()
    if self.cfg is not None and not evaluator.eval_tasks:
      terminal.print_line(
        f"note     no predictions are evaluated: '{self.cfg.name}' has no metrics for the split "
        f"'{self.cfg.split}'"
      )

  def run(self, train_state: Any, train_state_axes: Any, show: Callable[[Values], None]) -> None:
    """Runs the inference. When the metrics have been computed, `show` is called with them."""
    evaluator = self._evaluator.result()
    if evaluator is None or not evaluator.eval_tasks:
      return
    self._pending = evaluator.evaluate(train_state, train_state_axes)
    self._pending.add_done_callback(
      lambda done: None if done.exception() else show(plain_numbers(done.result()))
    )

  def samples(self, number: int) -> list[Sample]:
    """Returns each task's first examples with the predictions of the last `run`; [] without any."""
    evaluator = self._evaluator.result()
    return [] if evaluator is None else evaluator.samples(number)

  def collect(self) -> Values | None:
    """Waits for the metrics of the last `run` and returns them; None if they were collected before.

    Raises:
      ValueError: a metric failed.
    """
    pending, self._pending = self._pending, None
    return None if pending is None else plain_numbers(pending.result())

  def close(self) -> None:
    """Waits until all files are written."""
    if self.cfg is not None:
      self._evaluator.result().close()


def _first_rows(dataset: Any, number: int) -> list[Row]:
  batch = {name: np.asarray(x) for name, x in next(as_batch_iterator(dataset)).items()}
  rows = range(min(number, *map(len, batch.values())))
  return [{name: x[row] for name, x in batch.items()} for row in rows]
