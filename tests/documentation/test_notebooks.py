"""The notebooks run from the first cell to the last."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

NOTEBOOKS = pathlib.Path(__file__).resolve().parents[2] / "docs/notebooks"


@pytest.mark.slow
def test_the_notebooks_run_one_after_the_other_in_an_empty_folder(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  import nbformat
  from nbclient import NotebookClient

  monkeypatch.setenv("PATH", f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
  for name in ("pretrain", "finetune"):  # The second uses the files of the first.
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
  assert (tmp_path / "runs/my_rows/checkpoint_800").is_dir()
