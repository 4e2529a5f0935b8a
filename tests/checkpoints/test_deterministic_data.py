"""Data that continues at the step of MODEL_DIR's last checkpoint without a stored position."""

from __future__ import annotations

import itertools
import pathlib

import pytest
from tiny_tasks import PAIRS, add_task

from rosetta_t5.data import DatasetConfig
from rosetta_t5.data.tensorflow_import import import_seqio
from t5x.utils import get_deterministic_dataset

TASK = "deterministic_data_test"
CONFIG = DatasetConfig(
  TASK, {"inputs": 16, "targets": 16}, "train", batch_size=2, shuffle=True, seed=3
)


@pytest.fixture(scope="module", autouse=True)
def task():
  add_task(TASK)
  yield
  import_seqio().TaskRegistry.remove(TASK)


def targets(count: int, **arguments) -> list[list[list[int]]]:
  converter = import_seqio().EncDecFeatureConverter
  dataset = get_deterministic_dataset(CONFIG, 0, 1, converter, **arguments)
  return [
    batch["decoder_target_tokens"].tolist()
    for batch in itertools.islice(dataset.as_numpy_iterator(), count)
  ]


def with_checkpoints(folder: pathlib.Path, *steps: int) -> pathlib.Path:
  for step in steps:
    (folder / f"checkpoint_{step}").mkdir(parents=True)
  return folder


def test_a_restarted_run_gets_the_batch_of_its_next_step(tmp_path):
  every = targets(12, model_dir=tmp_path / "new", start_step=0)
  assert len({str(batch) for batch in every[: len(PAIRS) // 2]}) == len(PAIRS) // 2
  old = with_checkpoints(tmp_path / "old", 2, 7)
  assert targets(5, model_dir=old, start_step=0) == every[7:]
  assert targets(5, model_dir=old, start_step=4) == every[3:8]


def test_a_run_can_start_the_data_from_its_beginning(tmp_path):
  old = with_checkpoints(tmp_path, 3)
  first = targets(1, model_dir=old, continue_from_last_checkpoint=False)
  assert first == targets(1) != targets(1, model_dir=old)


def test_a_checkpoint_before_the_start_step_is_an_error(tmp_path):
  old = with_checkpoints(tmp_path, 3)
  with pytest.raises(
    ValueError, match=r"start_step must be at most 3, the last checkpoint's, got 1000"
  ):
    targets(1, model_dir=old, start_step=1000)
