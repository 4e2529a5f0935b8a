"""A folder with a tiny run for each fault, and `python` and `rosetta-t5` that start quickly."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from fault import Fault, check

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
  """The environment of the commands, in which forked/client.py is `python` and `rosetta-t5`."""
  folder = tmp_path_factory.mktemp("forked")
  for name in ("python", "rosetta-t5"):
    (folder / name).write_text(
      f'#!/bin/sh\nexec {sys.executable} -SE {HERE}/forked/client.py {folder}/socket {name} "$@"\n'
    )
    (folder / name).chmod(0o755)
  with subprocess.Popen([sys.executable, HERE / "forked/server.py", folder / "socket"]) as server:
    while not (folder / "socket").exists():
      assert server.poll() is None
      time.sleep(0.1)
    yield {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    server.terminate()


@pytest.fixture(scope="session")
def tiny_run(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A folder with rows.jsonl, tiny.gin and its run of four steps."""
  folder = tmp_path_factory.mktemp("tiny")
  shutil.copy(HERE / "tiny.gin", folder)
  rows = [{"question": f"What is {n} and {n}?", "answer": str(2 * n)} for n in range(200)]
  (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  check(Fault("the tiny run", "$TRAIN", "checkpoint_4", status=0), folder, environment)
  return folder


@pytest.fixture
def check_fault(
  environment: dict[str, str], tiny_run: pathlib.Path, tmp_path: pathlib.Path
) -> Callable[[Fault], None]:
  """Checks a fault in a copy of the tiny run's folder."""
  shutil.copytree(tiny_run, tmp_path, dirs_exist_ok=True)
  return lambda fault: check(fault, tmp_path, environment)
