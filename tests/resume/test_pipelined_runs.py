"""Runs with a pipeline that are killed, terminated, and continued on other meshes."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import pipelined_run
import pytest

PROGRAM = pathlib.Path(__file__).parent / "pipelined_run.py"
STEPS = 6


def losses_in(text: str) -> dict[int, float]:
  return {int(n): float.fromhex(loss) for n, loss in re.findall(r"^step (\d+) (\S+)$", text, re.M)}


def train_on_devices(folder, steps, mesh, count, capsys) -> dict[int, float]:
  """Trains in this process."""
  capsys.readouterr()
  pipelined_run.run(str(folder), steps, 0, mesh, jax.devices()[:count])
  return losses_in(capsys.readouterr().out)


@pytest.mark.slow
def test_a_checkpoint_of_a_pipeline_continues_on_any_mesh(tmp_path, capsys):
  whole = train_on_devices(tmp_path / "whole", STEPS, {"data": 1}, 1, capsys)
  losses: dict[int, float] = {}
  for steps, mesh, devices in [
    (2, {"pipeline": 4, "data": 2}, 8),
    (4, {"fsdp": 8}, 8),
    (5, {"data": 1}, 1),
    (STEPS, {"pipeline": 2, "tensor": 2}, 4),
  ]:
    losses |= train_on_devices(tmp_path / "moved", steps, mesh, devices, capsys)
  assert losses == pytest.approx(whole, rel=1e-5)


def free_address() -> str:
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{free.getsockname()[1]}"


def train_in_processes(folder, mesh, count, kill_after=0, sigterm_after=0) -> dict[int, float]:
  """Trains in several processes; kills the last one after a step if `kill_after` is set."""
  address, is_killed = free_address(), kill_after > 0
  command = [sys.executable, PROGRAM, folder, STEPS, sigterm_after, json.dumps(mesh), address]
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  losses: dict[int, float] = {}
  with contextlib.ExitStack() as stack:
    processes = [
      stack.enter_context(
        subprocess.Popen(
          list(map(str, [*command, index, count])),
          stdout=subprocess.PIPE,
          stderr=subprocess.STDOUT,
          text=True,
          env=environment,
        )
      )
      for index in range(count)
    ]
    text = ""
    for line in processes[0].stdout:
      text += line
      losses = losses_in(text)
      if kill_after and len(losses) == kill_after:
        processes[-1].kill()
        kill_after = 0
    others = [process.communicate()[0] for process in processes[1:]]
  statuses = {process.returncode for process in processes}
  if is_killed:
    assert 0 not in statuses, text
  else:
    assert statuses == ({143} if sigterm_after else {0}), "\n".join([text, *others])
  return losses


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_processes_of_a_pipeline_are_killed_terminated_and_continued(tmp_path, capsys, count):
  whole = train_on_devices(tmp_path / "whole", STEPS, {"data": 1}, 1, capsys)
  folder = tmp_path / "disturbed"
  losses = train_in_processes(folder, {"pipeline": count}, count, kill_after=2)
  first = max(losses)
  other = {"pipeline": 2, "data": -1}
  losses |= train_in_processes(folder, other, count, sigterm_after=first + 1)
  losses |= train_in_processes(folder, {"fsdp": count}, count)
  assert losses == pytest.approx(whole, rel=1e-5)
