"""Checkpoints of several processes, which are written together and restored on any number."""

from __future__ import annotations

import hashlib
import pathlib
import shutil
import socket
import subprocess

import numpy as np
import pytest
from forked_python import python
from tiny_state import Tiny, write_older_layout

from rosetta_t5.checkpoints import all_steps, read_run_facts
from rosetta_t5.checkpoints.run_start import lock_model_dir


def two_processes(folder: pathlib.Path, what: str) -> tuple[list[int], list[str]]:
  """Runs two_processes.py and returns the processes' exit statuses and outputs."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  script = pathlib.Path(__file__).parent / "two_processes.py"
  processes = [
    subprocess.Popen(
      [python(), str(script), str(folder), str(port), str(index), what],
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for index in (0, 1)
  ]
  outputs = [process.communicate(timeout=240)[0] for process in processes]
  return [process.returncode for process in processes], outputs


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory):
  """Returns a folder with step 2, which contains one with steps 1 and 2, and the processes' outputs."""
  folder = tmp_path_factory.mktemp("saved") / "run"
  statuses, outputs = two_processes(folder, "save")
  assert statuses == [0, 0], outputs
  return folder, outputs


def test_two_processes_save_together_and_one_restores(setup, counter, saved_by_two):
  folder, outputs = saved_by_two
  # Each process continues at its own position.
  assert "restored 2 at 2" in outputs[0]
  assert "restored 2 at 12" in outputs[1]

  assert all_steps(folder) == [2]
  assert read_run_facts(folder) == {"random_seed": 5}
  saved = sorted(path.name for path in (folder / "checkpoint_2/dataset").glob("train_ds*[0-9]"))
  assert saved == ["train_ds-000-of-002", "train_ds-001-of-002"]
  state = setup.manager(folder).restore()
  # This process initializes the state with a program for another mesh, so the last bit may differ.
  np.testing.assert_allclose(state.params["wi"], setup.state().params["wi"], rtol=1e-6)
  with pytest.raises(ValueError, match=r"it has train_ds-000-of-002, train_ds-001-of-002\)"):
    setup.manager(folder, dataset_iterator=counter).restore()


def test_all_processes_restore_the_older_checkpoint_if_one_finds_damage(saved_by_two, tmp_path):
  folder = shutil.copytree(saved_by_two[0] / "split", tmp_path / "run")
  parts = list((folder / "checkpoint_2/state/ocdbt.process_1/d").iterdir())
  assert parts
  for part in parts:
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
  statuses, outputs = two_processes(folder, "restart")
  assert statuses == [0, 0], outputs
  assert "checkpoint_2 cannot be read" in outputs[0]
  assert "the run continues from" in outputs[0]
  assert all("restored 1 of [1]" in output for output in outputs)
  assert (folder / "damaged_checkpoint_2").is_dir()


@pytest.mark.slow
def test_both_processes_report_that_a_folder_is_in_use(saved_by_two):
  folder = saved_by_two[0] / "split"
  with lock_model_dir(folder):
    statuses, outputs = two_processes(folder, "restart")
  assert statuses == [1, 1]
  for output in outputs:
    assert f"ValueError: MODEL_DIR {folder} is in use by another training" in output


@pytest.mark.slow
def test_each_process_reads_its_shards_of_the_older_layout(make_setup, tmp_path):
  setup = make_setup(module=Tiny(width=4096), num_partitions=1)
  state = setup.state(step=7, seed=3)
  write_older_layout(tmp_path, state)
  statuses, outputs = two_processes(tmp_path, "restart")
  assert statuses == [0, 0], outputs
  whole = np.asarray(state.params["wi"])
  parts = [line.split()[1:] for out in outputs for line in out.splitlines() if line[:3] == "wi "]
  assert sorted(int(start) for start, *_ in parts) == [0, 1024, 2048, 3072]
  for start, stop, digest in parts:
    part = np.ascontiguousarray(whole[:, int(start) : int(stop)])
    assert digest == hashlib.sha256(part).hexdigest()
