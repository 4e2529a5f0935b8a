"""Writes a T5 as a folder that Transformers loads: safetensors, config.json, the tokenizer's files."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray, scale, transpose
from rosetta_t5.checkpoints.formats import safetensors_file
from rosetta_t5.checkpoints.formats.hugging_face.gpt_tokenizer import (
  SENTENCEPIECE,
  write_gpt_tokenizer,
)
from rosetta_t5.checkpoints.formats.hugging_face.t5_names import EMBEDDING, HEAD, HF_HEAD, hf_name

_SHARD_BYTES = 5_000_000_000
_MT5_VOCABULARY = 250112
_TOKENIZER = re.compile(
  r"(tokenizer|special_tokens|added_tokens|spiece|generation_config).*|vocab\.json|merges\.txt"
)
_CLASSES = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}
# Flax's names of activations beside Transformers'; T5 1.1's GELU is the one with tanh.
_PROJECTIONS = {
  ("relu",): "relu",
  ("gelu",): "gelu_new",
  ("gelu", "linear"): "gated-gelu",
  ("silu", "linear"): "gated-silu",
  ("swish", "linear"): "gated-silu",
  ("relu", "linear"): "gated-relu",
}


def model_type(arrays: Mapping[str, StoredArray]) -> str:
  """Returns the family that weights are of: UMT5 has a bias a layer, mT5 its vocabulary."""
  if any(re.search(r"/layers_\d+/relpos_bias/", name) for name in arrays):
    return "umt5"
  return "mt5" if arrays[EMBEDDING].shape[0] == _MT5_VOCABULARY else "t5"


def make_config(
  arrays: Mapping[str, StoredArray],
  family: str,
  activations: Sequence[str],
  base: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """Returns config.json for weights in T5X's plain tree.

  Args:
    arrays: by T5X's names, kernels 2-D.
    family: 't5', 'mt5' or 'umt5'.
    activations: flax's names, such as ('gelu', 'linear').
    base: another config, whose further entries are kept.
  """
  projection = _PROJECTIONS.get(tuple(activations))
  if projection is None:
    raise ValueError(
      f"mlp_activations = {tuple(activations)} has no name in Transformers' T5; it knows "
      f"{', '.join(map(str, _PROJECTIONS))}"
    )
  vocabulary, width = arrays[EMBEDDING].shape
  heads, buckets = next(x for n, x in arrays.items() if n.endswith("rel_embedding")).shape
  joined = arrays["target/encoder/layers_0/attention/query/kernel"].shape[1]
  hidden = next(x for n, x in arrays.items() if n.endswith("/mlp/wo/kernel")).shape[0]
  full = HEAD in arrays or any(name.startswith("target/decoder/") for name in arrays)
  kind = "ForConditionalGeneration" if full else "EncoderModel"
  dtype = arrays[EMBEDDING].dtype.name
  config = {
    "dropout_rate": 0.1,
    "initializer_factor": 1.0,
    **{k: v for k, v in (base or {}).items() if k not in ("_name_or_path", "torch_dtype")},
    "architectures": [_CLASSES[family] + kind],
    "model_type": family,
    "vocab_size": vocabulary,
    "d_model": width,
    "d_kv": joined // heads,
    "d_ff": hidden,
    "num_heads": heads,
    "num_layers": _layers(arrays, "encoder"),
    "num_decoder_layers": _layers(arrays, "decoder") or _layers(arrays, "encoder"),
    "relative_attention_num_buckets": buckets,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": projection,
    "is_gated_act": projection.startswith("gated-"),
    "dense_act_fn": "gelu_new" if projection == "gated-gelu" else projection.split("-")[-1],
    "is_encoder_decoder": full,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "use_cache": full,
    "dtype": dtype,
    "torch_dtype": dtype,
    "transformers_version": "5.0.0",
  }
  config.pop("scale_decoder_outputs", None)
  # Transformers 4 goes by this, 5 by `scale_decoder_outputs`; T5 1.0 needs True in both.
  config["tie_word_embeddings"] = HEAD not in arrays or family == "umt5"
  return config


def _layers(arrays: Mapping[str, StoredArray], side: str) -> int:
  pattern = re.compile(rf"target/{side}/layers_(\d+)/")
  return 1 + max((int(m[1]) for name in arrays if (m := pattern.match(name))), default=-1)


def weights(arrays: Mapping[str, StoredArray], family: str) -> dict[str, StoredArray]:
  """Returns {Hugging Face's name: array} for weights in T5X's plain tree.

  Raises:
    ValueError: a name has no place in Hugging Face's T5.
  """
  theirs, strangers = {}, []
  for name, array in arrays.items():
    found = hf_name(name)
    if found is None:
      strangers.append(name)
      continue
    theirs[found[0]] = transpose(array) if found[1] else array
  if strangers:
    raise ValueError(
      f"Hugging Face's T5 has no place for {', '.join(sorted(strangers)[:6])}"
      + (f" and {len(strangers) - 6} more" if len(strangers) > 6 else "")
    )
  width = math.sqrt(arrays[EMBEDDING].shape[1])
  if family == "umt5" and HF_HEAD in theirs:
    # Transformers 5 divides what goes into UMT5's head by √d_model, whatever its config says.
    theirs[HF_HEAD] = scale(theirs[HF_HEAD], width)
  if family == "mt5" and HF_HEAD not in theirs and any("decoder" in name for name in theirs):
    # Its mT5 never divides, so tied logits need a head of their own.
    theirs[HF_HEAD] = scale(theirs["shared.weight"], 1 / width)
  return theirs


def write(
  folder: str | os.PathLike[str],
  theirs: Mapping[str, StoredArray],
  config: Mapping[str, Any],
  tokenizer: str | os.PathLike[str] | None = None,
  shard_bytes: int = _SHARD_BYTES,
) -> None:
  """Writes the folder: weights (in shards if they are large), config.json and a tokenizer's files.

  Args:
    folder: where; it exists.
    theirs: by Hugging Face's names.
    config: what becomes config.json.
    tokenizer: a folder or one file to copy the tokenizer from.
    shard_bytes: the size from which weights are split.
  """
  root = epath.Path(folder)
  shards = _shards(theirs, shard_bytes)
  if len(shards) == 1:
    safetensors_file.write(root / "model.safetensors", theirs)
  else:
    weight_map = {}
    for number, names in enumerate(shards, 1):
      file = f"model-{number:05}-of-{len(shards):05}.safetensors"
      safetensors_file.write(root / file, {name: theirs[name] for name in names})
      weight_map.update(dict.fromkeys(names, file))
    size = sum(array.nbytes for array in theirs.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
  for file in tokenizer_files(tokenizer):
    shutil.copyfile(file, root / (SENTENCEPIECE if file.suffix == ".model" else file.name))
  config = {**config, **write_gpt_tokenizer(root, config)}
  (root / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def tokenizer_files(place: str | os.PathLike[str] | None) -> list[epath.Path]:
  """Returns the tokenizer's files in a folder, or the one file given."""
  if place is None:
    return []
  given = epath.Path(place)
  if not given.exists():
    raise ValueError(f"--tokenizer {given}: there is no such file or folder")
  if not given.is_dir():
    return [given]
  return sorted(file for file in given.iterdir() if _TOKENIZER.fullmatch(file.name))


def _shards(theirs: Mapping[str, StoredArray], limit: int) -> list[list[str]]:
  shards: list[list[str]] = [[]]
  used = 0
  for name, array in theirs.items():
    if shards[-1] and used + array.nbytes > limit:
      shards.append([])
      used = 0
    shards[-1].append(name)
    used += array.nbytes
  return shards
