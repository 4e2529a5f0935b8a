"""Reads and writes Transformers' folders: config.json, files of weights and a tokenizer's files."""

from __future__ import annotations

import json
import logging
import os
import re
import reprlib
import shutil
from collections.abc import Collection, Mapping
from typing import Any

from etils import epath

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.formats import safetensors_file, torch_file
from rosetta_t5.checkpoints.formats.hugging_face import gpt_names, gpt_reader, t5_names, t5_reader
from rosetta_t5.checkpoints.formats.hugging_face.config_sizes import check_config
from rosetta_t5.checkpoints.formats.hugging_face.gpt_reader import network_values
from rosetta_t5.checkpoints.formats.hugging_face.gpt_tokenizer import (
  SENTENCEPIECE,
  write_gpt_tokenizer,
)
from rosetta_t5.telemetry.json_files import read_json_object

CONFIG = "config.json"
FAMILIES = (*t5_names.FAMILIES, *gpt_names.FAMILIES)
_INDEX = ".index.json"
# Where weights are looked for, in this order.
_WEIGHTS = (
  *("model.safetensors.index.json", "model.safetensors"),
  *("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
_SHARD = re.compile(r"[^/\\\0]+\.(safetensors|bin)")
_SHARD_BYTES = 5_000_000_000
_TOKENIZER = re.compile(
  r"(tokenizer|special_tokens|added_tokens|spiece|generation_config).*|vocab\.json|merges\.txt"
)
_log = logging.getLogger(__name__)
# The supported values of entries of config.json. The first one is the default of a missing entry.
_T5_VALUES: dict[str, tuple[Any, ...]] = {
  "relative_attention_max_distance": (128,),
  "layer_norm_epsilon": (1e-6,),
}
_GPT_VALUES: dict[str, tuple[Any, ...]] = {
  "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
  "scale_attn_weights": (True,),
  "scale_attn_by_inverse_layer_idx": (False,),
  "add_cross_attention": (False,),
  "tie_word_embeddings": (True,),
}


def is_hugging_face(path: str | os.PathLike[str]) -> bool:
  """Returns whether `path` is a folder with config.json and files of weights."""
  root = epath.Path(path)
  return root.is_dir() and (root / CONFIG).exists() and _find_weights(root) is not None


def _find_weights(root: epath.Path) -> epath.Path | None:
  """Returns the file of weights, or the index if there are several files; None if there is neither."""
  return next((root / name for name in _WEIGHTS if (root / name).exists()), None)


def _read_weights(root: epath.Path) -> dict[str, StoredArray]:
  """Returns {Transformers' name: array} of all files of weights."""
  file = _find_weights(root)
  if file is None:
    raise ValueError(f"{root} must contain one of {', '.join(_WEIGHTS)}, got none")
  if not file.name.endswith(_INDEX):
    return _read_file(file)
  weights: dict[str, StoredArray] = {}
  weight_map = _read_weight_map(file)
  for shard in sorted(set(weight_map.values())):
    if not (root / shard).exists():
      raise ValueError(f"{root / shard} is missing, although the folder's index lists it")
    found = _read_file(root / shard)
    if missing := [name for name, at in weight_map.items() if at == shard and name not in found]:
      raise ValueError(f"{root / shard} lacks {missing[0]}, although {file.name} lists it there")
    weights.update(found)
  return weights


def _read_file(file: epath.Path) -> dict[str, StoredArray]:
  return (safetensors_file if file.suffix == ".safetensors" else torch_file).read_arrays(file)


def _read_weight_map(index: epath.Path) -> dict[str, str]:
  """Returns {name of a weight: name of its file} of an index."""
  weight_map = read_json_object(index).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise ValueError(f"{index}: weight_map must be an object that names the file of each weight")
  for name, file in weight_map.items():
    if not isinstance(file, str) or not _SHARD.fullmatch(file):
      raise ValueError(
        f"{index}: weight_map must name files of the same folder, such as "
        f"model-00001-of-00002.safetensors, got {reprlib.repr(file)} for {reprlib.repr(name)}"
      )
  return weight_map


def read_config(
  file: str | os.PathLike[str], families: Collection[str] = FAMILIES
) -> dict[str, Any]:
  """Returns the content of a config.json.

  Args:
    families: the accepted values of `model_type`.

  Raises:
    ValueError: the model is of another family, or computes something that our networks do not.
  """
  config = read_json_object(file)
  family = config.get("model_type")
  if family not in list(families):  # A list also accepts values that cannot be hashed.
    raise ValueError(
      f"{file}: model_type must be one of {', '.join(families)}, got {reprlib.repr(family)}"
    )
  supported = _GPT_VALUES if family in gpt_names.FAMILIES else _T5_VALUES
  for key, values in supported.items():
    if config.get(key, values[0]) not in values:
      allowed = " or ".join(map(repr, values))
      raise ValueError(
        f"{file}: {key} must be {allowed}, got {reprlib.repr(config[key])}, which this project's "
        f"{family} does not support"
      )
  return config


def read_arrays(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
  """Returns {our name: array} of the folder at `path`, in the plain tree; values are read later.

  Raises:
    ValueError: files are damaged, weights are missing or belong to another architecture, or
      config.json contradicts them.
  """
  root = epath.Path(path)
  config = read_config(root / CONFIG)
  # Transformers adds this prefix where a GPT is saved with its output layer.
  weights = {name.removeprefix("transformer."): x for name, x in _read_weights(root).items()}
  is_gpt = config["model_type"] in gpt_names.FAMILIES
  arrays = (gpt_reader if is_gpt else t5_reader).read_arrays(weights, config)
  check_config(root / CONFIG, config, arrays)
  if is_gpt:
    values = ", ".join(f"{k} = {value!r}" for k, value in network_values(config).items())
    _log.info("Transformers' model needs network.TransformerConfig: %s", values)
  return arrays


def write(
  folder: str | os.PathLike[str],
  weights: Mapping[str, StoredArray],
  config: Mapping[str, Any],
  tokenizer: str | os.PathLike[str] | None = None,
  shard_bytes: int = _SHARD_BYTES,
) -> None:
  """Writes the weights (in shards if they are large), config.json and a tokenizer's files.

  Args:
    tokenizer: a folder or one file to copy the tokenizer from.
    shard_bytes: the largest size of a file, in bytes.
  """
  from huggingface_hub import split_state_dict_into_shards_factory  # importing it takes time

  root = epath.Path(folder)
  split = split_state_dict_into_shards_factory(
    dict(weights),
    get_storage_size=lambda array: array.nbytes,
    filename_pattern="model{suffix}.safetensors",
    max_shard_size=shard_bytes,
  )
  for file_name, names in split.filename_to_tensors.items():
    safetensors_file.write(root / file_name, {name: weights[name] for name in names})
  if split.is_sharded:
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
  for file in tokenizer_files(tokenizer):
    shutil.copyfile(file, root / (SENTENCEPIECE if file.suffix == ".model" else file.name))
  config = {**config, **write_gpt_tokenizer(root, config)}
  (root / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def tokenizer_files(path: str | os.PathLike[str] | None) -> list[epath.Path]:
  """Returns the tokenizer's files in a folder, or the one file at `path`.

  Raises:
    ValueError: there is nothing at `path`.
  """
  if path is None:
    return []
  given = epath.Path(path)
  if not given.exists():
    raise ValueError(f"--tokenizer {given}: there is no such file or folder")
  if not given.is_dir():
    return [given]
  return sorted(file for file in given.iterdir() if _TOKENIZER.fullmatch(file.name))
