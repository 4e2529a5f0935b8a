"""Metrics that a step returns and a run merges: sums, averages per step, rates per second (T5X).

A compiled step knows neither the time nor the number of steps. `set_time_metrics_duration` and
`set_step_metrics_num_steps` set them outside the step, before `compute()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from clu import metrics as clu_metrics
from flax import struct

Scalar = int | float | np.number | np.ndarray | jax.Array


@struct.dataclass
class Sum(clu_metrics.Metric):
  """The sum of all values.

  Attributes:
    total: the sum.
  """

  total: Any

  @classmethod
  def from_model_output(cls, values: Scalar, **_: Any) -> Sum:
    """Returns the metric of an array of any shape or of a number."""
    return cls(total=jnp.sum(jnp.asarray(values)))

  def merge(self, other: Sum) -> Sum:
    """Returns the merged metric."""
    return type(self)(total=self.total + other.total)

  def compute(self) -> Scalar:
    """Returns the sum."""
    return self.total


@struct.dataclass
class Step(clu_metrics.Metric):
  """The number of steps, and the base class of metrics that are averaged per step.

  The number is set outside the step (`replace_steps`): microbatches would be counted as steps.

  Attributes:
    steps: the number; None if it is not set yet.
  """

  steps: Any = 1

  def replace_steps(self, steps: Scalar) -> Step:
    """Returns the metric with this number of steps."""
    return self.replace(steps=steps)

  def compute(self) -> Scalar:
    """Returns the number of steps; raises ValueError if it is not set."""
    if self.steps is None:
      raise ValueError(f"{type(self).__name__} has no steps: call replace_steps before compute")
    return self.steps


@struct.dataclass
class AveragePerStep(Step):
  """The sum of all values, divided by the number of steps.

  Attributes:
    total: the sum.
  """

  total: Any = None

  @classmethod
  def from_model_output(cls, values: Scalar, steps: int | None = 1, **_: Any) -> AveragePerStep:
    """Returns the metric of an array of any shape or of a number."""
    return cls(total=jnp.sum(jnp.asarray(values)), steps=steps)

  def merge(self, other: AveragePerStep) -> AveragePerStep:
    """Returns the merged metric."""
    return type(self)(total=self.total + other.total, steps=self.steps + other.steps)

  def compute(self) -> Scalar:
    """Returns the average; raises ValueError if the number of steps is not set."""
    return self.total / super().compute()


@struct.dataclass
class Time(clu_metrics.Metric):
  """A duration in seconds, and the base class of rates per second.

  The duration is set outside the step (`replace_duration`): a compiled step cannot read the clock.

  Attributes:
    duration: the seconds; None if they are not set yet.
  """

  duration: Any = None

  def merge(self, other: Time) -> Time:
    """Returns this metric, because the duration is set after merging."""
    return self

  def replace_duration(self, duration: Scalar) -> Time:
    """Returns the metric with this duration in seconds."""
    return self.replace(duration=duration)

  def compute(self) -> Scalar:
    """Returns the seconds; raises ValueError if they are not set."""
    if self.duration is None:
      raise ValueError(f"{type(self).__name__} has no duration: call replace_duration first")
    return self.duration


@struct.dataclass
class TimeRate(Time):
  """The sum of all values, per second.

  Attributes:
    numerator: the sum.
  """

  numerator: Any = None

  @classmethod
  def from_model_output(cls, numerator: Scalar, **_: Any) -> TimeRate:
    """Returns the metric of one number."""
    return cls(numerator=numerator)

  def merge(self, other: TimeRate) -> TimeRate:
    """Returns the merged metric; raises ValueError if a duration is already set."""
    if self.duration is not None or other.duration is not None:
      raise ValueError("TimeRate cannot be merged after replace_duration(): merge first")
    return type(self)(numerator=self.numerator + other.numerator)

  def compute(self) -> Scalar:
    """Returns the sum per second."""
    return self.numerator / super().compute()


@struct.dataclass
class StepsPerTime(Step, Time):
  """Steps per second."""

  @classmethod
  def from_model_output(cls, steps: int | None = 1, **_: Any) -> StepsPerTime:
    """Returns the metric of a number of steps."""
    return cls(steps=steps)

  def merge(self, other: StepsPerTime) -> StepsPerTime:
    """Returns the merged metric."""
    return type(self)(steps=self.steps + other.steps)

  def compute(self) -> Scalar:
    """Returns the steps per second."""
    return Step.compute(self) / Time.compute(self)


def is_metric_obj(obj: Any) -> bool:
  """Returns whether `obj` is a metric."""
  return isinstance(obj, clu_metrics.Metric)


def is_time_metric(obj: Any) -> bool:
  """Returns whether `obj` is a metric that needs a duration."""
  return isinstance(obj, Time)


def create_metrics_dict(float_metrics_dict: Mapping[str, Scalar]) -> dict[str, Sum]:
  """Returns each number as a `Sum`."""
  return {name: Sum(value) for name, value in float_metrics_dict.items()}


def shape_obj_to_defined_obj(obj: clu_metrics.Metric) -> clu_metrics.Metric:
  """Replaces the shapes in a metric from `jax.eval_shape` with zeros."""
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if hasattr(x, "shape") else x, obj)


def set_time_metrics_duration(metrics: Any, duration: Scalar) -> Any:
  """Sets `duration` (in seconds) in those metrics of a tree that need one."""
  return _map_metrics(Time, lambda metric: metric.replace_duration(duration), metrics)


def set_step_metrics_num_steps(metrics: Any, num_steps: Scalar) -> Any:
  """Sets the number of steps in those metrics of a tree that count steps."""
  return _map_metrics(Step, lambda metric: metric.replace_steps(num_steps), metrics)


def _map_metrics(kind: type, fn: Callable[[Any], Any], metrics: Any) -> Any:
  return jax.tree.map(lambda m: fn(m) if isinstance(m, kind) else m, metrics, is_leaf=is_metric_obj)
