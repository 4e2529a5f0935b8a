"""Lays a decoder out as Transformers' GPT-2 or GPT-Neo, where it is one; `hugging_face_gpt` reads."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rosetta_t5.checkpoints.arrays.lazy_arrays import Index, StoredArray, scale, transpose
from rosetta_t5.checkpoints.formats.hugging_face.gpt_names import (
  EMBEDDING,
  POSITIONS,
  SIZES,
  Row,
  biases_only_here,
  rows,
)
from rosetta_t5.checkpoints.formats.hugging_face.gpt_reader import KEEPS_IDS, start_token
from rosetta_t5.networks.decoder_config import TransformerConfig

_GPT2_END = 50256
_CLASSES = {"gpt2": "GPT2LMHeadModel", "gpt_neo": "GPTNeoForCausalLM"}
# What a decoder may have that neither architecture has, as names of weights show it.
_STRANGERS = {
  r".*relpos_bias.*": "T5's relative bias (positions = 'relative')",
  r".*mlp/wi_\d/.*": "a gated feed-forward block (mlp_activations of several)",
  r".*logits_dense.*": "an output layer of its own (logits_via_embedding = False)",
}
_LACKS = {
  POSITIONS: "no vectors of places (positions = 'rotary' or 'relative')",
  "target/decoder/decoder_norm/bias": "T5's norm (norm = 'rms')",
  "target/decoder/layers_0/mlp/wo/bias": "no biases (use_bias = False)",
}


def check_fits(arrays: Mapping[str, StoredArray]) -> None:
  """Raises ValueError, with all reasons, if weights in the plain tree are no GPT's."""
  reasons = [told for name, told in _LACKS.items() if name not in arrays]
  for pattern, told in _STRANGERS.items():
    reasons += [told] if any(re.fullmatch(pattern, name) for name in arrays) else []
  if reasons:
    raise ValueError(
      "this decoder-only model is no GPT-2 and no GPT-Neo, the architectures of Transformers that "
      f"decoders are written as: it has {'; '.join(dict.fromkeys(reasons))}. It can be written as "
      "t5x, t5x-legacy or rosetta"
    )


def model_type(config: TransformerConfig) -> str:
  """Returns the family that a decoder is of: GPT-Neo has local layers and does not scale queries."""
  is_neo = config.local_attention_window is not None or not _scales(config)
  return "gpt_neo" if is_neo else "gpt2"


def make_config(
  arrays: Mapping[str, StoredArray],
  config: TransformerConfig,
  family: str,
  ids_are_shifted: bool,
  base: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """Returns config.json for weights in the plain tree.

  Args:
    arrays: by our names.
    config: of the network.
    family: 'gpt2' or 'gpt_neo'.
    ids_are_shifted: whether our ids are one higher than the tokenizer's, which knows no padding.
    base: the config.json the model came with, whose further entries are kept.

  Raises:
    ValueError: the config has what the family lacks, or is not of these weights.
  """
  _check_config(arrays, config, family)
  dtype = arrays[EMBEDDING].dtype.name
  drops = {"_name_or_path", "torch_dtype", KEEPS_IDS}
  kept = base if base and base["model_type"] == family else {}
  return {
    **{key: value for key, value in kept.items() if key not in drops},
    **{theirs: getattr(config, ours) for ours, theirs in SIZES[family].items()},
    **(_attention_types(config) if family == "gpt_neo" else {}),
    **_ids(arrays[EMBEDDING], ids_are_shifted, base),
    "architectures": [_CLASSES[family]],
    "model_type": family,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": config.norm_epsilon,
    "tie_word_embeddings": True,
    "dtype": dtype,
    "torch_dtype": dtype,
    "transformers_version": "5.0.0",
  }


def _check_config(
  arrays: Mapping[str, StoredArray], config: TransformerConfig, family: str
) -> None:
  width = arrays[EMBEDDING].shape[1]
  joined = arrays["target/decoder/layers_0/self_attention/query/kernel"].shape[1]
  window = config.local_attention_window
  for wrong, reason in (
    (
      tuple(config.mlp_activations) != ("gelu",),
      f"mlp_activations = {tuple(config.mlp_activations)} is not ('gelu',)",
    ),
    (
      (config.emb_dim, config.num_heads * config.head_dim) != (width, joined),
      f"emb_dim = {config.emb_dim}, num_heads = {config.num_heads} and head_dim = {config.head_dim} "
      f"are not of these weights, of width {width} and {joined}",
    ),
    (joined != width, f"num_heads * head_dim = {joined} is not emb_dim = {width}"),
    (
      family == "gpt2" and window is not None,
      f"local_attention_window = {window} is GPT-Neo's alone: --model-type gpt_neo",
    ),
  ):
    if wrong:
      raise ValueError(f"this model cannot be written as Transformers' {family}: {reason}")
  names = biases_only_here(family, config.num_layers)
  if present := [name for name in names if np.any(arrays[name].get())]:
    advice = "" if window else "; --model-type gpt2 has them"
    raise ValueError(
      "Transformers' gpt_neo has no biases of queries, keys and values, but "
      f"{len(present)} of the {len(names)} here are not zero ({present[0]}, ...){advice}"
    )


def _attention_types(config: TransformerConfig) -> dict[str, Any]:
  layers, window = config.num_layers, config.local_attention_window
  if window is None:
    return {"attention_types": [[["global"], layers]], "attention_layers": ["global"] * layers}
  kinds = ["global", "local"]
  pairs: list[Any] = [[kinds, layers // 2]] if layers > 1 else []
  pairs += [[["global"], 1]] if layers % 2 else []
  in_order = [kinds[layer % 2] for layer in range(layers)]
  return {"attention_types": pairs, "attention_layers": in_order, "window_size": window}


def _ids(
  table: StoredArray, ids_are_shifted: bool, base: Mapping[str, Any] | None
) -> dict[str, Any]:
  """Returns config.json's size of the vocabulary and its special tokens."""
  size = table.shape[0]
  if not ids_are_shifted:
    return {"vocab_size": size, KEEPS_IDS: True} | {
      "pad_token_id": 0,
      "bos_token_id": 0,
      "eos_token_id": 1,
    }
  end = (base or {}).get("eos_token_id", _GPT2_END if size > _GPT2_END + 1 else size - 2)
  expected = end if base is None else start_token({"vocab_size": size - 1, **base})
  start = start_in(table, expected)
  told = {"vocab_size": max(size - 1, start + 1), "eos_token_id": end}
  # What the model came with stays as it was written, where it is still true.
  return told if base is not None and start == expected else {**told, "bos_token_id": start}


def start_in(table: StoredArray, expected: int) -> int:
  """Returns which of Transformers' ids starts a text.

  That is `expected` if our row 0, which starts texts here, is still a copy of that token's; else a
  token of its own, the last.
  """
  first, same = (table.read((slice(row, row + 1), slice(None))) for row in (0, expected + 1))
  return expected if np.array_equal(first, same) else table.shape[0] - 1


def weights(
  arrays: Mapping[str, StoredArray],
  config: TransformerConfig,
  theirs: Mapping[str, Any],
) -> dict[str, StoredArray]:
  """Returns {Hugging Face's name: array} for weights in the plain tree.

  Args:
    arrays: by our names.
    config: of the network.
    theirs: config.json, of `make_config`.
  """
  family = theirs["model_type"]
  changed = {**arrays, **_folded(arrays, config, family)}
  if not theirs.get(KEEPS_IDS):
    changed[EMBEDDING] = _without_first_row(arrays[EMBEDDING], theirs["vocab_size"])
  table = rows(family, config.num_layers)
  return {f"transformer.{row.theirs}": _their_array(row, changed) for row in table}


def _folded(
  arrays: Mapping[str, StoredArray], config: TransformerConfig, family: str
) -> dict[str, StoredArray]:
  """Returns weights that take in factors which a family has not, or has and the network has not."""
  found: dict[str, StoredArray] = {}
  factor = math.sqrt(config.head_dim) ** ((family == "gpt2") - _scales(config))
  if factor != 1.0:
    pattern = re.compile(r".*/self_attention/query/(kernel|bias)")
    found |= {n: scale(x, factor) for n, x in arrays.items() if pattern.fullmatch(n)}
  if config.divide_tied_logits:
    norms = [n for n in arrays if n.startswith("target/decoder/decoder_norm/")]
    found |= {n: scale(arrays[n], 1 / math.sqrt(config.emb_dim)) for n in norms}
  return found


def _scales(config: TransformerConfig) -> bool:
  return config.scale_queries or config.scale_attn_logits


def _their_array(row: Row, arrays: Mapping[str, StoredArray]) -> StoredArray:
  array = _side_by_side([arrays[name] for name in row.ours])
  return transpose(array) if row.is_turned else array


def _side_by_side(parts: Sequence[StoredArray]) -> StoredArray:
  """Returns arrays joined along the last axis."""
  if len(parts) == 1:
    return parts[0]

  def read(index: Index) -> np.ndarray:
    return np.concatenate([part.get() for part in parts], axis=-1)[index]

  size = sum(part.shape[-1] for part in parts)
  return StoredArray((*parts[0].shape[:-1], size), parts[0].dtype, read, sliceable=False)


def _without_first_row(table: StoredArray, size: int) -> StoredArray:
  """Returns a table without its first row; of `size` rows, that one's again as the last."""

  def read(index: Index) -> np.ndarray:
    start, stop = index[0].start + 1, index[0].stop + 1
    parts = [table.read((slice(start, min(stop, table.shape[0])), index[1]))]
    parts += [table.read((slice(0, 1), index[1]))] if stop > table.shape[0] else []
    return np.concatenate(parts)

  return StoredArray((size, table.shape[1]), table.dtype, read, table.sliceable)


__all__ = ["check_fits", "make_config", "model_type", "start_in", "weights"]
