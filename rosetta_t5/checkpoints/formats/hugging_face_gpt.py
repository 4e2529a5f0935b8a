"""Reads Hugging Face's GPT-2 and GPT-Neo: their names and layouts beside `networks.decoder_only`'s.

Ids are one higher here, since 0 is padding and starts a sequence: row 0 of the table is a copy of
<|endoftext|>'s, which GPT's have seen before a text, and `padding_never_follows` takes its logit away.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rosetta_t5.checkpoints.lazy_arrays import Index, StoredArray, transposed

FAMILIES = ("gpt2", "gpt_neo")
_log = logging.getLogger(__name__)

_EMBEDDING = "target/decoder/token_embedder/embedding"
_LAYER = re.compile(r"h\.(\d+)\.(.+)\.(weight|bias)")
# What PyTorch keeps besides: masks, and the tied output layer.
_COPIES = re.compile(r"h\.\d+\.attn\.(attention\.)?(masked_)?bias|lm_head\.weight")
_NORMS = {"ln_1": "pre_self_attention_layer_norm", "ln_2": "pre_mlp_layer_norm"}
# (theirs, ours, whether the kernel is stored transposed)
_PROJECTIONS = {
  "gpt2": {
    "attn.c_proj": ("self_attention/out", False),
    "mlp.c_fc": ("mlp/wi", False),
    "mlp.c_proj": ("mlp/wo", False),
  },
  "gpt_neo": {
    "attn.attention.q_proj": ("self_attention/query", True),
    "attn.attention.k_proj": ("self_attention/key", True),
    "attn.attention.v_proj": ("self_attention/value", True),
    "attn.attention.out_proj": ("self_attention/out", True),
    "mlp.c_fc": ("mlp/wi", True),
    "mlp.c_proj": ("mlp/wo", True),
  },
}
_HEADS = ("query", "key", "value")
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")


def network_values(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what `network.TransformerConfig` must say for a config.json of GPT-2 or GPT-Neo.

  Raises:
    ValueError: the model has switches that the network lacks.
  """
  is_neo = config["model_type"] == "gpt_neo"
  names = (
    ("hidden_size", "num_heads", "num_layers", "max_position_embeddings", "intermediate_size")
    if is_neo
    else ("n_embd", "n_head", "n_layer", "n_positions", "n_inner")
  )
  width, heads, layers, places = (config[name] for name in names[:4])
  hidden = config.get(names[4]) or 4 * width
  _check(config)
  return {
    "vocab_size": config["vocab_size"] + 1,
    "emb_dim": width,
    "num_heads": heads,
    "num_layers": layers,
    "head_dim": width // heads,
    "mlp_dim": hidden,
    "mlp_activations": ("gelu",),
    "logits_via_embedding": True,
    "positions": "learned",
    "max_length": places,
    "norm": "layer",
    "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
    "use_bias": True,
    "scale_queries": not is_neo,
    "float32_attention_logits": is_neo,
    "divide_tied_logits": False,
    "padding_never_follows": True,
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
  arrays: dict[str, StoredArray] = {}
  strangers = []
  for name, array in weights.items():
    if _COPIES.fullmatch(name):
      continue
    found = _converted(name, array, config)
    arrays.update(found)
    strangers += [] if found else [name]
  if strangers or _EMBEDDING not in arrays:
    raise ValueError(
      f"weights that a {config['model_type']} has not: {', '.join(sorted(strangers)[:8])}"
      if strangers
      else "no embedding table (wte.weight): the folder is incomplete"
    )
  if config["model_type"] == "gpt_neo":
    arrays |= _zero_biases(arrays)
  return arrays


def _converted(name: str, array: StoredArray, config: Mapping[str, Any]) -> dict[str, StoredArray]:
  """Returns one weight under our names; nothing if it is a stranger."""
  if name == "wte.weight":
    return {_EMBEDDING: _with_first_row(array, int(config.get("eos_token_id") or 0))}
  if name == "wpe.weight":
    return {"target/decoder/position_embedding": array}
  if name in ("ln_f.weight", "ln_f.bias"):
    return {f"target/decoder/decoder_norm/{_norm_leaf(name)}": array}
  match = _LAYER.fullmatch(name)
  if not match:
    return {}
  prefix, part, leaf = f"target/decoder/layers_{match[1]}", match[2], match[3]
  if part in _NORMS:
    return {f"{prefix}/{_NORMS[part]}/{_norm_leaf(leaf)}": array}
  ours = "kernel" if leaf == "weight" else leaf
  if part == "attn.c_attn":
    size = array.shape[-1] // 3
    return {
      f"{prefix}/self_attention/{head}/{ours}": _columns(array, place * size, size)
      for place, head in enumerate(_HEADS)
    }
  found = _PROJECTIONS[config["model_type"]].get(part)
  if found is None:
    return {}
  is_turned = found[1] and leaf == "weight"
  return {f"{prefix}/{found[0]}/{ours}": transposed(array) if is_turned else array}


def _norm_leaf(name: str) -> str:
  return "scale" if name.endswith("weight") else "bias"


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


def _zero_biases(arrays: Mapping[str, StoredArray]) -> dict[str, StoredArray]:
  """Returns biases for queries, keys and values, which GPT-Neo has not."""

  def zeros(size: int) -> StoredArray:
    return StoredArray((size,), np.float32, lambda index: np.zeros(size, np.float32)[index])

  kernels = [name for name in arrays if name.split("/")[-2] in _HEADS and name.endswith("kernel")]
  return {f"{name.removesuffix('kernel')}bias": zeros(arrays[name].shape[1]) for name in kernels}
