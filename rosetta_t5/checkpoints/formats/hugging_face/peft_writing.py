"""Writes PEFT's folders; see `peft_folder`."""

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath
from safetensors.numpy import save_file

from rosetta_t5 import adapters
from rosetta_t5.checkpoints.formats.hugging_face.families import BY_MODEL_TYPE
from rosetta_t5.checkpoints.formats.hugging_face.name_tables import Arrays, Config
from rosetta_t5.checkpoints.formats.hugging_face.peft_folder import (
  CONFIG,
  IA3_VECTOR,
  LORA_A,
  LORA_B,
  MAGNITUDE,
  PREFIX,
  PROMPT,
  TYPES,
  WEIGHTS,
  Module,
  modules_of,
  most_common,
  prompt_scale,
  short_name,
  target_names,
)


def write(
  root: epath.Path, adapter: adapters.Adapter, arrays: Arrays, config: Config, base: str
) -> None:
  """Writes a PEFT folder.

  Args:
    root: the folder, which exists.
    adapter: LoRA, IA3 or PromptTuning.
    arrays: the arrays of the base and of the adapter in the plain tree, by our names.
    config: the base's config.json.
    base: the path or name of the base that is recorded.

  Raises:
    ValueError: PEFT has no such adapter.
  """
  kinds = [kind for kind, cls in TYPES.items() if type(adapter) is cls]
  if not kinds:
    raise ValueError(
      f"PEFT has no adapters.{type(adapter).__name__}: use --to hf, which writes the whole model"
    )
  if isinstance(adapter, adapters.PromptTuning):
    (prompt,) = (x for name, x in arrays.items() if name.endswith("/prompt/prompt/prompt"))
    settings: dict[str, Any] = {
      "num_virtual_tokens": prompt.shape[0],
      "token_dim": prompt.shape[1],
      "num_transformer_submodules": 1,
      # PEFT needs them for configs in which it does not find them, and does not use them.
      "num_layers": 1,
      "num_attention_heads": 1,
    }
    tensors = {PROMPT: prompt.get() / prompt_scale(arrays, prompt.shape[1])}
  else:
    base_arrays = {n: x for n, x in arrays.items() if not n.endswith(adapter.suffixes)}
    modules = modules_of(base_arrays, config)
    if isinstance(adapter, adapters.LoRA):
      settings, tensors = _lora_files(adapter, arrays, modules)
    else:
      assert isinstance(adapter, adapters.IA3)
      settings, tensors = _ia3_files(adapter, arrays, modules)
    is_transposed = next(iter(modules.values())).is_transposed
    settings |= {"fan_in_fan_out": not is_transposed}
  is_decoder = BY_MODEL_TYPE[config["model_type"]].IS_DECODER
  settings |= {
    "peft_type": kinds[0],
    "task_type": "CAUSAL_LM" if is_decoder else "SEQ_2_SEQ_LM",
    "base_model_name_or_path": base,
    "inference_mode": True,
  }
  (root / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
  in_order = {name: np.ascontiguousarray(x, np.float32) for name, x in tensors.items()}
  save_file(in_order, os.fspath(root / WEIGHTS), metadata={"format": "pt"})


def _lora_files(
  adapter: adapters.LoRA, arrays: Arrays, modules: Mapping[str, Module]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns adapter_config.json's entries, and the tensors, of a LoRA."""
  tensors: dict[str, np.ndarray] = {}
  ranks: dict[str, int] = {}
  alphas: dict[str, float] = {}
  for name, module in modules.items():
    if not any(f"{ours}/lora_a" in arrays for ours in module.kernels):
      continue
    a_RI, b_OR, factor = _joined_lora(adapter, arrays, module)
    ranks[name] = len(a_RI)
    alphas[name] = factor * (math.sqrt(len(a_RI)) if adapter.rslora else len(a_RI))
    tensors |= {f"{PREFIX}{name}.{LORA_A}": a_RI, f"{PREFIX}{name}.{LORA_B}": b_OR}
    if adapter.dora:
      tensors[f"{PREFIX}{name}.{MAGNITUDE}"] = np.concatenate(
        [_magnitude(arrays, ours) for ours in module.kernels]
      )
  rank, alpha = most_common(ranks.values()), most_common(alphas.values())
  return {
    "r": rank,
    "lora_alpha": alpha,
    "lora_dropout": adapter.dropout,
    "bias": "none",
    "use_rslora": adapter.rslora,
    "use_dora": adapter.dora,
    "target_modules": list(target_names(ranks, modules, ".")),
    "rank_pattern": {name: x for name, x in ranks.items() if x != rank},
    "alpha_pattern": {name: x for name, x in alphas.items() if x != alpha},
  }, tensors


def _joined_lora(
  adapter: adapters.LoRA, arrays: Arrays, module: Module
) -> tuple[np.ndarray, np.ndarray, float]:
  """Returns A [R, I], B [O, R] and the scale of a module's matrix.

  Kernels that are joined share A if theirs are equal. Otherwise their A are stacked, and B is block-diagonal.
  """
  has = [ours for ours in module.kernels if f"{ours}/lora_a" in arrays]
  parts = {n: tuple(arrays[f"{n}/lora_{x}"].get().T for x in "ab") for n in has}
  factors = {n: adapter.factor_of(short_name(n)) for n in has}
  factor, (first_a, _) = factors[has[0]], parts[has[0]]
  is_shared = all(np.array_equal(a, first_a) for a, _ in parts.values())
  stacked = [first_a] if is_shared else [a for a, _ in parts.values()]
  width, column, blocks = sum(map(len, stacked)), 0, []
  for ours in module.kernels:
    block = np.zeros((module.outputs, width), np.float32)
    if ours in parts:
      a_RI, b_OR = parts[ours]
      block[:, column : column + len(a_RI)] = b_OR * (factors[ours] / factor)
      column += 0 if is_shared else len(a_RI)
    blocks.append(block)
  return np.concatenate(stacked), np.concatenate(blocks), factor


def _magnitude(arrays: Arrays, kernel: str) -> np.ndarray:
  """Returns DoRA's magnitudes of a kernel's columns: without any, their norms."""
  if (found := arrays.get(f"{kernel}/dora_magnitude")) is not None:
    return found.get()
  norms: np.ndarray = np.linalg.norm(arrays[f"{kernel}/kernel"].get().astype(np.float32), axis=0)
  return norms


def _ia3_files(
  adapter: adapters.IA3, arrays: Arrays, modules: Mapping[str, Module]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns adapter_config.json's entries, and the tensors, of an (IA)³."""
  tensors: dict[str, np.ndarray] = {}
  of_inputs = set()
  for name, module in modules.items():
    found = {n: arrays.get(f"{n}/ia3_scaling") for n in module.kernels}
    vectors = [None if x is None else x.get() for x in found.values()]
    if all(x is None for x in vectors):
      continue
    if adapter.scales_inputs(short_name(module.kernels[0])):
      first = vectors[0]
      if first is None or any(x is None or not np.array_equal(x, first) for x in vectors):
        raise ValueError(
          f"PEFT cannot scale the inputs of {', '.join(module.kernels)} by different vectors, because they are "
          f"one matrix, {name}"
        )
      of_inputs.add(name)
      tensors[f"{PREFIX}{name}.{IA3_VECTOR}"] = first[None]
    else:
      ones = np.ones(module.outputs, np.float32)
      joined = np.concatenate([ones if x is None else x for x in vectors])
      tensors[f"{PREFIX}{name}.{IA3_VECTOR}"] = joined[:, None]
  changed = {name.removeprefix(PREFIX).removesuffix(f".{IA3_VECTOR}") for name in tensors}
  # PEFT requires that the names of the one are among those of the other.
  inputs, outputs = (target_names(x, modules, ".") for x in (of_inputs, changed - of_inputs))
  return {"target_modules": [*inputs, *outputs], "feedforward_modules": list(inputs)}, tensors
