"""Writes PEFT's folders; see `peft_folder`."""

import json
import math
import os
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath
from safetensors.numpy import save_file

from rosetta_t5 import adapters
from rosetta_t5.checkpoints.formats.hugging_face import peft_folder
from rosetta_t5.checkpoints.formats.hugging_face.families import BY_MODEL_TYPE
from rosetta_t5.checkpoints.formats.hugging_face.name_tables import Arrays, Config
from rosetta_t5.checkpoints.formats.hugging_face.peft_folder import Groups, Module, short_name


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
  kinds = [kind for kind, cls in peft_folder.TYPES.items() if type(adapter) is cls]
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
    tensors = {peft_folder.PROMPT: prompt.get() / peft_folder.prompt_scale(arrays, prompt.shape[1])}
  else:
    base_arrays = {n: x for n, x in arrays.items() if not n.endswith(adapter.suffixes)}
    modules = peft_folder.modules_of(base_arrays, config)
    describe: Any = _describe_lora if isinstance(adapter, adapters.LoRA) else _describe_ia3
    settings, groups = describe(adapter, arrays, modules)
    tensors = {
      f"{peft_folder.PREFIX}{name}.{kind}": x
      for name, of in groups.items()
      for kind, x in of.items()
    }
    is_transposed = next(iter(modules.values())).is_transposed
    settings |= {"fan_in_fan_out": not is_transposed}
  is_decoder = BY_MODEL_TYPE[config["model_type"]].IS_DECODER
  settings |= {
    "peft_type": kinds[0],
    "task_type": "CAUSAL_LM" if is_decoder else "SEQ_2_SEQ_LM",
    "base_model_name_or_path": base,
    "inference_mode": True,
  }
  (root / peft_folder.CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
  in_order = {name: np.ascontiguousarray(x, np.float32) for name, x in tensors.items()}
  save_file(in_order, os.fspath(root / peft_folder.WEIGHTS), metadata={"format": "pt"})


def _describe_lora(
  adapter: adapters.LoRA, arrays: Arrays, modules: Mapping[str, Module]
) -> tuple[dict[str, Any], Groups]:
  """Returns adapter_config.json's entries, and the tensors, of a LoRA."""
  groups: Groups = {}
  ranks: dict[str, int] = {}
  alphas: dict[str, float] = {}
  for name, module in modules.items():
    if not any(f"{ours}/lora_a" in arrays for ours in module.kernels):
      continue
    a_RI, b_OR, factor = _joined_lora(adapter, arrays, module)
    ranks[name] = len(a_RI)
    alphas[name] = factor * (math.sqrt(len(a_RI)) if adapter.rslora else len(a_RI))
    groups[name] = {peft_folder.LORA_A: a_RI, peft_folder.LORA_B: b_OR}
    if adapter.dora:
      magnitudes = [_magnitude(arrays, ours) for ours in module.kernels]
      groups[name][peft_folder.MAGNITUDE] = np.concatenate(magnitudes)
  rank, alpha = statistics.mode(ranks.values()), statistics.mode(alphas.values())
  return {
    "r": rank,
    "lora_alpha": alpha,
    "lora_dropout": adapter.dropout,
    "bias": "none",
    "use_rslora": adapter.rslora,
    "use_dora": adapter.dora,
    "target_modules": list(peft_folder.target_names(ranks, modules, ".")),
    "rank_pattern": {name: x for name, x in ranks.items() if x != rank},
    "alpha_pattern": {name: x for name, x in alphas.items() if x != alpha},
  }, groups


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


def _describe_ia3(
  adapter: adapters.IA3, arrays: Arrays, modules: Mapping[str, Module]
) -> tuple[dict[str, Any], Groups]:
  """Returns adapter_config.json's entries, and the tensors, of an (IA)³."""
  groups: Groups = {}
  of_inputs = set()
  for name, module in modules.items():
    found = [arrays.get(f"{n}/ia3_scaling") for n in module.kernels]
    ones = np.ones(module.outputs, np.float32)
    vectors = [ones if x is None else x.get() for x in found]
    if not any(found):
      continue
    if adapter.scales_inputs(short_name(module.kernels[0])):
      if not all(found) or any(not np.array_equal(x, vectors[0]) for x in vectors):
        raise ValueError(
          f"PEFT cannot scale the inputs of {', '.join(module.kernels)} by different vectors, because they are "
          f"one matrix, {name}"
        )
      of_inputs.add(name)
      groups[name] = {peft_folder.IA3_VECTOR: vectors[0][None]}
    else:
      groups[name] = {peft_folder.IA3_VECTOR: np.concatenate(vectors)[:, None]}
  # PEFT requires that the names of the one are among those of the other.
  of_outputs = groups.keys() - of_inputs
  inputs, outputs = (peft_folder.target_names(x, modules, ".") for x in (of_inputs, of_outputs))
  return {"target_modules": [*inputs, *outputs], "feedforward_modules": list(inputs)}, groups
