"""Files of weights: safetensors, and PyTorch's, which only PyTorch reads."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import struct
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open

from rosetta_t5 import terminal
from rosetta_t5.checkpoints.arrays.lazy_arrays import Index, StoredArray
from rosetta_t5.files import read_json_object

# Where weights are looked for, in this order.
NAMES = (
  *("model.safetensors.index.json", "model.safetensors"),
  *("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
INDEX = NAMES[0]
_SHARD = re.compile(r"[^/\\\0]+\.(safetensors|bin)")
_SHARD_BYTES = 5_000_000_000
_DTYPES = {
  **{f"F{bits}": jnp.dtype(f"float{bits}") for bits in (64, 32, 16)},
  **{f"I{bits}": jnp.dtype(f"int{bits}") for bits in (64, 32, 16, 8)},
  "BF16": jnp.dtype(jnp.bfloat16),
  "U8": jnp.dtype("uint8"),
  "BOOL": jnp.dtype("bool"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def find(folder: epath.Path) -> epath.Path | None:
  """Returns a folder's file of weights, or the index if there are several files; None without both."""
  return next((folder / name for name in NAMES if (folder / name).exists()), None)


def read(folder: epath.Path) -> dict[str, StoredArray]:
  """Returns {Transformers' name: array} of all files of weights; the values are read later.

  Raises:
    ValueError: files are missing or damaged, or PyTorch is needed to read them.
  """
  file = find(folder)
  if file is None:
    raise ValueError(f"{folder} must contain one of {', '.join(NAMES)}, got none")
  if not file.name.endswith(".index.json"):
    return _read_file(file)
  weights: dict[str, StoredArray] = {}
  weight_map = _read_weight_map(file)
  for shard in sorted(set(weight_map.values())):
    if not (folder / shard).exists():
      raise ValueError(f"{folder / shard} is missing, although the folder's index lists it")
    weights |= _read_file(folder / shard)
  if missing := [name for name in weight_map if name not in weights]:
    raise ValueError(
      f"{folder / weight_map[missing[0]]} lacks {missing[0]}, although {file.name} lists it there"
    )
  return weights


def _read_weight_map(index: epath.Path) -> dict[str, str]:
  """Returns {name of a weight: name of its file} of an index."""
  weight_map: Any = read_json_object(index).get("weight_map")
  files = list(weight_map.values()) if isinstance(weight_map, dict) else [weight_map]
  if wrong := [file for file in files if not _SHARD.fullmatch(str(file))]:
    raise ValueError(
      f"{index}: weight_map must name files of the same folder, such as "
      f"model-00001-of-00002.safetensors, got {wrong[0]!r}"
    )
  return dict(weight_map)


def _read_file(file: epath.Path) -> dict[str, StoredArray]:
  return _read_safetensors(file) if file.suffix == ".safetensors" else _read_torch(file)


def _read_safetensors(path: epath.Path) -> dict[str, StoredArray]:
  arrays = {}
  try:
    with safe_open(path, "numpy") as file:
      for name in file.offset_keys():
        part = file.get_slice(name)
        if part.get_dtype() not in _DTYPES:
          raise ValueError(
            f"{path}: the dtype of {name} must be one of {', '.join(_DTYPES)}, got "
            f"{part.get_dtype()}"
          )
        read_part = functools.partial(_read_part, path, name)
        arrays[name] = StoredArray(part.get_shape(), _DTYPES[part.get_dtype()], read_part)
  except (SafetensorError, OSError) as error:  # which do not name the file
    raise ValueError(f"{path} is damaged: {error}") from error
  return arrays


def _read_part(path: epath.Path, name: str, index: Index) -> np.ndarray:
  # Each read maps the file anew, so that the pages of earlier reads are not kept in memory.
  with safe_open(path, "numpy") as file:
    return np.asarray(file.get_slice(name)[index or ...])


def _read_torch(path: epath.Path) -> dict[str, StoredArray]:
  if importlib.util.find_spec("torch") is None:
    raise ValueError(
      f"{path} can only be read with PyTorch, which is not installed: use a folder with "
      "model.safetensors, or run pip install torch"
    )
  import torch

  try:
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
  except Exception as error:  # Unpickling may raise any class of errors.
    reason = str(error).partition("\n")[0]
    raise ValueError(f"{path} is not a file of weights, or is damaged: {reason}") from error
  state = state.get("state_dict", state) if isinstance(state, dict) else {}
  return {name: _torch_array(x) for name, x in state.items() if isinstance(x, torch.Tensor)}


def _torch_array(tensor: Any) -> StoredArray:
  import torch

  dtype = jnp.dtype(str(tensor.dtype).removeprefix("torch."))
  stored = tensor.view(torch.int16) if dtype == jnp.bfloat16 else tensor  # numpy has no bfloat16
  return StoredArray(tensor.shape, dtype, lambda index: stored[index].numpy().view(dtype))


def write(folder: epath.Path, weights: Mapping[str, StoredArray]) -> None:
  """Writes safetensors files: several with an index if the weights have more than 5 GB."""
  from huggingface_hub import split_state_dict_into_shards_factory  # importing it takes time

  split = split_state_dict_into_shards_factory(
    dict(weights),
    get_storage_size=lambda array: array.nbytes,
    filename_pattern="model{suffix}.safetensors",
    max_shard_size=_SHARD_BYTES,
  )
  for file_name, names in split.filename_to_tensors.items():
    _write_safetensors(folder / file_name, {name: weights[name] for name in names})
  if split.is_sharded:
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def _write_safetensors(path: epath.Path, arrays: Mapping[str, StoredArray]) -> None:
  """Writes one file; only a part of one tensor is in memory at a time."""
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  offset = 0
  for name, array in arrays.items():
    span = [offset, offset + array.nbytes]
    header[name] = {"dtype": _CODES[array.dtype], "shape": array.shape, "data_offsets": span}
    offset = span[1]
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)
  with open(path, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    for array in terminal.track(arrays.values(), "writing", len(arrays), "arrays"):
      for part in array.parts():
        file.write(np.ascontiguousarray(array.read(part)).tobytes())
    file.flush()
    os.fsync(file.fileno())
