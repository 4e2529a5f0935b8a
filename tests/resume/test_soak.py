"""A soak of a few seconds; `make soak` runs one of twenty minutes."""

from __future__ import annotations

import re

import pytest
import soak


@pytest.mark.slow
def test_a_run_with_faults_of_every_kind_ends_like_one_without(tmp_path):
  result = soak.soak(tmp_path, number=7, seed=2, seconds=60, steps=600)
  assert re.match(r"600 steps; .* bit-identical: \d+ arrays and 600 losses", result)
  [number] = re.findall(r"^\| all \| (\d+) \|$", result, re.MULTILINE)
  assert int(number) >= 4, result  # The run ends before the last faults if its steps are very fast.
