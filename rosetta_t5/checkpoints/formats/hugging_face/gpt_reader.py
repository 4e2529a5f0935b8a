"""Reads Hugging Face's GPT-2 and GPT-Neo: their names and layouts beside `networks.decoder_only`'s.

Ids are one higher here, since 0 is padding and starts a sequence: row 0 of the table is a copy of the
token's that GPT's have seen before a text, <|endoftext|>, and `padding_never_follows` takes its logit
away. Folders that `hugging_face_gpt_writer` made of models with 0 as padding say so (KEEPS_IDS).
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from rosetta_t5.checkpoints.arrays.lazy_arrays import Index, StoredArray, transpose
from rosetta_t5.checkpoints.formats.hugging_face.gpt_names import (
  EMBEDDING,
  FAMILIES,
  SIZES,
  Row,
  biases_only_here,
  rows,
)

KEEPS_IDS = "padding_is_token_0"
_log = logging.getLogger(__name__)

# What PyTorch keeps besides: masks, and the tied output layer.
_COPIES = re.compile(r"h\.\d+\.attn\.(attention\.)?(masked_)?bias|lm_head\.weight")
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")


def read_config(file: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns a config.json of GPT-2 or GPT-Neo.

  Raises:
    ValueError: it is another model's.
  """
  config: dict[str, Any] = json.loads(epath.Path(file).read_text())
  if config.get("model_type") not in FAMILIES:
    raise ValueError(
      f"{file} says model_type = {config.get('model_type')!r}, but a decoder's is one of "
      f"{', '.join(FAMILIES)}"
    )
  return config


def network_values(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what `network.TransformerConfig` must say for a config.json of GPT-2 or GPT-Neo.

  Raises:
    ValueError: the model has switches that the network lacks.
  """
  is_neo = config["model_type"] == "gpt_neo"
  sizes: dict[str, Any] = {
    ours: config.get(theirs) for ours, theirs in SIZES[config["model_type"]].items()
  }
  width = sizes["emb_dim"]
  sizes["mlp_dim"] = sizes["mlp_dim"] or 4 * width
  _check(config)
  keeps_ids = bool(config.get(KEEPS_IDS))
  return {
    "vocab_size": config["vocab_size"] + (not keeps_ids),
    **sizes,
    "head_dim": width // sizes["num_heads"],
    "mlp_activations": ("gelu",),
    "logits_via_embedding": True,
    "positions": "learned",
    "norm": "layer",
    "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
    "use_bias": True,
    "scale_queries": not is_neo,
    "float32_attention_logits": is_neo,
    "divide_tied_logits": False,
    "padding_never_follows": not keeps_ids,
    "local_attention_window": _window(config),
  }


def _check(config: Mapping[str, Any]) -> None:
  """Refuses what would be computed otherwise."""
  activation = config.get("activation_function", "gelu_new")
  if activation not in _TANH_GELU:
    raise ValueError(f"activation_function = {activation!r} is none of {', '.join(_TANH_GELU)}")
  for name, expected in (
    ("scale_attn_weights", True),
    ("scale_attn_by_inverse_layer_idx", False),
    ("add_cross_attention", False),
    ("tie_word_embeddings", True),
  ):
    if config.get(name, expected) != expected:
      raise ValueError(f"{name} = {config[name]}, but this network's GPT has {expected}: not read")


def _window(config: Mapping[str, Any]) -> int | None:
  """Returns how far GPT-Neo's local layers see; None where there are none."""
  kinds = [kind for group, times in config.get("attention_types", []) for kind in group * times]
  if "local" not in kinds:
    return None
  if kinds != [("global", "local")[layer % 2] for layer in range(len(kinds))]:
    raise ValueError(
      f"attention_types = {config['attention_types']}, but local layers must be every second one"
    )
  return int(config.get("window_size", 256))


def read_arrays(
  weights: Mapping[str, StoredArray], config: Mapping[str, Any]
) -> dict[str, StoredArray]:
  """Returns {our name: array} of a model's weights; values are read later.

  Args:
    weights: {Hugging Face's name: array}, without the prefix `transformer.`.
    config: config.json.

  Raises:
    ValueError: weights are missing or strange, or the model has switches that the network lacks.
  """
  values = network_values(config)
  told = ", ".join(f"{name} = {value!r}" for name, value in values.items())
  _log.info("Hugging Face's %s needs network.TransformerConfig: %s", config["model_type"], told)
  table = rows(config["model_type"], values["num_layers"])
  _check_names(config["model_type"], weights, table)
  arrays: dict[str, StoredArray] = {}
  for row in table:
    arrays |= _ours(row, weights[row.theirs])
  if not config.get(KEEPS_IDS):
    arrays[EMBEDDING] = _with_first_row(arrays[EMBEDDING], start_token(config))
  for name in biases_only_here(config["model_type"], values["num_layers"]):
    arrays[name] = _zeros(arrays[f"{name.removesuffix('bias')}kernel"].shape[1])
  return arrays


def start_token(config: Mapping[str, Any]) -> int:
  """Returns the token that texts begin with; the first one where config.json names none there is."""
  named = (config.get("bos_token_id"), config.get("eos_token_id"))
  tokens = (token for token in named if token is not None and 0 <= token < config["vocab_size"])
  return int(next(tokens, 0))


def _check_names(family: str, weights: Mapping[str, StoredArray], table: list[Row]) -> None:
  known = {row.theirs for row in table}
  strangers = sorted(name for name in weights if name not in known and not _COPIES.fullmatch(name))
  if strangers:
    raise ValueError(f"weights that a {family} has not: {', '.join(strangers[:8])}")
  missing = [row.theirs for row in table if row.theirs not in weights]
  if missing:
    raise ValueError(
      f"no {', '.join(missing[:8])}: the folder lacks {len(missing)} of {len(table)} weights of its "
      f"{family}"
    )


def _ours(row: Row, array: StoredArray) -> dict[str, StoredArray]:
  """Returns one weight under our names."""
  if row.is_turned:
    array = transpose(array)
  if len(row.ours) == 1:
    return {row.ours[0]: array}
  size = array.shape[-1] // len(row.ours)
  return {name: _columns(array, place * size, size) for place, name in enumerate(row.ours)}


def _columns(array: StoredArray, start: int, size: int) -> StoredArray:
  """Returns `size` columns of a matrix or elements of a vector."""

  def read(index: Index) -> np.ndarray:
    last = slice(index[-1].start + start, index[-1].stop + start)
    return array.read((*index[:-1], last))

  return StoredArray((*array.shape[:-1], size), array.dtype, read, array.sliceable)


def _with_first_row(array: StoredArray, row: int) -> StoredArray:
  """Returns a table with a copy of one of its rows before the first."""

  def read(index: Index) -> np.ndarray:
    start, stop = index[0].start, index[0].stop
    parts = [array.read((slice(row, row + 1), index[1]))] if start == 0 < stop else []
    parts.append(array.read((slice(max(start - 1, 0), max(stop - 1, 0)), index[1])))
    return np.concatenate(parts)

  shape = (array.shape[0] + 1, *array.shape[1:])
  return StoredArray(shape, array.dtype, read, array.sliceable)


def _zeros(size: int) -> StoredArray:
  return StoredArray((size,), np.float32, lambda index: np.zeros(size, np.float32)[index])


__all__ = ["FAMILIES", "KEEPS_IDS", "network_values", "read_arrays", "read_config", "start_token"]
