"""A folder with a tiny run for each fault, and `python` and `rosetta-t5` that start quickly."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator

import forked_python
import pytest
from fault import Fault, check

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="session")
def environment() -> Iterator[dict[str, str]]:
  """The environment of the commands, in which `python` and `rosetta-t5` start quickly."""
  with forked_python.serving(with_seqio=True) as python:
    yield {**os.environ, "PATH": f"{os.path.dirname(python)}:{os.environ['PATH']}"}


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
