"""Reduces a series to as many points as a screen can show, and keeps its extremes."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int

from rosetta_t5.run_report.event_files import Series


@dataclasses.dataclass(frozen=True)
class Curve:
  """What a chart shows of a series.

  Attributes:
    points: all finite values, or the smallest and largest of each of n equal parts, in their order.
    means: the mean of each part, at its middle; None if no value was left out.
    nonfinite_steps: the steps whose value is infinite or NaN.
  """

  points: Series
  means: Series | None
  nonfinite_steps: Int[np.ndarray, " k"]


def without_repeated_steps(series: Series) -> Series:
  """Returns a series in the order of its steps, with the value that was written last for each.

  A run that restarts repeats the steps after its last checkpoint.
  """
  steps, from_end = np.unique(series.steps[::-1], return_index=True)
  kept = series.steps.size - 1 - from_end
  return Series(steps, series.times[kept], series.values[kept])


def decimate(series: Series, max_points: int) -> Curve:
  """Reduces a series without repeated steps to about `max_points` points."""
  finite = np.isfinite(series.values)
  nonfinite_steps, series = series.steps[~finite], _take(series, finite)
  count = series.steps.size
  if count <= max_points:
    return Curve(series, None, nonfinite_steps)
  per_part = -(-count // max(1, max_points // 2))
  # The last part is filled up with the last value.
  padded = np.pad(series.values, (0, -count % per_part), mode="edge").reshape(-1, per_part)
  firsts = np.arange(0, count, per_part)
  extremes = np.concatenate([padded.argmin(axis=1), padded.argmax(axis=1)])
  positions = np.minimum(extremes + np.tile(firsts, 2), count - 1)
  points = _take(series, np.unique([0, *positions, count - 1]))
  sizes = np.diff(firsts, append=count)
  means = np.add.reduceat(series.values, firsts) / sizes
  middles = firsts + sizes // 2
  return Curve(points, Series(series.steps[middles], series.times[middles], means), nonfinite_steps)


def _take(series: Series, selection: np.ndarray) -> Series:
  return Series(series.steps[selection], series.times[selection], series.values[selection])
