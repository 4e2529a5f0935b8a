"""A chart shows fewer points than a run has written, but every extreme."""

from __future__ import annotations

import numpy as np
import pytest

from rosetta_t5.run_report.decimation import decimate, without_repeated_steps
from rosetta_t5.run_report.event_files import Series


def series(values, steps=None):
  values = np.asarray(values, float)
  steps = np.arange(values.size) if steps is None else np.asarray(steps)
  return Series(steps, 10.0 * np.arange(values.size), values)


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 12_345, 100_000])
def test_extremes_and_both_ends_are_kept_at_their_steps(count):
  values = np.random.default_rng(count).normal(size=count)
  values[count // 3], values[count // 2] = 50.0, -40.0
  curve = decimate(series(values), 1000)
  assert curve.points.steps.size <= 1002
  assert {0, count // 3, count // 2, count - 1} <= set(curve.points.steps.tolist())
  assert np.array_equal(curve.points.values, values[curve.points.steps])
  assert (np.diff(curve.points.steps) > 0).all()
  assert (curve.means is None) == (count <= 1000)


def test_means_are_those_of_the_parts():
  values = np.arange(1003.0)
  means = decimate(series(values), 100).means
  assert means is not None
  parts = [values[n : n + 21] for n in range(0, 1003, 21)]
  assert means.values == pytest.approx([part.mean() for part in parts])
  assert means.values == pytest.approx(means.steps, abs=0.5)


def test_infinite_and_nan_values_are_reported_apart():
  curve = decimate(series([1.0, np.nan, 3.0, np.inf]), 1000)
  assert curve.points.values.tolist() == [1.0, 3.0]
  assert curve.nonfinite_steps.tolist() == [1, 3]
  assert decimate(series([np.nan] * 5000), 10).points.steps.size == 0


def test_of_steps_that_a_restart_repeats_the_later_values_count():
  kept = without_repeated_steps(series([5, 4, 3, 2.5, 2, 1.5], steps=[10, 20, 30, 20, 30, 40]))
  assert kept.steps.tolist() == [10, 20, 30, 40]
  assert kept.values.tolist() == [5, 2.5, 2, 1.5]
  assert kept.times.tolist() == [0, 30, 40, 50]
