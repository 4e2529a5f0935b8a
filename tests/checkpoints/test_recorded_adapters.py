"""PEFT folders compute here what PEFT computed when `recorded_adapters.py` recorded its logits."""

from __future__ import annotations

import json

import numpy as np
import pytest
from peft_folders import BASES, our_logits
from recorded_adapters import METHODS, RECORDED, selected, write_adapter, write_base


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", BASES)
def test_an_adapter_has_the_recorded_logits_of_peft(name, method, tmp_path):
  write_base(name, tmp_path / "base")
  write_adapter(name, method, tmp_path / "base", tmp_path / "adapter")
  expected = json.loads(RECORDED.read_text())["logits"][name][method]
  np.testing.assert_allclose(
    selected(our_logits(tmp_path / "adapter")), expected, rtol=0, atol=1e-4
  )
