"""Weighted sums of what several adapters change in one base."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from rosetta_t5 import adapters
from rosetta_t5.checkpoints import adapter_checkpoints, checkpoint_folders, saved_items
from rosetta_t5.checkpoints.arrays import lazy_arrays, state_dicts
from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.arrays.parameter_trees import to_plain_tree
from rosetta_t5.checkpoints.formats.hugging_face import name_tables, peft_folder


def parse(text: str) -> tuple[str, float]:
  """Returns the path and the weight, 1 by default, of PATH or PATH=WEIGHT.

  Raises:
    ValueError: the weight is not a number.
  """
  path, found, weight = text.rpartition("=")
  if not found or os.path.exists(text):
    return text, 1.0
  try:
    return path, float(weight)
  except ValueError:
    raise ValueError(f"--adapter must be PATH or PATH=WEIGHT, got {text!r}") from None


def add_changes(
  state: Mapping[str, Any], expected: Mapping[str, Any], given: Sequence[tuple[str, float]]
) -> dict[str, Any]:
  """Returns a base's state dict with W + Σ weight · (merged − W) for each array W that adapters change.

  It is one of RestoreCheckpointConfig.state_transformation_fns.

  Args:
    state: the base's state dict.
    expected: not used.
    given: the adapters' folders (PEFT's, or runs) and weights.

  Raises:
    ValueError: an adapter was trained on another base, or is no change of arrays.
  """
  del expected
  flat = {n: lazy_arrays.as_stored_array(x) for n, x in state_dicts.flatten_arrays(state).items()}
  base = to_plain_tree(flat)
  changed = dict(base)
  for path, weight in given:
    for name, merged in _merged_arrays(path, base).items():
      arrays = (x.astype(np.float32) for x in (changed[name], base[name], merged))
      changed[name] = lazy_arrays.elementwise(
        lambda total, w, merged, weight=weight: total + weight * (merged - w), *arrays
      )
  others = {name: x for name, x in flat.items() if not name.startswith("target/")}
  return state_dicts.unflatten_state_dict({**others, **changed})


def _merged_arrays(path: str, base: Mapping[str, StoredArray]) -> dict[str, StoredArray]:
  """Returns the arrays of `base` that an adapter changes, merged."""
  if peft_folder.is_peft(path):
    adapter, added = peft_folder.read(path, base, {})
    arrays, fact = {**base, **added}, adapter.settings()
  else:
    checkpoint = saved_items.checkpoint_to_use(path)
    fact = checkpoint_folders.adapter_fact(checkpoint)
    if not fact:
      raise ValueError(f"--adapter {path} must be a PEFT folder or a run with an adapter")
    adapter = adapters.from_settings(fact)
    arrays = to_plain_tree(checkpoint_folders.read_arrays(epath.Path(checkpoint)))
  if isinstance(adapter, adapters.PromptTuning):
    raise ValueError(f"--adapter {path} is a prompt: give it as --model_dir")
  merged = adapter_checkpoints.merge(arrays, fact)
  names = [n for n, x in merged.items() if n in arrays and x is not arrays[n]]
  wrong = [n for n in names if n not in base or not name_tables.are_equal(base[n], arrays[n])]
  if wrong:
    raise ValueError(
      f"--adapter {path} was trained on another base: {wrong[0]} differs from that of --model_dir"
    )
  names += [n for n in base if adapter.is_trained(n.removeprefix("target/"))]
  return {name: merged[name] for name in names}
