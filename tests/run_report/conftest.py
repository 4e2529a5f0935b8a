from __future__ import annotations

import pathlib

import pytest
import run_files


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
  """Returns the folders of two runs, `first` and `second`, whose batch sizes differ."""
  root = tmp_path_factory.mktemp("runs")
  return [
    run_files.write_run(root / "first"),
    run_files.write_run(root / "second", scale=0.9, batch_size=4096),
  ]
