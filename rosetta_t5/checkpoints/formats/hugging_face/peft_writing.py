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
from rosetta_t5.checkpoints.formats.hugging_face.peft_folder import Module


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
    settings, tensors = describe(adapter, arrays, modules)
    settings["fan_in_fan_out"] = not next(iter(modules.values())).is_transposed
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
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns adapter_config.json's entries, and the tensors, of a LoRA."""
  tensors: dict[str, np.ndarray] = {}
  ranks: dict[str, int] = {}
  alphas: dict[str, float] = {}
  for name, module in modules.items():
    if not any(f"target/{ours}/lora_a" in arrays for ours in module.kernels):
      continue
    a_RI, b_OR, factor = _joined_lora(adapter, arrays, module)
    ranks[name] = len(a_RI)
    alphas[name] = factor * (math.sqrt(len(a_RI)) if adapter.rslora else len(a_RI))
    prefix = f"{peft_folder.PREFIX}{name}"
    tensors |= {f"{prefix}.{peft_folder.LORA_A}": a_RI, f"{prefix}.{peft_folder.LORA_B}": b_OR}
    if adapter.dora:
      magnitudes = [_magnitude(arrays, f"target/{ours}") for ours in module.kernels]
      tensors[f"{prefix}.{peft_folder.MAGNITUDE}"] = np.concatenate(magnitudes)
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
  }, tensors


def _joined_lora(
  adapter: adapters.LoRA, arrays: Arrays, module: Module
) -> tuple[np.ndarray, np.ndarray, float]:
  """Returns A [R, I], B [O, R] and the scale of a module's matrix.

  Kernels that are joined share A if theirs are equal. Otherwise their A are stacked, and B is block-diagonal.
  """
  has = [ours for ours in module.kernels if f"target/{ours}/lora_a" in arrays]
  parts = [[arrays[f"target/{ours}/lora_{x}"].get().T for x in "ab"] for ours in has]
  factors = [adapter.factor_of(ours) for ours in has]
  is_shared = all(np.array_equal(a_RI, parts[0][0]) for a_RI, _ in parts)
  joined_RI = parts[0][0] if is_shared else np.concatenate([a_RI for a_RI, _ in parts])
  joined_OR = np.zeros((module.outputs * len(module.kernels), len(joined_RI)), np.float32)
  column = 0
  for ours, (_, b_OR), factor in zip(has, parts, factors, strict=True):
    row, rank = module.outputs * module.kernels.index(ours), b_OR.shape[1]
    block = b_OR * (factor / factors[0])
    joined_OR[row : row + module.outputs, column : column + rank] = block
    column += 0 if is_shared else rank
  return joined_RI, joined_OR, factors[0]


def _magnitude(arrays: Arrays, kernel: str) -> np.ndarray:
  """Returns DoRA's magnitudes of a kernel's columns: without any, their norms."""
  if (found := arrays.get(f"{kernel}/dora_magnitude")) is not None:
    return found.get()
  norms: np.ndarray = np.linalg.norm(arrays[f"{kernel}/kernel"].get().astype(np.float32), axis=0)
  return norms


def _describe_ia3(
  adapter: adapters.IA3, arrays: Arrays, modules: Mapping[str, Module]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns adapter_config.json's entries, and the tensors, of an (IA)³."""
  tensors: dict[str, np.ndarray] = {}
  of_inputs, of_outputs = [], []
  for name, module in modules.items():
    found = [arrays.get(f"target/{ours}/ia3_scaling") for ours in module.kernels]
    if not any(found):
      continue
    ones, key = np.ones(module.outputs), f"{peft_folder.PREFIX}{name}.{peft_folder.IA3_VECTOR}"
    vectors = [ones if x is None else x.get() for x in found]
    if adapter.scales_inputs(module.kernels[0]):
      if not all(found) or any(not np.array_equal(x, vectors[0]) for x in vectors):
        raise ValueError(
          f"PEFT cannot scale the inputs of {', '.join(module.kernels)} by different vectors, because they are "
          f"one matrix, {name}"
        )
      of_inputs.append(name)
      tensors[key] = vectors[0][None]
    else:
      of_outputs.append(name)
      tensors[key] = np.concatenate(vectors)[:, None]
  # PEFT requires that the names of the one are among those of the other.
  inputs, outputs = (peft_folder.target_names(x, modules, ".") for x in (of_inputs, of_outputs))
  return {"target_modules": [*inputs, *outputs], "feedforward_modules": list(inputs)}, tensors
