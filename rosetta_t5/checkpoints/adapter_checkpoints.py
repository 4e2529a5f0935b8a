"""Checkpoints of a run that trains an adapter, which name their base instead of containing it, and sums of adapters."""

import dataclasses
import functools
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from rosetta_t5 import adapters
from rosetta_t5.checkpoints import saved_items
from rosetta_t5.checkpoints.arrays import lazy_arrays, state_dicts
from rosetta_t5.checkpoints.arrays.lazy_arrays import Arrays, StoredArray
from rosetta_t5.checkpoints.arrays.parameter_trees import convert_tree, to_plain_tree
from rosetta_t5.checkpoints.checkpoint_folders import ADAPTER, adapter_fact, read_arrays
from rosetta_t5.checkpoints.formats.hugging_face import name_tables, peft_folder


def adapter_facts(
  adapter: adapters.Adapter | None,
  manager: Any,
  params: Mapping[str, Any],
  earlier_facts: Mapping[str, Any],
) -> dict[str, Any]:
  """Returns the run fact of a run's adapter: its settings, and its base; {} without an adapter.

  Of the base it has the path, the names of the parameters that are not stored again, and a fingerprint of their
  values. All parameters are stored if nothing was restored, if the checkpoint is in MODEL_DIR, where it may be deleted, or if its
  arrays were changed otherwise than in size.

  Args:
    adapter: the model's adapter.
    manager: the manager of the run's checkpoints, after the restore.
    params: the run's parameters.
    earlier_facts: the facts with which the run continues.

  Raises:
    ValueError: the run continues one with another method.
  """
  if adapter is None:
    return {}
  settings, flat = adapter.settings(), state_dicts.flatten_state_dict({"target": params})
  if earlier := earlier_facts.get(ADAPTER):
    if earlier["method"] != settings["method"]:
      raise ValueError(
        f"the run in MODEL_DIR {manager.directory} trains {earlier['method']}, and this one {settings['method']}: set an "
        "empty MODEL_DIR, and INITIAL_CHECKPOINT_PATH to the checkpoint from which to start"
      )
    return {ADAPTER: {**earlier, **settings}}
  base, changes = manager.restored_from, {*manager.restore_changes}
  is_own = base is not None and epath.Path(base).parent == manager.directory
  changes -= {state_dicts.resize_vocabulary}
  if base is None or changes or is_own or is_merged(flat, adapter_fact(base)):
    return {ADAPTER: {**settings, "base": None}}
  expected = {n: x for n, x in flat.items() if not adapter.is_trained(n.removeprefix("target/"))}
  stored = quantize(convert_tree(read_arrays(base), expected), expected)
  names = [n for n, x in expected.items() if n in stored and stored[n].shape == tuple(x.shape)]
  about_base = {
    "base": os.path.abspath(base),
    "base_parameters": sorted(names),
    "base_fingerprint": _fingerprint({name: flat[name] for name in names}),
  }
  return {ADAPTER: {**settings, **about_base}}


def _fingerprint(params: Mapping[str, Any]) -> int:
  """Returns 32 bits that depend on the names and values of parameters, as bfloat16.

  They do not depend on how arrays are split over devices, nor on the layout and floating-point type of the
  checkpoint. One stored array at a time is in memory.
  """
  total = 0
  for name, value in sorted(params.items()):
    words = _sum_of_words(value.get() if isinstance(value, StoredArray) else value)
    total = (total * 31 + int(words) + zlib.crc32(name.encode())) % 2**32
  return total


@jax.jit
def _sum_of_words(value: jax.Array) -> jax.Array:
  value = value.astype(jnp.bfloat16) if jnp.issubdtype(value.dtype, jnp.floating) else value
  bits = jax.lax.bitcast_convert_type(value, jnp.dtype(f"uint{8 * value.dtype.itemsize}"))
  position = jnp.arange(value.size, dtype=jnp.uint32).reshape(value.shape)
  words = (bits.astype(jnp.uint32) + 1) * (2 * position + 1)  # odd factors lose no bits
  return jnp.sum(words, dtype=jnp.uint32)


def check_base(path: epath.PathLike, fact: Mapping[str, Any], restored: Mapping[str, Any]) -> None:
  """Raises ValueError if the base of a checkpoint is not the one with which its adapter was trained.

  Args:
    path: the checkpoint.
    fact: what it states about its adapter.
    restored: the arrays of both, by flat name.
  """
  names, expected = fact.get("base_parameters", ()), fact.get("base_fingerprint")
  found = {name: restored[name] for name in names if name in restored}
  # In another network they have other names, and if the adapter is merged, other values.
  is_comparable = len(found) == len(names) and not is_merged(restored, fact)
  if expected is not None and is_comparable and _fingerprint(found) != expected:
    raise ValueError(
      f"{fact['base']} is not the model with which the adapter of {path} was trained: its parameters differ, or "
      "frozen_dtype is now 'int8' and was not. Move the original back to this path, or restore frozen_dtype"
    )


def merge(arrays: Arrays, fact: Mapping[str, Any]) -> dict[str, StoredArray]:
  """Returns the arrays of a checkpoint with what its adapter added merged into the kernels, in float32."""
  adapter = adapters.from_settings(fact)
  merged = {n: x for n, x in arrays.items() if not n.startswith("state/param_states")}
  for module in [n.removesuffix("/kernel") for n in merged if n.endswith("/kernel")]:
    added = adapter.pop_added(merged, module)
    own = {end: merged[n] for end in ("kernel", "bias") if (n := f"{module}/{end}") in merged}
    for end in own if added else ():
      merged[f"{module}/{end}"] = _merged_array(adapter, module, end, {**own, **added})
  return merged


def is_merged(expected: Mapping[str, Any], fact: Mapping[str, Any]) -> bool:
  """Returns whether the adapter of a checkpoint is merged where a train state has these names."""
  ends = tuple(f"/{end}" for end in adapters.from_settings(fact).suffixes) if fact else ()
  return bool(ends) and not any(name.endswith(ends) for name in expected)


def add_prompt(model: Any, path: epath.PathLike) -> None:
  """Lets a model's network have the prompt of a PEFT folder, if `path` is a folder of prompt tuning."""
  fact = adapter_fact(path)
  if fact.get("method") == adapters.PromptTuning.__name__:
    config = dataclasses.replace(model.module.config, prompt_length=fact["length"])
    model.module = model.module.clone(config=config)


def _merged_array(adapter: adapters.Adapter, module: str, end: str, parts: Arrays) -> StoredArray:
  """Returns a projection's kernel or bias, from all that it has by the ends of their names."""

  def read(index: Any) -> np.ndarray:
    name = module.removeprefix("target/")
    flat = {f"{name}/{key}": x.get() for key, x in parts.items()}
    merged = adapter.merged(state_dicts.unflatten_state_dict(flat))
    return np.asarray(state_dicts.flatten_state_dict(merged)[f"{name}/{end}"])[index]

  return StoredArray(parts[end].shape, np.float32, read, sliceable=False)


def quantize(arrays: Arrays, expected: Mapping[str, Any]) -> dict[str, StoredArray]:
  """Returns arrays with kernels in int8, and their scales, where a train state expects these."""
  converted = dict(arrays)
  for name, leaf in expected.items():
    if name in arrays and leaf.dtype == jnp.int8 and arrays[name].dtype != jnp.int8:
      for part, key in enumerate((name, f"{name}_scale")):
        read = functools.partial(_read_quantized, arrays[name], part)
        shape, dtype = expected[key].shape, expected[key].dtype
        converted[key] = StoredArray(shape, dtype, read, sliceable=False)
  return converted


def _read_quantized(kernel: StoredArray, part: int, index: Any) -> np.ndarray:
  """Returns a slice of an int8 kernel (part 0) or of its scales (part 1)."""
  with jax.default_device(jax.local_devices(backend="cpu")[0]):  # GPUs divide less exactly.
    return np.asarray(adapters.quantized(jnp.asarray(kernel.get()))[part])[index]


def parse_sum(text: str) -> tuple[str, float]:
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


def _merged_arrays(path: str, base: Arrays) -> dict[str, StoredArray]:
  """Returns the arrays of `base` that an adapter changes, merged."""
  if peft_folder.is_peft(path):
    adapter, added = peft_folder.read(path, base, {})
    arrays, fact = {**base, **added}, adapter.settings()
  else:
    checkpoint = saved_items.checkpoint_to_use(path)
    fact = adapter_fact(checkpoint)
    if not fact:
      raise ValueError(f"--adapter {path} must be a PEFT folder or a run with an adapter")
    adapter = adapters.from_settings(fact)
    arrays = to_plain_tree(read_arrays(epath.Path(checkpoint)))
  if isinstance(adapter, adapters.PromptTuning):
    raise ValueError(f"--adapter {path} is a prompt: give it as --model_dir")
  merged = merge(arrays, fact)
  names = [n for n, x in merged.items() if n in arrays and x is not arrays[n]]
  wrong = [n for n in names if n not in base or not name_tables.are_equal(base[n], arrays[n])]
  if wrong:
    raise ValueError(
      f"--adapter {path} was trained on another base: {wrong[0]} differs from that of --model_dir"
    )
  names += [n for n in base if adapter.is_trained(n.removeprefix("target/"))]
  return {name: merged[name] for name in names}
