"""Processes that are killed while they save leave only complete checkpoints."""

from __future__ import annotations

import pathlib
import random
import signal
import subprocess
import time

import jax
import numpy as np
import pytest
from forked_python import python
from saver_process import WIDTH
from tiny_state import Counter, Setup, Tiny

from rosetta_t5.checkpoints import all_steps, latest_step


def save_until_killed(folder: pathlib.Path, delay: float) -> int:
  """Runs the saver, kills it `delay` seconds after its third save began, and returns that step."""
  script = pathlib.Path(__file__).parent / "saver_process.py"
  command = [python(), str(script), str(folder)]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    lines = [process.stdout.readline() for _ in range(3)]
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.stdout.read()  # It has ended when its output has.
  assert process.returncode == -signal.SIGKILL
  return int(lines[-1].split()[1])


def check_every_checkpoint_is_whole(folder: pathlib.Path, announced: int) -> None:
  counter = Counter()
  setup = Setup(module=Tiny(width=WIDTH), num_partitions=1)
  manager = setup.manager(folder, dataset_iterator=counter)
  # The last save that was announced may have waited for the one before it.
  assert latest_step(folder) >= announced - 2
  for step in all_steps(folder):
    state = manager.restore(step=step)
    assert {float(x) for leaf in jax.tree.leaves(state) for x in np.unique(leaf)} == {float(step)}
    assert counter.position == step


@pytest.mark.parametrize("rounds", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_a_killed_process_leaves_complete_checkpoints_and_its_restart_continues(tmp_path, rounds):
  choose = random.Random(rounds)
  for _ in range(rounds):
    before = latest_step(tmp_path) or 0
    announced = save_until_killed(tmp_path, delay=choose.uniform(0.0, 0.1))
    assert announced == before + 3
    check_every_checkpoint_is_whole(tmp_path, announced)
