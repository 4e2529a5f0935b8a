"""T5X's `metrics`: sums, averages per step and rates per second that merge over steps and hosts."""

from rosetta_t5.telemetry.metrics import (
  AveragePerStep,
  MetricsMap,
  Scalar,
  Step,
  StepsPerTime,
  Sum,
  Time,
  TimeRate,
  create_metrics_dict,
  is_metric_obj,
  is_time_metric,
  set_step_metrics_num_steps,
  set_time_metrics_duration,
  shape_obj_to_defined_obj,
)
