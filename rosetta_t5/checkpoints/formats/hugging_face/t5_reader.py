"""Reads a folder of Hugging Face's T5 family: T5 1.0 and 1.1, mT5, ByT5, UMT5, Flan-T5; and GPT's."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray, scale, transpose
from rosetta_t5.checkpoints.formats import safetensors_file, torch_file
from rosetta_t5.checkpoints.formats.hugging_face import gpt_reader
from rosetta_t5.checkpoints.formats.hugging_face.t5_names import (
  COPIES,
  EMBEDDING,
  HEAD,
  HF_HEAD,
  t5x_name,
)

CONFIG = "config.json"
FAMILIES = ("t5", "mt5", "umt5")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_FILES = ("model.safetensors", "pytorch_model.bin")


def weight_files(folder: str | os.PathLike[str]) -> list[epath.Path]:
  """Returns the files of weights in `folder`, safetensors before PyTorch's; empty if there are none."""
  root = epath.Path(folder)
  for index, file in zip(_INDEXES, _FILES, strict=True):
    if (root / index).exists():
      shards = json.loads((root / index).read_text())["weight_map"].values()
      return [root / name for name in sorted(set(shards))]
    if (root / file).exists():
      return [root / file]
  return []


def is_hugging_face(path: str | os.PathLike[str]) -> bool:
  """Returns whether `path` looks like a folder that `save_pretrained` wrote."""
  root = epath.Path(path)
  return root.is_dir() and (root / CONFIG).exists() and bool(weight_files(root))


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns config.json of a model of the T5 family.

  Raises:
    ValueError: the model is of another family, or has switches that T5X's T5 lacks.
  """
  file = epath.Path(path) / CONFIG
  config = json.loads(file.read_text())
  if config.get("model_type") not in FAMILIES:
    raise ValueError(
      f"{file} says model_type = {config.get('model_type')!r}: only the T5 family can be read "
      f"({', '.join(FAMILIES)}; ByT5 and Flan-T5 are 't5'), and {' and '.join(gpt_reader.FAMILIES)}"
    )
  for key, expected in (("relative_attention_max_distance", 128), ("layer_norm_epsilon", 1e-6)):
    if config.get(key, expected) != expected:
      raise ValueError(f"{file} says {key} = {config[key]}, but this T5's is {expected}: not read")
  return config


def read_arrays(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
  """Returns {T5X's name: array} of the folder at `path`, in T5X's plain tree; values are read later.

  The relative bias is the stack's own (`encoder/relpos_bias`) where one layer has one, and the
  layers' own where all have (UMT5). Scaled logits without a table of their own become T5 1.0's tied
  ones (no `logits_dense`), unscaled ones `logits_dense`. GPT-2 and GPT-Neo: see `hugging_face_gpt`.

  Raises:
    ValueError: weights are missing, or belong to another architecture.
  """
  gpt = json.loads((epath.Path(path) / CONFIG).read_text())
  if gpt.get("model_type") in gpt_reader.FAMILIES:
    return gpt_reader.read_arrays(_all_weights(path), gpt)
  config = read_config(path)
  theirs = _all_weights(path)
  arrays, strangers = {}, []
  for name, array in theirs.items():
    if name in COPIES:
      continue
    found = t5x_name(name)
    if found is None:
      strangers.append(name)
      continue
    arrays[found[0]] = transpose(array) if found[1] else array
  if strangers:
    raise ValueError(
      f"{path} has weights that T5X's T5 has not: {', '.join(sorted(strangers)[:8])}"
      + (f" and {len(strangers) - 8} more" if len(strangers) > 8 else "")
    )
  if EMBEDDING not in arrays:
    copy = next((theirs[name] for name in sorted(COPIES) if name in theirs), None)
    if copy is None:
      raise ValueError(f"{path} has no embedding table (shared.weight): the folder is incomplete")
    arrays[EMBEDDING] = copy
  return _with_head(_with_shared_bias(arrays), config)


def _all_weights(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
  weights: dict[str, StoredArray] = {}
  for file in weight_files(path):
    if not file.exists():
      raise ValueError(f"{file} is missing, though the folder's index names it")
    module = safetensors_file if file.suffix == ".safetensors" else torch_file
    weights.update(module.read_arrays(file))
  # A bare stack (T5Stack, some exports) is saved with or without the wrapper's prefix.
  return {name.removeprefix("transformer."): array for name, array in weights.items()}


def _with_shared_bias(arrays: dict[str, StoredArray]) -> dict[str, StoredArray]:
  """Gives a bias that only layer 0 has the stack's name: the layers share it."""
  for side in ("encoder", "decoder"):
    biases = [name for name in arrays if name.startswith(f"target/{side}/") and "relpos" in name]
    if biases == [f"target/{side}/layers_0/relpos_bias/rel_embedding"]:
      arrays[f"target/{side}/relpos_bias/rel_embedding"] = arrays.pop(biases[0])
  return arrays


def activations(config: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns T5Config.mlp_activations for a config's `feed_forward_proj`."""
  gate, _, name = str(config.get("feed_forward_proj", "relu")).rpartition("-")
  if gate not in ("", "gated"):
    raise ValueError(f"feed_forward_proj = {config['feed_forward_proj']!r} is not known")
  name = {"gelu_new": "gelu"}.get(name, name)
  return (name, "linear") if gate else (name,)


def scales_logits(config: Mapping[str, Any]) -> bool:
  """Returns whether the model divides what goes into its output layer by √d_model.

  Transformers 4 decides by `tie_word_embeddings`. Transformers 5 writes True there whatever the
  head is: T5 has `scale_decoder_outputs` instead, mT5 never scales, UMT5 always does.
  """
  tied = config.get("tie_word_embeddings")
  if config["model_type"] == "t5":
    return bool(config.get("scale_decoder_outputs", tied is not False))
  if config["model_type"] == "umt5":
    return tied is not False
  version = str(config.get("transformers_version", "5"))
  return tied is True and int(version.split(".")[0]) < 5


def _with_head(arrays: dict[str, StoredArray], config: Mapping[str, Any]) -> dict[str, StoredArray]:
  if not any(name.startswith("target/decoder/") for name in arrays):
    return arrays
  embedding = arrays[EMBEDDING]
  head = arrays.pop(HEAD, None)
  if head is not None and _equal(head, transpose(embedding)):
    head = None  # PyTorch's files keep tied weights twice
  if not scales_logits(config):
    arrays[HEAD] = transpose(embedding) if head is None else head
  elif head is not None:
    arrays[HEAD] = scale(head, 1 / math.sqrt(embedding.shape[1]))
  return arrays


def _equal(a: StoredArray, b: StoredArray) -> bool:
  """Compares two arrays piece by piece, so that a table of gigabytes is never in memory whole."""
  if a.shape != b.shape:
    return False
  columns = max(1, 16_000_000 // a.shape[0])
  for start in range(0, a.shape[1], columns):
    index = (slice(None), slice(start, start + columns))
    if not np.array_equal(a.read(index), b.read(index)):
      return False
  return True


__all__ = [
  "CONFIG",
  "FAMILIES",
  "HF_HEAD",
  "is_hugging_face",
  "read_arrays",
  "read_config",
  "scales_logits",
  "weight_files",
]
