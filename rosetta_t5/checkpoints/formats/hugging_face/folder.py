"""Reads and writes Transformers' folders: config.json, files of weights and a tokenizer's files."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import reprlib
import shutil
from collections.abc import Mapping
from typing import Any

from etils import epath

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.formats import safetensors_file, torch_file
from rosetta_t5.checkpoints.formats.hugging_face import gpt, t5
from rosetta_t5.checkpoints.formats.hugging_face.gpt_tokenizer import (
  SENTENCEPIECE,
  write_gpt_tokenizer,
  write_t5_tokenizer,
)
from rosetta_t5.checkpoints.formats.hugging_face.weight_mapping import list_names
from rosetta_t5.files import read_json_object

CONFIG = "config.json"
FAMILIES = (*t5.FAMILIES, *gpt.FAMILIES)
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
_LAYER = re.compile(r"layers_\d+")
_log = logging.getLogger(__name__)
# Entries of a GPT's config.json with the only value that the networks support, which is the default.
_GPT_VALUES = {
  "scale_attn_weights": True,
  "scale_attn_by_inverse_layer_idx": False,
  "add_cross_attention": False,
  "tie_word_embeddings": True,
}
_BOOLEANS = ("tie_word_embeddings", "scale_decoder_outputs", gpt.PADDING_IS_TOKEN_0)
# Entries that may be null, which stands for a size that is derived from others.
_NULLABLE = ("num_decoder_layers", "n_inner", "intermediate_size")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


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


def is_gpt(config: Mapping[str, Any]) -> bool:
  """Returns whether a config.json belongs to a decoder."""
  return config.get("model_type") in gpt.FAMILIES


def architecture(config: Mapping[str, Any], network: Any) -> str:
  """Returns the class in Transformers for a config.json and the network's config."""
  family = config["model_type"]
  if is_gpt(config):
    return gpt.FAMILIES[family].architecture
  suffix = "ForConditionalGeneration" if network.num_decoder_layers else "EncoderModel"
  return t5.FAMILIES[family] + suffix


def read_config(file: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns the content of a config.json.

  Raises:
    ValueError: the model is of another family, or computes something that our networks do not.
  """
  config = read_json_object(file)
  family = config.get("model_type")
  if family not in list(FAMILIES):  # A list also accepts values that cannot be hashed.
    raise ValueError(
      f"{file}: model_type must be one of {', '.join(FAMILIES)}, got {reprlib.repr(family)}"
    )
  for key, value in (_GPT_VALUES if is_gpt(config) else {}).items():
    if config.get(key, value) != value:
      raise ValueError(
        f"{file}: {key} must be {value}, got {reprlib.repr(config[key])}, which this project's "
        f"{family} does not support"
      )
  for entry in _BOOLEANS:
    if not isinstance(config.get(entry), bool | None):
      raise ValueError(f"{file}: {entry} must be true or false, got {reprlib.repr(config[entry])}")
  return config


def read_arrays(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
  """Returns {our name: array} of the folder at `path`, in the plain tree; values are read later.

  Raises:
    ValueError: files are damaged, weights are missing or belong to another architecture, or
      config.json contradicts them.
  """
  root = epath.Path(path)
  config = read_config(root / CONFIG)
  family: Any = gpt if is_gpt(config) else t5
  # Transformers adds this prefix where a GPT is saved with its output layer.
  weights = {name.removeprefix("transformer."): x for name, x in _read_weights(root).items()}
  if ignored := [name for name in weights if family.IGNORED.fullmatch(name)]:
    _report_ignored(os.fspath(root), list_names(ignored))
  used = {name: array for name, array in weights.items() if name not in ignored}
  arrays: dict[str, StoredArray] = family.read_arrays(used, config)
  network_settings(root / CONFIG, config, arrays)
  return arrays


@functools.cache
def _report_ignored(folder: str, names: str) -> None:
  _log.warning("%s: these weights are not used, as in Transformers: %s", folder, names)


def network_settings(
  file: str | os.PathLike[str], config: Mapping[str, Any], arrays: Mapping[str, StoredArray]
) -> dict[str, Any]:
  """Returns the fields of T5Config or TransformerConfig for a model, after comparing the two arguments.

  Args:
    file: the path of config.json, for messages.
    config: its content.
    arrays: the model's arrays in the plain tree, by our names.

  Raises:
    ValueError: the shapes of the arrays contradict each other or the sizes in config.json, or it has
      entries of a wrong kind.
  """
  for name, array in arrays.items():
    first = arrays.get(_LAYER.sub("layers_0", name), array)
    if array.shape != first.shape:
      raise ValueError(
        f"{name} must have the shape {first.shape} that it has in layer 0, got {array.shape}"
      )
  try:
    settings = _checked_settings(config, arrays)
  except ValueError as error:
    raise ValueError(f"{file}: {error}") from None
  return settings


def _checked_settings(
  config: Mapping[str, Any], arrays: Mapping[str, StoredArray]
) -> dict[str, Any]:
  family: Any = gpt if is_gpt(config) else t5
  found: dict[str, int] = family.sizes(arrays)
  names = t5.SIZES
  if is_gpt(config):
    names = {**gpt.FAMILIES[config["model_type"]].sizes, "vocab_size": "vocab_size"}
    found["vocab_size"] -= not config.get(gpt.PADDING_IS_TOKEN_0)
  for entry, field in names.items():
    size = found.get(field)
    value = config.get(entry, size)
    is_derived = value is None and entry in _NULLABLE
    if size and not is_derived and not (type(value) is int and value == size):
      raise ValueError(f"{entry} must be {size}, as in the weights, got {reprlib.repr(value)}")
  for entry in _TOKENS:
    tokens = config.get(entry)
    if not all(type(x) is int for x in (tokens if isinstance(tokens, list) else [tokens or 0])):
      raise ValueError(f"{entry} must be a token's number or null, got {reprlib.repr(tokens)}")
  epsilon = config.get("layer_norm_epsilon", 1e-6)
  if type(epsilon) not in (int, float) or not 0 < epsilon < math.inf:
    raise ValueError(
      f"layer_norm_epsilon must be a number greater than 0, got {reprlib.repr(epsilon)}"
    )
  settings: dict[str, Any] = family.network_settings(config, arrays)
  return settings


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
  model = root / SENTENCEPIECE
  if model.exists() and not config.get("pad_token_id") and not (root / "tokenizer.json").exists():
    # Reading checkpoints must not import SentencePiece.
    from rosetta_t5.data.vocabularies.sentencepiece_models import read_padded_model

    model.write_bytes(read_padded_model(model))
    config = config if is_gpt(config) else {**config, **write_t5_tokenizer(root, config)}
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
