"""The evaluations during training: the loss on held-out batches, and metrics of predictions."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rosetta_t5 import data, distributed, terminal
from rosetta_t5.data.pipeline.host_batches import as_batch_iterator
from rosetta_t5.inference.inference_evaluator import InferenceEvaluator, plain_numbers
from rosetta_t5.inference.sample_predictions import HeldOutSampler, Row, Sample
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.telemetry.metrics_manager import as_floats

Values = dict[str, dict[str, float]]


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
    self._datasets = _run_in_background(self._open_datasets)
    self._sampler: HeldOutSampler | None = None

  def _open_datasets(self) -> Mapping[str, Any]:
    """Returns each task's batches."""
    if self.cfg is None:
      return {}
    layout = self.partitioner.get_data_layout(self.cfg.batch_size)
    steps = {} if self.num_batches is None else {"eval_steps": self.num_batches}
    return self.get_datasets(
      self.cfg,
      layout.shard_id,
      layout.num_shards,
      feature_converter_cls=self.model.FEATURE_CONVERTER_CLS,
      **steps,
    )

  def task_names(self) -> list[str]:
    """Waits until the data is open and returns the names of its tasks."""
    return list(self._datasets.result())

  def run(self, trainer: Any) -> Values:
    """Returns each task's metrics for the trainer's current state; {} without data."""
    if self.cfg is None:
      return {}
    layout = self.partitioner.get_data_layout(self.cfg.batch_size)
    with contextlib.ExitStack() as stack:
      feeds = {}
      for name, dataset in self._datasets.result().items():
        feeds[name] = data.prepare_train_iter(
          dataset,
          partitioner=self.partitioner,
          checkpoint_cfg=None,
          data_layout=layout,
          dataset_cfg=dataclasses.replace(self.cfg, mixture_or_task_name=name),
          limit=data.token_limit(self.model),
          is_training=False,
        )
        stack.callback(feeds[name].close)
      tracked = {
        name: stack.enter_context(
          contextlib.closing(
            terminal.track(
              distributed.until_interrupted(feed), f"evaluating {name}", self.num_batches, "batches"
            )
          )
        )
        for name, feed in feeds.items()
      }
      return {name: as_floats(values) for name, values in trainer.eval(tracked).items()}

  def samples(self, train_state: Any, train_state_axes: Any, number: int) -> list[Sample]:
    """Predicts the first rows of each task, at most `number`; [] without data.

    It must be called after `run`, which reads all data: a cache keeps nothing that is read in part.
    """
    if self.cfg is None:
      return []
    if self._sampler is None:
      datasets = self._datasets.result()
      rows = {name: _first_rows(dataset, number) for name, dataset in datasets.items()}
      self._sampler = HeldOutSampler(rows, self.model, self.partitioner, train_state_axes)
    return self._sampler(train_state)


class PredictionEvaluation:
  """Makes predictions on held-out data, which a background thread reads, and computes their metrics.

  Metrics can be computed while training continues. They are then collected at the next evaluation,
  which is at the same step on every process.
  """

  def __init__(
    self,
    cfg: data.DatasetConfig | None,
    evaluator_cls: Callable[..., Any] | None,
    model: Any,
    partitioner: BasePartitioner,
    model_dir: str,
    verify_matching_vocabs_fn: Callable[..., None] | None,
  ):
    """Starts to read the data; None for `cfg` evaluates nothing. See `InferenceEvaluator`."""
    self.cfg = cfg

    def make_evaluator() -> InferenceEvaluator | None:
      if cfg is None:
        return None
      return InferenceEvaluator(
        cfg, evaluator_cls, model, partitioner, model_dir, verify_matching_vocabs_fn
      )

    self._evaluator = _run_in_background(make_evaluator)
    self._pending: concurrent.futures.Future[Any] | None = None

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
      MetricError: a metric failed.
    """
    pending, self._pending = self._pending, None
    return None if pending is None else plain_numbers(pending.result())

  def close(self) -> None:
    """Waits until all files are written."""
    if self.cfg is not None:
      self._evaluator.result().close()


def _first_rows(dataset: Any, number: int) -> list[Row]:
  batch = {name: np.asarray(x) for name, x in next(as_batch_iterator(dataset)).items()}
  size = min(number, *map(len, batch.values()))
  return [{name: x[row] for name, x in batch.items()} for row in range(size)]


def _run_in_background(make: Callable[[], Any]) -> concurrent.futures.Future[Any]:
  pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="evaluation-data")
  future = pool.submit(make)
  pool.shutdown(wait=False)
  return future
