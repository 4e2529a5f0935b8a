"""MODEL_DIR: its lock, pinned checkpoints, the deletion of old ones, and the best ones by a metric."""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys

import pytest
from etils import epath
from tiny_state import Setup, Tiny

from rosetta_t5.checkpoints import (
  SaveCheckpointConfig,
  all_steps,
  create_orbax_checkpoint_manager,
  exclusive_model_dir,
  saved_items,
)
from rosetta_t5.checkpoints.run_start import LOCK_FILE, lock_model_dir
from rosetta_t5.checkpoints.saved_items import (
  Retention,
  pin_checkpoint,
  populate_metrics_for_steps,
)
from t5x.checkpoints import SaveBestCheckpointer

HOLDER = """
import sys, time
from rosetta_t5.checkpoints.run_start import lock_model_dir
with lock_model_dir(sys.argv[1]):
  print("held", flush=True)
  time.sleep(600)
"""


def test_the_lock_is_released_after_a_run_that_ends_or_fails(tmp_path):
  with lock_model_dir(tmp_path / "new"):
    assert f"process {os.getpid()} on" in (tmp_path / "new" / LOCK_FILE).read_text()
  with pytest.raises(KeyError), lock_model_dir(tmp_path / "new"):
    raise KeyError
  with lock_model_dir(tmp_path / "new"):
    pass


@pytest.mark.slow
def test_the_error_names_the_other_run_and_a_killed_run_holds_no_lock(tmp_path):
  command = [sys.executable, "-c", HOLDER, str(tmp_path)]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    try:
      assert process.stdout.readline() == "held\n"
      in_use = pytest.raises(ValueError, match="is in use by another training run")
      with in_use as refused, lock_model_dir(tmp_path):
        pass
    finally:
      process.kill()
  assert f"MODEL_DIR {tmp_path} is in use by another training run: " in str(refused.value)
  assert f"process {process.pid} on {os.uname().nodename}, since 20" in str(refused.value)
  assert "--gin.MODEL_DIR" in str(refused.value)
  assert (tmp_path / LOCK_FILE).exists()
  with lock_model_dir(tmp_path):
    pass


def test_one_process_cannot_lock_a_folder_twice(tmp_path):
  in_use = pytest.raises(ValueError, match="is in use by another training run")
  with lock_model_dir(tmp_path), in_use, lock_model_dir(tmp_path):
    pass


def test_a_folder_that_cannot_be_written_is_an_error_before_the_run_starts(tmp_path):
  (tmp_path / "file").write_text("")

  @exclusive_model_dir
  def run(*, model_dir: str) -> None:
    pytest.fail("ran")

  with pytest.raises(
    ValueError, match=r"MODEL_DIR .*file/run cannot be written to .*Not a directory"
  ):
    run(model_dir=str(tmp_path / "file/run"))


def make(folder):
  (folder / "dataset").mkdir(parents=True)
  (folder / "dataset/train_ds-000-of-001").write_text("1")
  (folder / "train_ds-000-of-001.index").write_text("1")
  (folder / "checkpoint").write_text("x")
  return folder


def test_a_pinned_checkpoint_is_not_removed_until_it_is_unpinned(tmp_path):
  folder = make(tmp_path / "checkpoint_1")
  saved_items.pin_checkpoint(folder)
  assert saved_items.is_pinned_checkpoint(folder)
  saved_items.remove_checkpoint_dir(folder)
  saved_items.remove_dataset_checkpoint(folder, "train_ds")
  assert (folder / "dataset/train_ds-000-of-001").exists()
  saved_items.unpin_checkpoint(folder)
  saved_items.remove_checkpoint_dir(folder)
  assert not folder.exists()
  saved_items.remove_checkpoint_dir(folder)


def test_only_dataset_positions_are_removed_from_either_layout(tmp_path):
  folder = make(tmp_path / "checkpoint_1")
  saved_items.remove_dataset_checkpoint(folder, "train_ds")
  assert sorted(path.name for path in folder.rglob("*")) == ["checkpoint", "dataset"]


def make_checkpoint(folder: pathlib.Path) -> None:
  folder.mkdir(parents=True)
  for name in ("checkpoint", "target.wi"):
    (folder / name).write_text(name)


def test_a_run_deletes_its_old_checkpoints_and_those_that_a_killed_run_left(tmp_path):
  make_checkpoint(tmp_path / ".removed/checkpoint_1")
  make_checkpoint(tmp_path / "elsewhere")
  (tmp_path / ".removed/checkpoint_2").symlink_to(tmp_path / "elsewhere")
  setup = Setup(module=Tiny(), num_partitions=1)
  manager = setup.manager(tmp_path, keep=1)
  for step in (2, 3):
    manager.save(setup.state(step=step))
  manager.close()
  assert all_steps(tmp_path) == [3]
  assert os.listdir(tmp_path / ".removed") == []
  assert os.listdir(tmp_path / "elsewhere")


def test_metric_values_are_read_by_run_and_tag(tmp_path, write_scalars):
  write_scalars(tmp_path / "train", "accuracy", {10: 0.5, 20: 0.25})
  write_scalars(tmp_path / "inference_eval/cola", "eval/accuracy", {20: 0.75})
  assert populate_metrics_for_steps(tmp_path, "train/accuracy", [20, 30]) == {20: 0.25}
  assert populate_metrics_for_steps(tmp_path, "inference_eval/cola/eval/accuracy", [20]) == {
    20: 0.75
  }
  assert populate_metrics_for_steps(tmp_path, "train/loss", [10]) == {}
  assert populate_metrics_for_steps(tmp_path, "absent/loss", [10]) == {}


def test_metric_values_are_read_without_tensorflow(tmp_path, write_scalars):
  write_scalars(tmp_path / "train", "accuracy", {10: 0.5})
  program = (
    "import sys; from rosetta_t5.checkpoints.saved_items import populate_metrics_for_steps\n"
    f"print(populate_metrics_for_steps({str(tmp_path)!r}, 'train/accuracy', [10]))\n"
    "print('tensorflow' in sys.modules)"
  )
  out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
  assert out.stdout.splitlines() == ["{10: 0.5}", "False"]


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
  retention = Retention(tmp_path, keep=1, metric="train/x", mode=mode, keep_unknown=without)
  steps = [1, 2, 3, 4, 5, 6]  # 5 has no metric, 6 is the latest
  assert sorted(set(steps) - retention.steps_to_delete(steps)) == kept


def test_nan_is_worst_and_the_oldest_unknown_checkpoints_are_deleted_first(tmp_path, write_scalars):
  write_scalars(tmp_path / "train", "x", {1: float("nan"), 2: 0.0})
  keeps = Retention(tmp_path, keep=1, metric="train/x")
  assert keeps.steps_to_delete([1, 2, 3]) == {1}
  nothing_known = Retention(tmp_path, keep=2, metric="train/y", keep_unknown=False)
  assert nothing_known.steps_to_delete([1, 2, 3, 4]) == {1}
  kept_all = Retention(tmp_path, keep=1, metric="train/y")
  assert kept_all.steps_to_delete([1, 2, 3, 4]) == set()


def test_forced_pinned_and_protected_steps_are_kept_and_do_not_count(tmp_path, write_scalars):
  write_scalars(tmp_path / "train", "x", {step: 10.0 - step for step in range(1, 8)})
  for step in range(1, 8):
    (tmp_path / f"checkpoint_{step}").mkdir()
  pin_checkpoint(tmp_path / "checkpoint_5")
  retention = Retention(
    tmp_path, 1, 3, "train/x", protected={epath.Path(tmp_path / "checkpoint_4")}
  )
  assert retention.steps_to_delete(list(range(1, 8))) == {2}


def test_invalid_metric_names_and_modes_are_errors():
  with pytest.raises(ValueError, match=r"must be RUN/TAG, .* got 'accuracy'"):
    Retention("run", metric="accuracy")
  with pytest.raises(ValueError, match=r"metric_mode must be one of 'max', 'min', got 'best'"):
    Retention("run", metric="train/accuracy", mode="best")


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
  manager.begin_run({})
  for step in (1, 2, 3, 4):
    manager.save(setup.state(step=step))
  manager.close()
  assert all_steps(tmp_path) == [1, 4]
  assert saved_items.best_checkpoint(tmp_path) == (tmp_path / "checkpoint_1", "loss 1")


def test_a_metric_without_any_value_is_reported(tmp_path, write_scalars, caplog):
  write_scalars(tmp_path / "train", "accuracy", {1: 1.0})
  retention = Retention(tmp_path, keep=1, metric="train/acuracy")
  assert retention.steps_to_delete([1, 2, 3]) == set()
  assert "no checkpoint has a value of 'train/acuracy'" in caplog.text
