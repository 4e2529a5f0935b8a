"""The quickstart: its parts on small inputs, and (slow) the complete quickstart."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from rosetta_t5.cli import quickstart
from rosetta_t5.data import quickstart_data

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEXT = [
  f"Return the {n} of the object {n + 1} or raise an error if {n * n} is it." for n in range(900)
]


def test_a_training_command_that_fails_ends_the_quickstart_with_its_status(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  monkeypatch.setattr(quickstart_data, "VOCAB_SIZE", 200)
  quickstart_data.prepare(paragraphs=TEXT)
  with pytest.raises(SystemExit) as ended:
    quickstart.main(["--gin.TRAIN_STEPPS=7"])
  output = capfd.readouterr()
  assert ended.value.code != 0
  assert "python -m t5x.train --gin_file=gin/examples/quickstart.gin --gin.TRAIN_ST" in output.out
  assert "TRAIN_STEPS" in output.err  # The similar name is suggested.


@pytest.mark.slow
def test_the_quickstart_trains_in_an_empty_folder_and_its_second_call_changes_nothing(
  tmp_path: pathlib.Path,
) -> None:
  path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
  environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}

  def run() -> str:
    command = [
      sys.executable,
      "-m",
      "rosetta_t5.cli",
      "quickstart",
      "--gin.TRAIN_STEPS=4",
      "--gin.BATCH_SIZE=8",
    ]
    result = subprocess.run(
      command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout

  first = run()
  assert "of 495 predictions equal their targets" in first
  assert (tmp_path / "quickstart/run/checkpoint_4").is_dir()
  assert (tmp_path / "quickstart/run_dates/checkpoint_404").is_dir()
  files = {path: path.stat().st_mtime_ns for path in (tmp_path / "quickstart/data").iterdir()}
  second = run()
  assert second.count("nothing was left to do") == 2
  assert {path: path.stat().st_mtime_ns for path in files} == files
  for command in second.partition("Commands to try next:\n")[2].splitlines():
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, check=True)
