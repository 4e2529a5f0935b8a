"""Reads and writes Transformers' folders: config.json, files of weights and a tokenizer's files.

A model on Hugging Face's hub is a name such as google/flan-t5-small, which becomes a folder here.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from typing import Any

from etils import epath

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.formats.hugging_face import gpt, t5, weight_files
from rosetta_t5.checkpoints.formats.hugging_face.name_tables import list_names
from rosetta_t5.files import read_json_object

CONFIG = "config.json"
SENTENCEPIECE = "spiece.model"
FAMILIES = (*t5.FAMILIES, *gpt.FAMILIES)
_TOKENIZER = re.compile(
  r"(tokenizer|special_tokens|added_tokens|spiece|generation_config).*|vocab\.json|merges\.txt"
)
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
# Entries that may be null, which stands for a size that is derived from others.
_NULLABLE = ("num_decoder_layers", "n_inner", "intermediate_size")
_log = logging.getLogger(__name__)


def local_folder(source: epath.PathLike) -> str:
  """Returns the folder of a model on the hub, which is downloaded unless it is in the hub's cache.

  Args:
    source: OWNER/NAME. A path that exists, one that begins with an existing folder, and any other path
      are returned unchanged.

  Raises:
    ValueError: there is no such model, or it cannot be downloaded.
  """
  name = os.fspath(source)
  if not _HUB_NAME.fullmatch(name) or os.path.lexists(name) or os.path.isdir(name.split("/")[0]):
    return name
  from huggingface_hub import snapshot_download  # importing it takes time

  download = functools.partial(snapshot_download, name, ignore_patterns=["*/*"])
  try:
    folder = download(allow_patterns=[*_HUB_FILES, "*.safetensors"])
    if not any(file.endswith(".safetensors") for file in os.listdir(folder)):
      folder = download(allow_patterns=[*_HUB_FILES, "pytorch_model*.bin"])
  except (OSError, ValueError) as error:
    raise ValueError(
      f"There is no folder {name}, and the model of this name on Hugging Face's hub cannot be "
      f"downloaded: {str(error).partition(chr(10))[0][:200]}. On a machine with a network, run: hf "
      f"download {name} --local-dir {name.split('/')[1]}. Copy this folder here and give its path"
    ) from None
  return str(folder)


def is_hugging_face(path: str | os.PathLike[str]) -> bool:
  """Returns whether `path` is a folder with config.json and files of weights."""
  root = epath.Path(path)
  return root.is_dir() and (root / CONFIG).exists() and weight_files.find(root) is not None


def is_gpt(config: Mapping[str, Any]) -> bool:
  """Returns whether a config.json belongs to a decoder."""
  return config.get("model_type") in gpt.FAMILIES


def has_shifted_ids(config: Mapping[str, Any]) -> bool:
  """Returns whether our ids are one higher than those of a config.json, whose id 0 is not padding."""
  return is_gpt(config) and not config.get(gpt.PADDING_IS_TOKEN_0)


def _family(config: Mapping[str, Any]) -> Any:
  return gpt if is_gpt(config) else t5


def architecture(model_type: str, network: Any) -> str:
  """Returns the class in Transformers for a family and the network's config."""
  if model_type in gpt.FAMILIES:
    return gpt.FAMILIES[model_type]
  suffix = "ForConditionalGeneration" if network.num_decoder_layers else "EncoderModel"
  return t5.FAMILIES[model_type] + suffix


def read_config(file: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns the content of a config.json.

  Raises:
    ValueError: the model is of another family, or computes something that our networks do not.
  """
  config = read_json_object(file)
  family = config.get("model_type")
  if family not in list(FAMILIES):  # A list also accepts values that cannot be hashed.
    raise ValueError(f"{file}: model_type must be one of {', '.join(FAMILIES)}, got {family!r}")
  for key, value in _family(config).FIXED.items():
    if config.get(key, value) != value:
      raise ValueError(
        f"{file}: {key} must be {value}, got {config[key]!r}, which this project's {family} does not "
        "support"
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
  family = _family(config)
  # Transformers adds this prefix where a GPT is saved with its output layer.
  weights = {name.removeprefix("transformer."): x for name, x in weight_files.read(root).items()}
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
    ValueError: the shapes of the arrays contradict the sizes in config.json, or it has settings that
      our networks do not.
  """
  family, sizes = _family(config), _family(config).sizes(arrays)
  sizes["vocab_size"] -= has_shifted_ids(config)
  entries = gpt.SIZES[config["model_type"]] if is_gpt(config) else t5.SIZES
  for entry, field in (entries | {"vocab_size": "vocab_size"}).items():
    size = sizes.get(field)
    value = config.get(entry, size)
    if size and value != size and not (value is None and entry in _NULLABLE):
      raise ValueError(f"{file}: {entry} must be {size}, as in the weights, got {value!r}")
  try:
    settings: dict[str, Any] = family.network_settings(config, arrays)
  except ValueError as error:
    raise ValueError(f"{file}: {error}") from None
  return settings


def make_config_and_weights(
  arrays: Mapping[str, StoredArray],
  network: Any,
  source_config: Mapping[str, Any],
  ids_are_shifted: bool = False,
  model_type: str | None = None,
) -> tuple[dict[str, Any], dict[str, StoredArray]]:
  """Returns the content of config.json, and {Transformers' name: array}, for a model of this project.

  Args:
    arrays: the model's parameters in the plain tree.
    network: its T5Config or TransformerConfig; None if it is not known.
    source_config: the config.json that the model came with, whose other entries are kept; or {}.
    ids_are_shifted: whether our ids are one higher than the tokenizer's, which has no padding.
    model_type: the family in Transformers; None to derive it from the model.

  Raises:
    ValueError: Transformers has no architecture for the model.
  """
  if any(name.startswith("target/encoder/") for name in arrays):
    table = arrays[t5.EMBEDDING]
    family = model_type or t5.find_family(arrays, source_config)
    entries = t5.make_config(arrays, network, family, source_config)
  else:
    gpt.check_is_gpt(arrays)
    if network is None:
      raise ValueError(
        "the heads and windows of a decoder cannot be derived from its weights: set --config to the "
        "config.gin of the run that trained it, or to the config.json that it came with"
      )
    table = arrays[gpt.EMBEDDING]
    family = model_type or gpt.find_family(network)
    entries = gpt.make_config(arrays, network, family, source_config, ids_are_shifted)
  config = {
    **entries,
    "model_type": family,
    "architectures": [architecture(family, network)],
    "dtype": table.dtype.name,
    "torch_dtype": table.dtype.name,
    "transformers_version": "5.0.0",
  }
  return config, _family(config).make_weights(arrays, network, config)


def write(
  folder: str | os.PathLike[str],
  weights: Mapping[str, StoredArray],
  config: Mapping[str, Any],
  tokenizer: str | os.PathLike[str] | None = None,
) -> None:
  """Writes the weights (in shards if they are large), config.json and a tokenizer's files.

  Args:
    tokenizer: a folder or one file to copy the tokenizer from.
  """
  # Reading checkpoints must not import SentencePiece.
  from rosetta_t5.checkpoints.formats.hugging_face.tokenizer_files import complete_tokenizer

  root = epath.Path(folder)
  weight_files.write(root, weights)
  for file in tokenizer_files(tokenizer):
    shutil.copyfile(file, root / (SENTENCEPIECE if file.suffix == ".model" else file.name))
  config = {**config, **complete_tokenizer(root, config)}
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
