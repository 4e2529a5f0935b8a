"""Checkpoints of several processes: written together, restored on any number of them."""

from __future__ import annotations

import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from rosetta_t5.checkpoints import all_steps, read_run_facts


def test_two_processes_save_together_and_one_restores(setup, counter, tmp_path):
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  script = pathlib.Path(__file__).parent / "two_processes.py"
  processes = [
    subprocess.Popen(
      [sys.executable, str(script), str(tmp_path), str(port), str(index)],
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for index in (0, 1)
  ]
  outputs = [process.communicate(timeout=240)[0] for process in processes]
  assert [process.returncode for process in processes] == [0, 0], outputs
  # Each process goes on where it was itself.
  assert "restored 2 at 2" in outputs[0]
  assert "restored 2 at 12" in outputs[1]

  assert all_steps(tmp_path) == [2]
  assert read_run_facts(tmp_path) == {"random_seed": 5}
  saved = sorted(path.name for path in (tmp_path / "checkpoint_2/dataset").glob("train_ds*"))
  assert saved == ["train_ds-000-of-002", "train_ds-001-of-002"]
  state = setup.manager(tmp_path).restore()
  np.testing.assert_array_equal(state.params["wi"], setup.state().params["wi"])
  with pytest.raises(ValueError, match=r"it has train_ds-000-of-002, train_ds-001-of-002\)"):
    setup.manager(tmp_path, dataset_iterator=counter).restore()
