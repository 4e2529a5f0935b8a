"""Retention of checkpoints by the values of a metric in TensorBoard's files."""

from __future__ import annotations

import functools

import pytest

from rosetta_t5.checkpoints import SaveCheckpointConfig, all_steps, create_orbax_checkpoint_manager
from rosetta_t5.checkpoints.model_dir import (
  BestMetric,
  Retention,
  pin_checkpoint,
  populate_metrics_for_steps,
)
from rosetta_t5.compat.checkpoints.legacy_checkpointer import SaveBestCheckpointer


def test_metric_values_are_read_by_run_and_tag(tmp_path, write_scalars):
  write_scalars(tmp_path / "train", "accuracy", {10: 0.5, 20: 0.25})
  write_scalars(tmp_path / "inference_eval/cola", "eval/accuracy", {20: 0.75})
  assert populate_metrics_for_steps(tmp_path, "train/accuracy", [20, 30]) == {20: 0.25}
  assert populate_metrics_for_steps(tmp_path, "inference_eval/cola/eval/accuracy", [20]) == {
    20: 0.75
  }
  assert populate_metrics_for_steps(tmp_path, "train/loss", [10]) == {}
  assert populate_metrics_for_steps(tmp_path, "absent/loss", [10]) == {}


def test_an_incomplete_event_file_is_read_up_to_its_last_record(tmp_path, write_scalars):
  write_scalars(tmp_path / "train", "accuracy", {1: 1.0, 2: 2.0})
  (file,) = (tmp_path / "train").iterdir()
  file.write_bytes(file.read_bytes()[:-3])
  assert populate_metrics_for_steps(tmp_path, "train/accuracy", [1, 2])[1] == 1.0


@pytest.mark.parametrize(
  ("mode", "without", "kept"),
  [("max", True, [2, 5, 6]), ("min", True, [1, 5, 6]), ("max", False, [2, 6])],
)
def test_the_best_and_the_latest_checkpoint_are_kept(tmp_path, write_scalars, mode, without, kept):
  write_scalars(tmp_path / "train", "x", {1: 1.0, 2: 4.0, 3: 2.0, 4: 3.0})
  retention = Retention(tmp_path, keep=1, best=BestMetric("train/x", mode, without))
  steps = [1, 2, 3, 4, 5, 6]  # 5 has no metric, 6 is the latest
  assert sorted(set(steps) - retention.steps_to_delete(steps)) == kept


def test_nan_is_worst_and_the_oldest_unknown_checkpoints_are_deleted_first(tmp_path, write_scalars):
  write_scalars(tmp_path / "train", "x", {1: float("nan"), 2: 0.0})
  keeps = Retention(tmp_path, keep=1, best=BestMetric("train/x", "max"))
  assert keeps.steps_to_delete([1, 2, 3]) == {1}
  nothing_known = Retention(tmp_path, keep=2, best=BestMetric("train/y", "max", False))
  assert nothing_known.steps_to_delete([1, 2, 3, 4]) == {1}
  kept_all = Retention(tmp_path, keep=1, best=BestMetric("train/y", "max", True))
  assert kept_all.steps_to_delete([1, 2, 3, 4]) == set()


def test_forced_pinned_and_protected_steps_are_kept_and_do_not_count(tmp_path, write_scalars):
  write_scalars(tmp_path / "train", "x", {step: 10.0 - step for step in range(1, 8)})
  for step in range(1, 8):
    (tmp_path / f"checkpoint_{step}").mkdir()
  pin_checkpoint(tmp_path / "checkpoint_5")
  retention = Retention(tmp_path, 1, 3, BestMetric("train/x"), protected={4})
  assert retention.steps_to_delete(list(range(1, 8))) == {2}


def test_invalid_metric_names_and_modes_are_errors():
  with pytest.raises(ValueError, match=r"must be RUN/TAG, got 'accuracy'"):
    BestMetric("accuracy")
  with pytest.raises(ValueError, match=r"metric_mode must be 'max' or 'min', got 'best'"):
    BestMetric("train/accuracy", "best")


def test_bindings_of_save_best_checkpointer_configure_the_manager(setup, tmp_path, write_scalars):
  """T5X users bind SaveBestCheckpointer; the checkpoints are Orbax's."""
  write_scalars(tmp_path / "train", "loss", {1: 1.0, 2: 3.0, 3: 2.0})
  best = functools.partial(
    SaveBestCheckpointer, metric_name_to_monitor="train/loss", metric_mode="min"
  )
  manager = create_orbax_checkpoint_manager(
    save_cfg=SaveCheckpointConfig(period=1, keep=1, checkpointer_cls=best),
    train_state=setup.initializer.global_train_state_shape,
    partitioner=setup.partitioner,
    model_dir=tmp_path,
  )
  for step in (1, 2, 3, 4):
    manager.save(setup.state(step=step))
  manager.close()
  assert all_steps(tmp_path) == [1, 4]


def test_a_metric_without_any_value_is_reported_once(tmp_path, write_scalars, caplog):
  write_scalars(tmp_path / "train", "accuracy", {1: 1.0})
  retention = Retention(tmp_path, keep=1, best=BestMetric("train/acuracy"))
  for latest in (3, 4):
    assert retention.steps_to_delete(range(1, latest + 1)) == set()
  assert caplog.text.count("have no value of 'train/acuracy'") == 1
