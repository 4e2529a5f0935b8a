"""A run that is killed or terminated and restarted computes the same steps, bit for bit.

These runs use gin and SeqIO, and are slow to start; tests/resume has quick ones without them.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from rosetta_t5.checkpoints import all_steps, read_run_facts

_HERE = pathlib.Path(__file__).parent / "resume"
_STEP = re.compile(r"step (\d+)/30  loss ([\d.]+)")


def train(
  model_dir: pathlib.Path, signal_after: int | None = None, sent: signal.Signals = signal.SIGKILL
) -> dict[int, str]:
  """Runs `python -m t5x.train` and returns {step: loss as printed}; signals it after a step."""
  command = [
    *(sys.executable, "-m", "t5x.train", f"--gin_file={_HERE / 'resume.gin'}"),
    f"--gin.MODEL_DIR='{model_dir}'",
  ]
  environment = os.environ | {"PYTHONPATH": str(_HERE), "JAX_PLATFORMS": "cpu"}
  losses: dict[int, str] = {}
  with (
    open(f"{model_dir}.stderr", "w") as errors,
    subprocess.Popen(
      command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
    ) as process,
  ):
    for match in filter(None, map(_STEP.match, process.stdout)):
      losses[int(match[1])] = match[2]
      if int(match[1]) == signal_after:
        process.send_signal(sent)
  # A terminated run saves and exits with a status that asks the launcher to restart it.
  expected = {None: 0, signal.SIGKILL: -signal.SIGKILL}.get(signal_after and sent, 143)
  assert process.returncode == expected, pathlib.Path(f"{model_dir}.stderr").read_text()[-3000:]
  return losses


def logged(model_dir: pathlib.Path, names: Sequence[str]) -> dict[tuple[int, str], bytes]:
  """Returns TensorBoard's values, {(step, name): the bits}, of all events files in their order."""
  from tensorboard.backend.event_processing import event_file_loader
  from tensorboard.util import tensor_util

  values = {}
  for path in sorted((model_dir / "train").glob("events*")):
    for event in event_file_loader.EventFileLoader(str(path)).Load():
      for value in event.summary.value:
        if value.tag in names:
          values[event.step, value.tag] = tensor_util.make_ndarray(value.tensor).tobytes()
  return values


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, dict[int, str]]:
  """Returns the folder and losses of an uninterrupted run."""
  folder = tmp_path_factory.mktemp("unbroken") / "whole"
  return folder, train(folder)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR1])
def test_a_terminated_run_saves_its_last_step_and_its_restart_continues_from_it(
  tmp_path, unbroken, sent
):
  whole, losses = unbroken
  terminated = tmp_path / "terminated"
  shutil.copytree(whole / "checkpoint_0", terminated / "checkpoint_0")
  before = train(terminated, signal_after=13, sent=sent)
  last = all_steps(terminated)[-1]
  assert last == max(before)
  assert last in range(13, 30)
  assert last % 10, "saved between two multiples of the period"
  after = train(terminated)
  assert min(after) == last + 1
  assert before | after == losses


@pytest.mark.slow
def test_a_killed_and_restarted_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, unbroken):
  whole, whole_losses = unbroken
  killed = tmp_path / "killed"
  assert all_steps(whole) == [0, 10, 20, 30]
  assert set(read_run_facts(whole)) >= {"random_seed", "train_dataset_seed"}

  # The seeds are random. The second run reads them from the first checkpoint, as a restart does.
  shutil.copytree(whole / "checkpoint_0", killed / "checkpoint_0")
  # After step 21, the save of step 20 has started, so the save of step 10 is complete.
  before = train(killed, signal_after=24)
  assert 30 not in all_steps(killed)
  after = train(killed)
  assert min(after) in (11, 21), "resumed from the last complete checkpoint"
  assert before | after == whole_losses

  names = ["loss", "accuracy", "z_loss", "learning_rate", "non_padding_fraction/overall"]
  expected, got = logged(whole, names), logged(killed, names)
  resumed = {key for key in expected if key[0] >= min(after)}
  assert len(resumed) == len(names) * len(after)
  assert {key: got[key] for key in resumed} == {key: expected[key] for key in resumed}

  ends = [
    ocp.PyTreeCheckpointHandler().restore(run / "checkpoint_30/state", args=as_numpy(run))
    for run in (whole, killed)
  ]
  jax.tree.map(np.testing.assert_array_equal, *ends)
  positions = [(run / "checkpoint_30/dataset").glob("train_ds*") for run in (whole, killed)]
  assert [p.name for p in positions[0]] == [p.name for p in positions[1]] != []


def as_numpy(run: pathlib.Path) -> ocp.args.PyTreeRestore:
  """Returns arguments with which Orbax restores numpy arrays, independent of devices."""
  metadata = ocp.PyTreeCheckpointHandler().metadata(run / "checkpoint_30/state").tree
  return ocp.args.PyTreeRestore(
    restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata)
  )
