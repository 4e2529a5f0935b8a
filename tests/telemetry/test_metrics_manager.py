"""Metrics become values and TensorBoard files without the loop waiting for them."""

from __future__ import annotations

import concurrent.futures
import errno
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from clu import metrics as clu_metrics
from clu import values as clu_values

from rosetta_t5.telemetry import metrics, metrics_manager
from rosetta_t5.telemetry.metrics_manager import MetricsManager, as_floats


class Recorder:
  """A writer that records the scalars it gets."""

  def __init__(self):
    self.scalars = []
    self.flushed = self.closed = 0

  def write_scalars(self, step, scalars):
    self.scalars.append((step, dict(scalars)))

  def flush(self):
    self.flushed += 1

  def close(self):
    self.closed += 1


@pytest.fixture
def recorder():
  return Recorder()


@pytest.fixture
def manager(tmp_path, recorder, monkeypatch):
  monkeypatch.setattr(metrics_manager, "make_tensorboard_writer", lambda name, folder: recorder)
  return MetricsManager("train", tmp_path)


def test_values_are_means_per_step_and_rates_per_second(manager, recorder):
  started = time.monotonic()
  manager.start_duration_timer(block_on=jnp.zeros(()))
  time.sleep(0.2)
  summed = {
    "loss": metrics.AveragePerStep.from_model_output(jnp.array([6.0, 2.0])),
    "timing/seqs_per_second": metrics.TimeRate.from_model_output(numerator=16),
    "timing/steps_per_second": metrics.StepsPerTime(),
    "accuracy": clu_metrics.Average(total=jnp.array(3.0), count=jnp.array(4.0)),
  }
  values = manager.write_metrics_summary(summed, 20, num_steps=4).result()
  took = time.monotonic() - started
  floats = as_floats(values)
  assert isinstance(values["loss"], clu_values.Scalar)
  assert (floats["loss"], floats["accuracy"]) == (2.0, 0.75)
  # The clock starts when the array is computed, shortly after the call.
  assert 16 / took < floats["timing/seqs_per_second"] < 16 / 0.15
  assert floats["timing/steps_per_second"] * 4 == pytest.approx(floats["timing/seqs_per_second"])
  manager.close()
  assert recorder.scalars == [(20, floats)]


def test_clock_can_wait_for_an_array_that_is_donated_later(manager):
  step = jnp.zeros((), jnp.int32)
  manager.start_duration_timer(block_on=step)
  manager.start_duration_timer(block_on={"params": (kernel := jnp.ones(8)), "step": step})
  jax.jit(lambda s, k: (s + 1, k + 1), donate_argnums=(0, 1))(step, kernel)
  time_metric = {"seconds": metrics.Time()}
  assert as_floats(manager.write_metrics_summary(time_metric, 1, 1).result())["seconds"] >= 0
  manager.close()


def test_scalars_are_written_in_order(manager, recorder):
  manager.write_scalar("a", jnp.float32(1.0), 1)
  manager.write_scalars(2, {"a": 2, "b": 3.0})
  manager.flush()
  assert recorder.scalars == [(1, {"a": 1.0}), (2, {"a": 2.0, "b": 3.0})]
  manager.close()
  assert recorder.closed == 1


def test_a_write_that_fails_is_logged_and_the_next_one_opens_the_writer_again(
  manager, recorder, caplog
):
  def write_scalars(step, scalars):
    if step == 2:
      raise OSError(errno.ENOSPC, "disk full")
    recorder.scalars.append(step)

  recorder.write_scalars = write_scalars
  for step in range(1, 4):
    manager.write_scalar("a", 1.0, step)
  manager.close()
  assert recorder.scalars == [1, 3]
  assert "metrics cannot be written: [Errno 28] disk full" in caplog.text


def test_a_metric_that_cannot_be_computed_is_raised_by_a_later_call(manager):
  failed = manager.write_metrics_summary({"loss": "no metric"}, 1, 1)
  concurrent.futures.wait([failed])
  with pytest.raises(AttributeError):
    manager.write_scalar("a", 1.0, 2)


def test_without_a_folder_values_are_computed_and_nothing_is_written():
  manager = MetricsManager("train")
  manager.write_scalar("a", 1.0, 1)
  summary = {"loss": metrics.Sum(jnp.float32(3.0))}
  assert as_floats(manager.write_metrics_summary(summary, 1, 1).result()) == {"loss": 3.0}
  manager.summary_writer.write_texts(0, {"config": "x"})
  manager.close()


def test_other_processes_write_nothing(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  manager = MetricsManager("train", tmp_path)
  manager.write_scalar("a", 1.0, 1)
  manager.close()
  assert list(tmp_path.iterdir()) == []


def test_caller_waits_neither_for_the_devices_nor_for_the_writer(manager, recorder):
  def slow(step, scalars):
    time.sleep(0.5)

  recorder.write_scalars = slow
  started = time.monotonic()
  manager.start_duration_timer()
  for step in range(3):
    manager.write_metrics_summary({"loss": metrics.Sum(jnp.float32(1.0))}, step, 1)
  assert time.monotonic() - started < 1.0
  manager.close()
  assert time.monotonic() - started > 1.4


def test_tensorboard_files_hold_the_scalars(tmp_path):
  manager = MetricsManager("training_eval/pile", tmp_path)
  manager.write_scalar("loss", 2.5, 7)
  manager.close()
  import tensorflow as tf

  [path] = (tmp_path / "training_eval/pile").glob("events*")
  records = tf.compat.v1.train.summary_iterator(str(path))
  [event] = [event for event in records if event.summary.value]
  [value] = event.summary.value
  assert (event.step, value.tag, float(tf.make_ndarray(value.tensor))) == (7, "loss", 2.5)


@pytest.mark.slow
def test_importing_metrics_and_building_a_manager_do_not_import_tensorflow(tmp_path):
  code = f"""
import sys
import rosetta_t5.telemetry.metrics
from rosetta_t5.telemetry.metrics_manager import MetricsManager
MetricsManager("train", {str(tmp_path)!r}).start_duration_timer()
print("tensorflow" in sys.modules)
"""
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
  assert done.stdout.strip() == "False", done.stderr


def test_calls_of_the_summary_writer_keep_their_order(tmp_path):
  manager = MetricsManager("train", tmp_path)
  for step in range(200):
    manager.write_scalar("a", float(step), step)
    manager.summary_writer.write_texts(step, {"config": "x"})
    manager.summary_writer.flush()
  manager.close()
  from tensorboard.backend.event_processing import event_file_loader

  [path] = (tmp_path / "train").glob("events*")
  events = event_file_loader.EventFileLoader(str(path)).Load()
  tags = [value.tag for event in events for value in event.summary.value]
  assert tags == ["a", "config"] * 200
