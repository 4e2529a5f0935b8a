"""A training run on a real terminal: its first line, its bar between two reports, and Ctrl-C."""

from __future__ import annotations

import os
import pathlib
import pty
import re
import subprocess
import sys
import time

import pytest

from rosetta_t5.checkpoints import all_steps

ROOT = pathlib.Path(__file__).resolve().parents[2]
_BAR = re.compile(r"step (\d+)/100000 .*?━.*?loss [\d.]+ nats/token")


@pytest.mark.slow
def test_a_run_shows_a_line_at_once_and_moves_its_bar_and_ctrl_c_saves_its_last_step(tmp_path):
  command = [
    *(sys.executable, "-m", "t5x.train", f"--gin_file={ROOT / 'tests/resume/resume.gin'}"),
    *(f"--gin.MODEL_DIR='{tmp_path}'", "--gin.TRAIN_STEPS=100000"),
    *(
      "--gin.train_script.train.stats_period=100000",
      "--gin.utils.SaveCheckpointConfig.period=100000",
    ),
  ]
  environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/resume'}", "TERM": "xterm", "COLUMNS": "120"}
  started = time.monotonic()
  terminal, inner = pty.openpty()
  run = subprocess.Popen(
    ["setsid", "--ctty", "--wait", *command],  # pty.fork warns where jax has threads
    stdin=inner,
    stdout=inner,
    stderr=inner,
    env={**os.environ, **environment, "JAX_PLATFORMS": "cpu"},
  )
  os.close(inner)
  text, first_line, is_pressed = "", 0.0, False
  try:
    while part := os.read(terminal, 100_000):
      text += part.decode(errors="replace")
      first_line = first_line or time.monotonic() - started
      if not is_pressed and len(set(_BAR.findall(text))) > 2:
        os.write(terminal, b"\x03")
        is_pressed = True
  except OSError:  # The process has ended.
    pass
  assert run.wait() == 130, text
  assert first_line < 3  # 0.1 s on a quiet machine
  assert "Traceback" not in text
  last = all_steps(tmp_path)[-1]
  assert f"interrupted  after step {last}: run the same command to continue" in text
