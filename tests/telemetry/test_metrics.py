"""What metrics compute and merge, and the errors of incomplete metrics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from rosetta_t5.telemetry import metrics


def test_sum_adds_over_arrays_and_steps():
  total = metrics.Sum.from_model_output(jnp.array([1.0, 2.0])).merge(
    metrics.Sum.from_model_output(3.5)
  )
  assert total.compute() == 6.5


def test_average_per_step_divides_by_the_steps_of_both():
  average = metrics.AveragePerStep.from_model_output(jnp.array([[1.0, 2.0]])).merge(
    metrics.AveragePerStep.from_model_output(9.0, steps=2)
  )
  assert average.compute() == 4.0
  assert average.replace_steps(6).compute() == 2.0


def test_rates_divide_by_the_duration():
  batch = {
    "tokens": metrics.TimeRate.from_model_output(numerator=30.0),
    "steps": metrics.StepsPerTime.from_model_output(steps=4),
    "seconds": metrics.Time(),
    "loss": metrics.Sum(1.0),
  }
  two = {name: metric.merge(metric) for name, metric in batch.items()}
  timed = metrics.set_time_metrics_duration(two, 5.0)
  values = {name: metric.compute() for name, metric in timed.items()}
  assert values == {"tokens": 12.0, "steps": 1.6, "seconds": 5.0, "loss": 2.0}


def test_number_of_steps_is_set_in_metrics_per_step():
  batch = {
    "loss": metrics.AveragePerStep.from_model_output(12.0),
    "rate": metrics.StepsPerTime.from_model_output(),
    "sum": metrics.Sum(7.0),
  }
  counted = metrics.set_step_metrics_num_steps(batch, 3)
  assert counted["loss"].compute() == 4.0
  assert counted["rate"].replace_duration(1.5).compute() == 2.0
  assert counted["sum"].compute() == 7.0


@pytest.mark.parametrize(
  ("metric", "message"),
  [
    (metrics.Time(), r"Time has no duration: call replace_duration"),
    (metrics.TimeRate.from_model_output(1.0), r"TimeRate has no duration"),
    (metrics.Step(steps=None), r"Step has no steps: call replace_steps"),
  ],
)
def test_error_names_what_was_not_set(metric, message):
  with pytest.raises(ValueError, match=message):
    metric.compute()


def test_rates_do_not_merge_after_their_duration_is_set():
  rate = metrics.TimeRate.from_model_output(1.0)
  with pytest.raises(ValueError, match="merge first"):
    rate.merge(rate.replace_duration(2.0))


def test_metrics_pass_through_jit_and_start_from_their_shapes():
  def step(x):
    return {"loss": metrics.AveragePerStep.from_model_output(x), "n": metrics.Sum(jnp.sum(x))}

  shapes = jax.eval_shape(step, jnp.ones(3))
  zeros = {name: metrics.shape_obj_to_defined_obj(shape) for name, shape in shapes.items()}
  assert zeros["loss"].total == 0
  out = jax.jit(step)(jnp.ones(3))
  merged = {name: zeros[name].merge(out[name]) for name in out}
  assert merged["loss"].compute() == 3.0
  assert merged["n"].compute() == 3.0


def test_numbers_become_sums():
  made = metrics.create_metrics_dict({"a": 1.0})
  assert metrics.is_metric_obj(made["a"])
  assert not metrics.is_time_metric(made["a"])
  assert metrics.is_time_metric(metrics.TimeRate())
  assert made["a"].merge(made["a"]).compute() == 2.0
