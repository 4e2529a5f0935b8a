"""Writes a decoder as Transformers' GPT-2 or GPT-Neo, if it is one of these architectures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray, concatenate, scale, slice_axis
from rosetta_t5.checkpoints.formats.hugging_face import gpt_names
from rosetta_t5.checkpoints.formats.hugging_face.gpt_names import EMBEDDING
from rosetta_t5.checkpoints.formats.hugging_face.gpt_reader import PADDING_IS_TOKEN_0, start_token
from rosetta_t5.checkpoints.formats.hugging_face.weight_mapping import to_transformers
from rosetta_t5.networks.decoder_config import TransformerConfig

_GPT2_END = 50256
_OTHER_LAYOUTS = ". It can be written with --to t5x, t5x-legacy or rosetta"
# Parameters that neither architecture has, by a pattern of their names.
_UNSUPPORTED = {
  r"/relpos_bias/": "T5's relative bias (positions = 'relative')",
  r"/mlp/wi_\d/": "a gated feed-forward block (several mlp_activations)",
  r"/logits_dense/": "a separate output layer (logits_via_embedding = False)",
}
# Parameters that both architectures have.
_REQUIRED = {
  gpt_names.POSITIONS: "no learned positions (positions = 'rotary' or 'relative')",
  "target/decoder/decoder_norm/bias": "T5's norm (norm = 'rms')",
  "target/decoder/layers_0/mlp/wo/bias": "no biases (use_bias = False)",
}


def check_is_gpt(arrays: Mapping[str, StoredArray]) -> None:
  """Checks that weights in the plain tree are those of a GPT.

  Raises:
    ValueError: they are not; the message contains all reasons.
  """
  reasons = [reason for name, reason in _REQUIRED.items() if name not in arrays]
  for pattern, reason in _UNSUPPORTED.items():
    if any(re.search(pattern, name) for name in arrays):
      reasons.append(reason)
  if reasons:
    raise ValueError(
      "decoders are written for Transformers as GPT-2 or GPT-Neo, but this one is neither: it has "
      f"{'; '.join(reasons)}{_OTHER_LAYOUTS}"
    )


def find_family(config: TransformerConfig) -> str:
  """Returns the family of a decoder: GPT-Neo if it has local layers or does not scale queries."""
  is_neo = config.local_attention_window is not None or not _scales_queries(config)
  return "gpt_neo" if is_neo else "gpt2"


def make_config(
  arrays: Mapping[str, StoredArray],
  config: TransformerConfig,
  family: str,
  ids_are_shifted: bool,
  source_config: Mapping[str, Any],
) -> dict[str, Any]:
  """Returns the content of config.json for weights in the plain tree.

  Args:
    arrays: the weights by our names.
    family: 'gpt2' or 'gpt_neo'.
    ids_are_shifted: whether our ids are one higher than the tokenizer's, which has no padding.
    source_config: the config.json that the model came with, whose other entries are kept; or {}.

  Raises:
    ValueError: the family does not support the config, or the config does not match these weights.
  """
  _check_config(arrays, config, family)
  dtype = arrays[EMBEDDING].dtype.name
  kept = source_config if source_config.get("model_type") == family else {}
  names = gpt_names.FAMILIES[family]
  return {
    **{
      key: value for key, value in kept.items() if key not in ("_name_or_path", PADDING_IS_TOKEN_0)
    },
    **{theirs: getattr(config, ours) for ours, theirs in names.sizes.items()},
    **(_attention_types(config) if family == "gpt_neo" else {}),
    **_vocabulary_entries(arrays[EMBEDDING], ids_are_shifted, source_config),
    "architectures": [names.architecture],
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
  heads_width = arrays["target/decoder/layers_0/self_attention/query/kernel"].shape[1]
  window = config.local_attention_window
  activations = tuple(config.mlp_activations)
  for is_wrong, reason in (
    (activations != ("gelu",), f"mlp_activations must be ('gelu',), got {activations}"),
    (
      (config.emb_dim, config.num_heads * config.head_dim) != (width, heads_width),
      f"emb_dim must be {width} and num_heads * head_dim must be {heads_width}, as in the weights, "
      f"got emb_dim = {config.emb_dim}, num_heads = {config.num_heads}, "
      f"head_dim = {config.head_dim}",
    ),
    (heads_width != width, f"num_heads * head_dim must equal emb_dim = {width}, got {heads_width}"),
    (
      family == "gpt2" and window is not None,
      f"local_attention_window must be None, got {window}; --model-type gpt_neo supports it",
    ),
  ):
    if is_wrong:
      raise ValueError(
        f"this model cannot be written as Transformers' {family}: {reason}{_OTHER_LAYOUTS}"
      )
  names = gpt_names.unsupported_biases(family, config.num_layers)
  if present := [name for name in names if np.any(arrays[name].get())]:
    advice = _OTHER_LAYOUTS if window else ". --model-type gpt2 has them"
    raise ValueError(
      "Transformers' gpt_neo has no biases for queries, keys and values, so they must be zero, but "
      f"{len(present)} of {len(names)} are not ({present[0]}, ...){advice}"
    )


def _attention_types(config: TransformerConfig) -> dict[str, Any]:
  layers, window = config.num_layers, config.local_attention_window
  if window is None:
    return {"attention_types": [[["global"], layers]], "attention_layers": ["global"] * layers}
  kinds = ["global", "local"]
  groups: list[Any] = [[kinds, layers // 2]] if layers > 1 else []
  groups += [[["global"], 1]] if layers % 2 else []
  by_layer = [kinds[layer % 2] for layer in range(layers)]
  return {"attention_types": groups, "attention_layers": by_layer, "window_size": window}


def _vocabulary_entries(
  table: StoredArray, ids_are_shifted: bool, source_config: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the vocabulary size and the special tokens in config.json."""
  size = table.shape[0]
  if not ids_are_shifted:
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
    return {"vocab_size": size, PADDING_IS_TOKEN_0: True, **ids}
  end = source_config.get("eos_token_id", _GPT2_END if size > _GPT2_END + 1 else size - 2)
  expected = start_token({"vocab_size": size - 1, **source_config}) if source_config else end
  start = _find_start_token(table, expected)
  ids = {"vocab_size": max(size - 1, start + 1), "eos_token_id": end}
  # If it is still right, the bos_token_id of the source (or its absence) is kept.
  return ids if source_config and start == expected else {**ids, "bos_token_id": start}


def _find_start_token(table: StoredArray, expected: int) -> int:
  """Returns the id, one of Transformers', that starts a text.

  This is `expected` if our row 0, which starts texts here, is still a copy of that token's row. If
  training has changed row 0, it becomes a token of its own, the last one.
  """
  row_0, expected_row = (
    table.read((slice(row, row + 1), slice(None))) for row in (0, expected + 1)
  )
  return expected if np.array_equal(row_0, expected_row) else table.shape[0] - 1


def make_weights(
  arrays: Mapping[str, StoredArray], config: TransformerConfig, their_config: Mapping[str, Any]
) -> dict[str, StoredArray]:
  """Returns {Transformers' name: array} for weights in the plain tree.

  Args:
    their_config: the config.json that `make_config` returned.
  """
  family = their_config["model_type"]
  dropped = gpt_names.unsupported_biases(family, config.num_layers)
  kept = {name: array for name, array in arrays.items() if name not in dropped}
  kept |= _scale_weights(kept, config, family)
  if not their_config.get(PADDING_IS_TOKEN_0):
    table_VD = arrays[EMBEDDING]
    parts = [slice_axis(table_VD, 0, 1, table_VD.shape[0])]
    if their_config["vocab_size"] == table_VD.shape[0]:
      # Row 0 is no longer a copy of another token's row, so it becomes the last one.
      parts.append(slice_axis(table_VD, 0, 0, 1))
    kept[EMBEDDING] = concatenate(parts, 0)
  theirs = to_transformers(kept, gpt_names.weight_table(family, config.num_layers), family)
  return {f"transformer.{name}": array for name, array in theirs.items()}


def _scale_weights(
  arrays: Mapping[str, StoredArray], config: TransformerConfig, family: str
) -> dict[str, StoredArray]:
  """Returns rescaled copies of the weights where network and family scale differently."""
  factors: dict[str, float] = {}
  factor = math.sqrt(config.head_dim) ** ((family == "gpt2") - _scales_queries(config))
  if factor != 1.0:
    factors |= {name: factor for name in arrays if "/self_attention/query/" in name}
  if config.divide_tied_logits:
    norms = [name for name in arrays if name.startswith("target/decoder/decoder_norm/")]
    factors |= dict.fromkeys(norms, 1 / math.sqrt(config.emb_dim))
  return {name: scale(arrays[name], factor) for name, factor in factors.items()}


def _scales_queries(config: TransformerConfig) -> bool:
  return config.scale_queries or config.scale_attn_logits
