"""Reads and writes Transformers' folders: config.json, files of weights and a tokenizer's files.

A model on Hugging Face's hub is a name such as google/flan-t5-small, which becomes a folder here.
"""

import functools
import importlib.util
import json
import os
import re
import shutil
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rosetta_t5 import terminal
from rosetta_t5.argument_types import check_one_of
from rosetta_t5.checkpoints.arrays.lazy_arrays import Index, StoredArray
from rosetta_t5.checkpoints.formats.hugging_face import layer_settings, name_tables
from rosetta_t5.checkpoints.formats.hugging_face.families import BY_MODEL_TYPE, find_family
from rosetta_t5.checkpoints.formats.hugging_face.name_tables import Arrays, Config
from rosetta_t5.files import expect_content, read_json_object

CONFIG = "config.json"
SENTENCEPIECE = "spiece.model"
MODEL_TYPES = tuple(BY_MODEL_TYPE)
# Where weights are looked for, in this order.
_WEIGHTS = (
  *("model.safetensors.index.json", "model.safetensors"),
  *("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
_SHARD_BYTES = 2_000_000_000  # A file is in memory while it is written.
_TOKENIZER = re.compile(
  r"(tokenizer|special_tokens|added_tokens|chat_template|spiece|generation_config).*"
  r"|vocab\.json|merges\.txt"
)
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_MODULE_FILES = ["[0-9]_*/config.json", "[0-9]_*/model.safetensors"]
_HUB_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
# Entries of a source's config.json that a conversion does not keep, because the class derives them.
_NOT_KEPT = (
  "_name_or_path",
  "scale_decoder_outputs",
  "attention_layers",
  name_tables.PADDING_IS_TOKEN_0,
  *layer_settings.SUPERSEDED,
)
# Entries beside the text part of a multimodal config.json that belong to the text too.
_TEXT_ENTRIES = re.compile(r"\w+_token_id|(torch_)?dtype|tie_word_embeddings|quantization_config")
TEXT_WEIGHTS = re.compile(r"^(language_model\.model|model\.language_model)\.")
_VISION_WEIGHTS = re.compile(r"(model\.)?(encoder\.)?(vision_tower|multi_modal_projector)\..*")


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
  from huggingface_hub import errors, snapshot_download  # importing them takes time

  download = functools.partial(snapshot_download, name, ignore_patterns=["*/*"])
  try:
    folder = download(allow_patterns=[*_HUB_FILES, "*.safetensors"])
    if not any(file.endswith(".safetensors") for file in os.listdir(folder)):
      folder = download(allow_patterns=[*_HUB_FILES, "pytorch_model*.bin"])
    if "modules.json" in os.listdir(folder):  # of sentence-transformers
      download(allow_patterns=_MODULE_FILES, ignore_patterns=None)
  except errors.RepositoryNotFoundError:
    raise ValueError(
      f"There is no folder {name}, and Hugging Face's hub has no model of this name for you: correct the name, or "
      "log in if the model is private or its terms must be accepted (hf auth login)"
    ) from None
  except (OSError, ValueError) as error:
    raise ValueError(
      f"There is no folder {name}, and the model of this name on Hugging Face's hub cannot be "
      f"downloaded: {str(error).partition(chr(10))[0][:200]}. On a machine with a network, run: hf "
      f"download {name} --local-dir {name.split('/')[1]}. Copy this folder here and give its path"
    ) from None
  return str(folder)


def _find_weights(folder: epath.Path) -> epath.Path | None:
  """Returns a folder's file of weights, or the index if there are several files; None without both."""
  return next((folder / name for name in _WEIGHTS if (folder / name).exists()), None)


def is_hugging_face(path: epath.PathLike) -> bool:
  """Returns whether `path` is a folder with config.json and files of weights."""
  root = epath.Path(path)
  return root.is_dir() and (root / CONFIG).exists() and _find_weights(root) is not None


def architecture(model_type: str, network: Any) -> str:
  """Returns the class in Transformers for a model_type and the network's config."""
  name: str = BY_MODEL_TYPE[model_type].MODEL_TYPES[model_type]
  if BY_MODEL_TYPE[model_type].IS_DECODER:
    return name
  return name + ("ForConditionalGeneration" if network.num_decoder_layers else "EncoderModel")


def is_decoder(config: Config) -> bool:
  """Returns whether a config.json belongs to a decoder."""
  family = BY_MODEL_TYPE.get(config.get("model_type"))
  return family is not None and family.IS_DECODER


def read_config(file: epath.PathLike) -> dict[str, Any]:
  """Returns the content of a config.json.

  Raises:
    ValueError: the model is of another family, or computes something that our networks do not.
  """
  config = read_json_object(file)
  if isinstance(text := config.get("text_config"), dict):  # a multimodal model
    others = {key: value for key, value in config.items() if _TEXT_ENTRIES.fullmatch(key)}
    config = {**text, **others, "model_type": f"{config.get('model_type')}_text"}
  name = str(config.get("model_type"))
  check_one_of(f"{file}: model_type", name, MODEL_TYPES)
  family = BY_MODEL_TYPE[name]
  config = {**family.CLASS_DEFAULTS.get(name, {}), **config}
  if family.CLASS_DEFAULTS and config.get("pad_token_id") == 0:
    config[name_tables.PADDING_IS_TOKEN_0] = True
  for key, value in {"quantization_config": None, **family.FIXED}.items():
    if config.get(key, value) != value:
      raise ValueError(f"{file}: {name}: {key} must be {value}, got {config[key]!r}")
  return config


def read_arrays(path: epath.PathLike) -> dict[str, StoredArray]:
  """Returns {our name: array} of the folder at `path`, in the plain tree; values are read later.

  Raises:
    ValueError: files are damaged, weights are missing or belong to another architecture, or
      config.json contradicts them.
  """
  root = epath.Path(path)
  config = read_config(root / CONFIG)
  family = BY_MODEL_TYPE[config["model_type"]]
  used = {name: x for name, x in _text_weights(root).items() if not family.IGNORED.fullmatch(name)}
  arrays: dict[str, StoredArray] = family.read_arrays(used, config)
  network_settings(root / CONFIG, config, arrays)
  return arrays


def network_settings(file: epath.PathLike, config: Config, arrays: Arrays) -> dict[str, Any]:
  """Returns the fields of T5Config or TransformerConfig for a model; sizes are those of its arrays.

  Args:
    file: the path of config.json, for messages.
    config: its content.
    arrays: the model's arrays in the plain tree, by our names.

  Raises:
    ValueError: config.json has settings that our networks do not.
  """
  try:
    return dict(find_family(arrays).network_settings(config, arrays))
  except ValueError as error:
    raise ValueError(f"{file}: {error}") from None


def make_config_and_weights(
  arrays: Arrays,
  network: Any,
  source_config: Config,
  model_type: str | None = None,
) -> tuple[dict[str, Any], dict[str, StoredArray]]:
  """Returns the content of config.json, and {Transformers' name: array}, for a model of this project.

  Args:
    arrays: the model's parameters in the plain tree.
    network: its T5Config or TransformerConfig; None if it is not known.
    source_config: the config.json that the model came with, whose other entries are kept; or {}.
    model_type: the model_type in Transformers; None to derive it from the model.

  Raises:
    ValueError: Transformers has no architecture for the model.
  """
  family = find_family(arrays)
  if network is None and not family.IS_DECODER:
    raise ValueError("--to hf needs the weights of a T5 with relative biases, which these are not")
  derived = family.find_model_type(arrays, network, source_config)
  name = model_type or derived
  check_one_of("for this model, --model-type", name, family.MODEL_TYPES)
  table = next(x for name, x in arrays.items() if name.endswith("token_embedder/embedding"))
  is_same = source_config.get("model_type") in family.MODEL_TYPES
  kept = {key: source_config[key] for key in source_config if is_same and key not in _NOT_KEPT}
  config = {
    **family.DEFAULTS,
    **kept,
    **family.make_config(arrays, network, name, source_config),
    "model_type": name,
    "architectures": [architecture(name, network)],
    **dict.fromkeys(("dtype", "torch_dtype"), table.dtype.name),
    "transformers_version": "5.0.0",
  }
  return config, family.make_weights(arrays, config)


def write(
  folder: epath.PathLike, weights: Arrays, config: Config, tokenizer: epath.PathLike | None = None
) -> None:
  """Writes the weights (in shards if they are large), config.json and a tokenizer's files.

  Args:
    tokenizer: a folder or one file to copy the tokenizer from.
  """
  # Reading checkpoints must not import SentencePiece.
  from rosetta_t5.checkpoints.formats.hugging_face.tokenizer_files import complete_tokenizer

  root = epath.Path(folder)
  _write_weights(root, weights)
  for file in tokenizer_files(tokenizer):
    shutil.copyfile(file, root / (SENTENCEPIECE if file.suffix == ".model" else file.name))
  config = {**config, **complete_tokenizer(root, config)}
  (root / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def tokenizer_files(path: epath.PathLike | None) -> list[epath.Path]:
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


def _text_weights(root: epath.Path) -> dict[str, StoredArray]:
  """Returns the weights of a folder; of a multimodal model, those of its text part."""
  weights = read_weights(root)
  text = {
    TEXT_WEIGHTS.sub("model.", name).removeprefix("language_model."): x
    for name, x in weights.items()
    if not _VISION_WEIGHTS.fullmatch(name)
  }
  if skipped := len(weights) - len(text):
    _note_skipped_vision(os.fspath(root), skipped)
  return text


@functools.cache
def _note_skipped_vision(root: str, count: int) -> None:
  text = f"note: {root}: only text is supported, so {count} weights for images are skipped"
  terminal.print_line(text, sys.stderr)


def read_weights(folder: epath.Path) -> dict[str, StoredArray]:
  """Returns {Transformers' name: array} of all files of weights; the values are read later.

  Raises:
    ValueError: files are missing or damaged, or PyTorch is needed to read them.
  """
  file = _find_weights(folder)
  if file is None:
    raise ValueError(f"{folder} must contain one of {', '.join(_WEIGHTS)}, got none")
  shards = [file.name]
  if file.suffix == ".json":
    with expect_content(file, "the file of each weight"):
      shards = sorted({str(shard) for shard in read_json_object(file)["weight_map"].values()})
  weights: dict[str, StoredArray] = {}
  for shard in shards:
    if not (folder / shard).exists():
      raise ValueError(f"{folder / shard} is missing, although the folder's index lists it")
    read = read_safetensors if shard.endswith(".safetensors") else _read_torch
    weights |= read(folder / shard)
  return weights


def read_safetensors(path: epath.Path) -> dict[str, StoredArray]:
  """Returns {name: array} of a safetensors file; the values are read later.

  Raises:
    ValueError: the file is damaged.
  """
  arrays = {}
  try:
    with safe_open(path, "numpy") as file:
      for name in file.offset_keys():
        shape = file.get_slice(name).get_shape()
        no_rows = tuple(slice(0) for _ in shape[:1])
        dtype = np.asarray(file.get_slice(name)[no_rows or ...]).dtype
        arrays[name] = StoredArray(shape, dtype, functools.partial(_read_part, path, name))
  except (SafetensorError, OSError, AttributeError) as error:  # which do not name the file
    raise ValueError(f"{path} is damaged, or has an unknown dtype: {error}") from error
  return arrays


def _read_part(path: epath.Path, name: str, index: Index) -> np.ndarray:
  # Each read maps the file anew, so that the pages of earlier reads are not kept in memory.
  with safe_open(path, "numpy") as file:
    return np.asarray(file.get_slice(name)[index or ...])


def _read_torch(path: epath.Path) -> dict[str, StoredArray]:
  if importlib.util.find_spec("torch") is None:
    raise ValueError(f"{path} needs PyTorch: use a folder with model.safetensors, or install torch")
  import torch

  def as_array(tensor: Any) -> StoredArray:
    dtype = jnp.dtype(str(tensor.dtype).removeprefix("torch."))
    stored = tensor.view(torch.int16) if dtype == jnp.bfloat16 else tensor  # numpy has no bfloat16
    return StoredArray(tensor.shape, dtype, lambda index: stored[index].numpy().view(dtype))

  try:
    state = dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
  except Exception as error:  # Unpickling may raise any class of errors.
    raise ValueError(f"{path} is not a file of weights, or is damaged: {error}") from error
  return {name: as_array(x) for name, x in state.items() if isinstance(x, torch.Tensor)}


def _write_weights(folder: epath.Path, weights: Arrays) -> None:
  """Writes safetensors files: several with an index if the weights have more than 2 GB."""
  from huggingface_hub import split_state_dict_into_shards_factory  # importing it takes time

  split = split_state_dict_into_shards_factory(
    dict(weights),
    get_storage_size=lambda array: array.nbytes,
    filename_pattern="model{suffix}.safetensors",
    max_shard_size=_SHARD_BYTES,
  )
  for file, names in split.filename_to_tensors.items():
    tracked = terminal.track(names, f"writing {file}", len(names), "arrays")
    # safetensors requires arrays in C's order.
    tensors = {name: np.asarray(weights[name].get(), order="C") for name in tracked}
    save_file(tensors, folder / file, metadata={"format": "pt"})
  if split.is_sharded:
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (folder / _WEIGHTS[0]).write_text(json.dumps(index, indent=2))
