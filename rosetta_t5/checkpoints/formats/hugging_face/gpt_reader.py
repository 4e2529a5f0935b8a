"""Reads the weights of Transformers' GPT-2 and GPT-Neo as those of `networks.decoder`.

Our ids are one higher, because id 0 is padding and starts every text. Row 0 of our embedding table is
a copy of the row of `<|endoftext|>`, the token that these models have seen before a text, and
`padding_never_follows` removes its logit. A model that was trained here with padding as its own token
0 keeps its ids: the config.json that we write for it contains `padding_is_token_0`.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from rosetta_t5.checkpoints.arrays import lazy_arrays
from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.formats.hugging_face import gpt_names
from rosetta_t5.checkpoints.formats.hugging_face.weight_mapping import (
  check_complete,
  count_layers,
  from_transformers,
)

# The entry of config.json that marks a model whose ids are those of its SentencePiece vocabulary.
PADDING_IS_TOKEN_0 = "padding_is_token_0"
# PyTorch's files also contain masks and the tied output layer.
_NOT_WEIGHTS = re.compile(r"h\.\d+\.attn\.(attention\.)?(masked_)?bias|lm_head\.weight")


def network_values(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of `TransformerConfig` for the config.json of a GPT-2 or GPT-Neo.

  Raises:
    ValueError: local attention is not in every second layer.
  """
  is_neo = config["model_type"] == "gpt_neo"
  family = gpt_names.FAMILIES[config["model_type"]]
  sizes: dict[str, Any] = {ours: config.get(theirs) for ours, theirs in family.sizes.items()}
  sizes["mlp_dim"] = sizes["mlp_dim"] or 4 * sizes["emb_dim"]
  keeps_ids = bool(config.get(PADDING_IS_TOKEN_0))
  return {
    "vocab_size": config["vocab_size"] + (not keeps_ids),
    **sizes,
    "head_dim": sizes["emb_dim"] // sizes["num_heads"],
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
    "local_attention_window": _local_attention_window(config),
  }


def _local_attention_window(config: Mapping[str, Any]) -> int | None:
  """Returns the window of GPT-Neo's local layers, in positions; None if there are no such layers."""
  layers, types = config.get("num_layers", 0), config.get("attention_types", [])
  try:
    kinds = [kind for group, times in types for kind in group * min(times, layers + 1)]
  except (TypeError, ValueError):
    kinds = ["unknown"]
  if kinds in ([], ["global"] * layers):
    return None
  if kinds != [("global", "local")[layer % 2] for layer in range(layers)]:
    raise ValueError(
      f"attention_types must alternate between 'global' and 'local', beginning with 'global', for "
      f"{layers} layers, got {reprlib.repr(types)}"
    )
  window: int = config.get("window_size", 256)
  return window


def read_arrays(
  weights: Mapping[str, StoredArray], config: Mapping[str, Any]
) -> dict[str, StoredArray]:
  """Returns {our name: array} of a model's weights; the values are read later.

  Args:
    weights: {Transformers' name: array}, without the prefix `transformer.`.

  Raises:
    ValueError: weights are missing, or belong to another architecture.
  """
  family = config["model_type"]
  weights = {name: x for name, x in weights.items() if not _NOT_WEIGHTS.fullmatch(name)}
  layers = count_layers(weights, r"h\.")
  table = gpt_names.weight_table(family, layers)
  arrays = from_transformers(weights, table, family)
  check_complete(weights, table, family)
  if not config.get(PADDING_IS_TOKEN_0):
    table_VD = arrays[gpt_names.EMBEDDING]
    start = start_token({**config, "vocab_size": table_VD.shape[0]})
    start_row_1D = lazy_arrays.slice_axis(table_VD, 0, start, start + 1)
    arrays[gpt_names.EMBEDDING] = lazy_arrays.concatenate([start_row_1D, table_VD], 0)
  for name in gpt_names.unsupported_biases(family, layers):
    size = arrays[f"{name.removesuffix('bias')}kernel"].shape[1]
    arrays[name] = lazy_arrays.as_stored_array(np.zeros(size, np.float32))
  return arrays


def start_token(config: Mapping[str, Any]) -> int:
  """Returns the token that starts a text; 0 if config.json names none that is in the vocabulary."""
  for name in ("bos_token_id", "eos_token_id"):
    token = config.get(name)
    if isinstance(token, int) and 0 <= token < config["vocab_size"]:
      return token
  return 0
