"""Event files are read as TensorBoard reads them."""

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

from rosetta_t5.run_report.event_files import read_event_file


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
  assert read.problem is None
  assert read.start_time == STARTED
  assert set(read.series) == set(expected) == set(rows[0][1])
  for tag, series in read.series.items():
    columns = (series.steps.tolist(), series.times.tolist(), series.values.tolist())
    assert list(zip(*columns, strict=True)) == expected[tag]


def test_texts_and_other_types_of_numbers_are_read(tmp_path):
  path = add_event_file(tmp_path, [(3, {"loss": 1.0})], text="    a.b = 1")
  event = event_pb2.Event(wall_time=STARTED, step=7)
  for tag, value in (("integer", 5), ("double", 0.1), ("histogram", [1.0, 2.0])):
    kind = np.int64 if tag == "integer" else np.float64
    entry = event.summary.value.add(tag=tag)
    entry.tensor.CopyFrom(tensor_util.make_tensor_proto(np.asarray(value, kind)))
  with path.open("ab") as file:
    RecordWriter(file).write(event.SerializeToString())
  read = read_event_file(path)
  assert read.texts == {"config": [(0, "    a.b = 1")]}
  assert set(read.series) == {"loss", "integer", "double"}
  assert read.series["integer"].values.tolist() == [5.0]
  assert read.series["double"].values.tolist() == [0.1]


def test_infinite_and_nan_values_are_kept(tmp_path):
  rows = [(step, {"loss": value}) for step, value in enumerate((math.nan, math.inf, 1.0), 1)]
  values = read_event_file(add_event_file(tmp_path, rows)).series["loss"].values
  assert math.isnan(values[0])
  assert values[1:].tolist() == [math.inf, 1.0]


def test_a_record_that_is_still_being_written_is_left_out(tmp_path):
  path = add_event_file(tmp_path, training_metrics([1, 2]))
  path.write_bytes(path.read_bytes()[:-7])
  read = read_event_file(path)
  assert read.series["loss"].steps.tolist() == [1, 2]
  assert read.series["memory/host_peak_gib"].steps.tolist() == [1]
  assert "bytes are an incomplete record" in read.problem


def test_a_file_of_other_content_gives_no_series(tmp_path):
  path = tmp_path / "events.out.tfevents.1"
  for content in (b"", b"\0" * 4000, bytes(range(256)) * 20):
    path.write_bytes(content)
    assert not read_event_file(path).series


@pytest.mark.slow
def test_a_million_scalars_take_less_than_ten_seconds(tmp_path):
  path = add_event_file(tmp_path, [(step, {"loss": 1 / step}) for step in range(1, 1001)])
  events = path.read_bytes()
  path.write_bytes(events * 1000)
  began = time.process_time()
  assert read_event_file(path).series["loss"].steps.size == 1_000_000
  assert time.process_time() - began < 10
