"""Several processes read the same data, are stopped, and are restarted as another number of processes."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
from inline_executor import InlineExecutor

from rosetta_t5.data.prepared import prepare
from rosetta_t5.data.vocabularies.sentencepiece_models import train_sentencepiece

SCRIPT = pathlib.Path(__file__).parent / "host_feed.py"
WORDS = ("red", "old", "cat", "hat", "sea", "sun")
FEATURES = ("encoder_input_tokens", "decoder_target_tokens")


@pytest.fixture
def corpus(tmp_path: pathlib.Path) -> str:
  """Four files of 50 documents; returns their pattern."""
  random = np.random.default_rng(0)
  (tmp_path / "in").mkdir()
  for number in range(4):
    lines = [json.dumps({"text": " ".join(random.choice(WORDS, 30))}) for _ in range(50)]
    (tmp_path / f"in/{number}.jsonl").write_text("\n".join(lines) + "\n")
  return str(tmp_path / "in/*.jsonl")


@pytest.fixture
def prepared(corpus: str, tmp_path: pathlib.Path) -> str:
  model = tmp_path / "pieces.model"
  model.write_bytes(train_sentencepiece([" ".join(WORDS)] * 20, vocab_size=18))
  prepare(corpus, str(model), tmp_path / "prepared", executor=InlineExecutor())
  return str(tmp_path / "prepared")


def read(folder: pathlib.Path, task: str, processes: int, first: int, last: int) -> list[str]:
  """Runs the processes; returns the output of those that fail."""
  folder.mkdir(exist_ok=True)
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  started = [
    subprocess.Popen(
      [sys.executable, str(SCRIPT), str(folder), task, str(port)]
      + [str(number) for number in (processes, index, first, last)],
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    for index in range(processes)
  ]
  output = [process.communicate(timeout=540)[0] for process in started]
  return [text for process, text in zip(started, output, strict=True) if process.returncode]


def batch(folder: pathlib.Path, step: int, processes: int) -> dict[str, np.ndarray]:
  parts = [np.load(folder / f"{step}-{index}.npz") for index in range(processes)]
  return {name: np.concatenate([part[name] for part in parts]) for name in FEATURES}


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
  for name in FEATURES:
    np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.slow
def test_prepared_batches_are_the_same_after_restarts_with_one_two_and_four_processes(
  prepared: str, tmp_path: pathlib.Path
) -> None:
  alone, changing = tmp_path / "alone", tmp_path / "changing"
  assert not read(alone, prepared, 1, 0, 12)
  for processes, first in ((2, 0), (4, 3), (1, 6), (2, 9)):
    assert not read(changing, prepared, processes, first, first + 3)
    for step in range(first, first + 3):
      assert_same(batch(changing, step, processes), batch(alone, step, 1))


@pytest.mark.slow
def test_files_can_be_restarted_with_the_same_number_of_processes_only(
  corpus: str, tmp_path: pathlib.Path
) -> None:
  whole, stopped = tmp_path / "whole", tmp_path / "stopped"
  assert not read(whole, corpus, 2, 0, 6)
  assert not read(stopped, corpus, 2, 0, 3)
  assert not read(stopped, corpus, 2, 3, 6)
  for step in range(6):
    assert_same(batch(stopped, step, 2), batch(whole, step, 2))
  (output,) = read(stopped, corpus, 1, 3, 6)
  assert "no dataset position 'train_ds-000-of-001'" in output
  assert "or had another number of hosts" in output
