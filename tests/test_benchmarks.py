"""The GPU's benchmark, at toy size: a row comes out and gets into the table."""

from __future__ import annotations

import json

import pytest

from benchmarks import results_table, train_step


@pytest.mark.slow
def test_training_step_is_measured_and_tabled(tmp_path, capsys):
  path = tmp_path / "tiny-fp8.json"
  toy = "--size tiny --batch 8 --lengths 16 8 --steps 2 --group 1 --warmup 1 --fuse-qkv --pack"
  train_step.main([*toy.split(), "--fp8", "--emulate", "--loss-chunk", "4", "--json", str(path)])
  row = json.loads(path.read_text())
  assert row["seq_per_s_per_device"] > 0
  assert row["hlo"]["e5m2 arrays"] > 0
  assert "current scaling" in row["computation"]
  capsys.readouterr()
  results_table.main(str(tmp_path))
  table = capsys.readouterr().out
  assert "| tiny-fp8 | 8 x 16/8 |" in table
  assert "bfloat16 kernel=auto fp8 current/auto fuse_qkv pack loss_chunk=4" in table
