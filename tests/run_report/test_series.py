"""Event files are read as TensorBoard reads them, and charts keep every extreme of a series."""

from __future__ import annotations

import collections
import contextlib
import math
import time

import numpy as np
import pytest
from run_files import STARTED, add_event_file, training_metrics
from tensorboard.compat.proto import event_pb2
from tensorboard.compat.tensorflow_stub import errors, pywrap_tensorflow
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util import tensor_util

from rosetta_t5.run_report.run_folder import decimate, drop_repeated_steps
from rosetta_t5.telemetry.event_files import Series, read_event_file


def read_with_tensorboard(path):
  """Yields the events of a file, as TensorBoard reads them where TensorFlow is absent."""
  reader = pywrap_tensorflow.PyRecordReader_New(str(path))
  with contextlib.suppress(errors.OutOfRangeError):
    while True:
      reader.GetNext()
      yield event_pb2.Event.FromString(reader.record())


@pytest.mark.parametrize("as_tensors", [True, False])
def test_scalars_equal_those_that_tensorboard_reads(tmp_path, as_tensors):
  # Steps of one, two and three bytes, and step 0, which is not written at all.
  rows = training_metrics([0, 1, 127, 128, 300, 16384, 99999])
  path = add_event_file(tmp_path, rows, as_tensors=as_tensors)
  expected = collections.defaultdict(list)
  for event in read_with_tensorboard(path):
    for value in event.summary.value:
      number = tensor_util.make_ndarray(value.tensor).item() if as_tensors else value.simple_value
      expected[value.tag].append((event.step, event.wall_time, number))
  read = read_event_file(path)
  assert set(read) == set(expected) == set(rows[0][1])
  for tag, series in read.items():
    columns = (series.steps.tolist(), series.times.tolist(), series.values.tolist())
    assert list(zip(*columns, strict=True)) == expected[tag]


def test_other_types_of_numbers_are_read(tmp_path):
  path = add_event_file(tmp_path, [(3, {"loss": 1.0})])
  event = event_pb2.Event(wall_time=STARTED, step=7)
  for tag, value in (("integer", 5), ("double", 0.1), ("histogram", [1.0, 2.0]), ("text", b"a")):
    entry = event.summary.value.add(tag=tag)
    entry.tensor.CopyFrom(tensor_util.make_tensor_proto(np.asarray(value)))
  with path.open("ab") as file:
    RecordWriter(file).write(event.SerializeToString())
  read = read_event_file(path)
  assert {tag: series.values.tolist() for tag, series in read.items()} == {
    "loss": [1.0],
    "integer": [5.0],
    "double": [0.1],
  }


def test_infinite_and_nan_values_are_kept(tmp_path):
  rows = [(step, {"loss": value}) for step, value in enumerate((math.nan, math.inf, 1.0), 1)]
  values = read_event_file(add_event_file(tmp_path, rows))["loss"].values
  assert math.isnan(values[0])
  assert values[1:].tolist() == [math.inf, 1.0]


def test_a_record_that_is_still_being_written_is_left_out(tmp_path):
  path = add_event_file(tmp_path, training_metrics([1, 2]))
  path.write_bytes(path.read_bytes()[:-7])
  read = read_event_file(path)
  assert read["loss"].steps.tolist() == [1, 2]
  assert read["memory/host_peak_gib"].steps.tolist() == [1]


def test_a_file_of_other_content_gives_no_series(tmp_path):
  for number, content in enumerate((b"", b"\0" * 4000, bytes(range(256)) * 20)):
    path = tmp_path / f"events.out.tfevents.{number}"
    path.write_bytes(content)
    assert read_event_file(path) == {}


@pytest.mark.slow
def test_a_million_scalars_take_less_than_ten_seconds(tmp_path):
  path = add_event_file(tmp_path, [(step, {"loss": 1 / step}) for step in range(1, 1001)])
  events = path.read_bytes()
  path.write_bytes(events * 1000)
  began = time.process_time()
  assert read_event_file(path)["loss"].steps.size == 1_000_000
  assert time.process_time() - began < 10


def make_series(values, steps=None):
  values = np.asarray(values, float)
  steps = np.arange(values.size) if steps is None else np.asarray(steps)
  return Series(steps, 10.0 * np.arange(values.size), values)


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 12_345, 100_000])
def test_extremes_and_both_ends_are_kept_at_their_steps(count):
  values = np.random.default_rng(count).normal(size=count)
  values[count // 3], values[count // 2] = 50.0, -40.0
  curve = decimate(make_series(values), 1000)
  assert curve.points.steps.size <= 1002
  assert {0, count // 3, count // 2, count - 1} <= set(curve.points.steps.tolist())
  assert np.array_equal(curve.points.values, values[curve.points.steps])
  assert (np.diff(curve.points.steps) > 0).all()
  assert (curve.means is None) == (count <= 1000)


def test_means_are_those_of_the_parts():
  values = np.arange(1003.0)
  means = decimate(make_series(values), 100).means
  assert means is not None
  parts = [values[n : n + 21] for n in range(0, 1003, 21)]
  assert means.values == pytest.approx([part.mean() for part in parts])
  assert means.values == pytest.approx(means.steps, abs=0.5)


def test_infinite_and_nan_values_are_reported_apart():
  curve = decimate(make_series([1.0, np.nan, 3.0, np.inf]), 1000)
  assert curve.points.values.tolist() == [1.0, 3.0]
  assert curve.nonfinite_steps.tolist() == [1, 3]
  assert decimate(make_series([np.nan] * 5000), 10).points.steps.size == 0


def test_of_steps_that_a_restart_repeats_the_later_values_count():
  kept = drop_repeated_steps(make_series([5, 4, 3, 2.5, 2, 1.5], steps=[10, 20, 30, 20, 30, 40]))
  assert kept.steps.tolist() == [10, 20, 30, 40]
  assert kept.values.tolist() == [5, 2.5, 2, 1.5]
  assert kept.times.tolist() == [0, 30, 40, 50]
