"""Folders that Transformers saved give the logits that Transformers computes for them.

The folders and logits are recorded in `fixtures` for Transformers 4.57, 5.23 and 5.24. Where it is
installed, the same cases are saved and computed by that version.
"""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import transformers_folders

from rosetta_t5.checkpoints.reading import read_arrays
from rosetta_t5.conversion.model_facts import read_facts
from rosetta_t5.conversion.network_outputs import network_outputs

RECORDED = transformers_folders.recordings()
CASES = [*transformers_folders.CASES, *transformers_folders.CASES_OF_5]
TARGETS = transformers_folders.TARGETS
_computed = {}


def last_logits(folder):
  """Returns this project's logits of the last target, by Transformers' ids."""
  arrays = read_arrays(folder)
  facts = read_facts(folder, arrays)
  tokens = (transformers_folders.INPUTS, TARGETS + (TARGETS > 0) * facts.ids_are_shifted)
  values = b"".join(arrays[name].get().tobytes() for name in sorted(arrays))
  key = (repr(facts.network), facts.ids_are_shifted, zlib.crc32(values))
  if key not in _computed:  # Several versions save the same model.
    _computed[key] = network_outputs(arrays, facts, tokens)[0, -1]
  return _computed[key][facts.ids_are_shifted :]


def versions(case):
  return [name for name in RECORDED if name.endswith(f"/{case}")]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_version_that_saved_the_folder(case, tmp_path):
  assert versions(case)
  for name in versions(case):
    expected = transformers_folders.write_folder(name, tmp_path / name, RECORDED)
    found = last_logits(tmp_path / name)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5, err_msg=name)
