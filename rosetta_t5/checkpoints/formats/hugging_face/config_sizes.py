"""Checks that the sizes in a config.json are those of the weights."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.formats.hugging_face import gpt_names, gpt_reader, t5_names, t5_reader
from rosetta_t5.checkpoints.formats.hugging_face.weight_mapping import count_layers

# Entries that may be null, which stands for a size that is derived from others.
_NULLABLE = ("num_decoder_layers", "n_inner", "intermediate_size")
_BOOLEANS = ("tie_word_embeddings", "scale_decoder_outputs", gpt_reader.PADDING_IS_TOKEN_0)
_LAYER = re.compile(r"layers_\d+")


def check_config(file: Any, config: Mapping[str, Any], arrays: Mapping[str, StoredArray]) -> None:
  """Compares a config.json with the arrays of its model.

  Args:
    file: the path of config.json, for messages.
    arrays: the model's arrays in the plain tree, by our names.

  Raises:
    ValueError: the shapes of the arrays contradict each other, or an entry contradicts them.
  """
  for name, array in arrays.items():
    first = arrays.get(_LAYER.sub("layers_0", name), array)
    if array.shape != first.shape:
      raise ValueError(
        f"{name} must have the shape {first.shape} that it has in layer 0, got {array.shape}"
      )
  is_gpt = config["model_type"] in gpt_names.FAMILIES
  for entry, size in (gpt_sizes(arrays, config) if is_gpt else t5_sizes(arrays)).items():
    # Transformers' T5 has a default for each size; nothing is derived from it here.
    value = config.get(entry, None if is_gpt else size)
    if not (type(value) is int and value == size) and (value is not None or entry not in _NULLABLE):
      raise _error(file, entry, f"{size}, as in the weights", value)
  for entry in _BOOLEANS:
    if not isinstance(config.get(entry), bool | None):
      raise _error(file, entry, "true or false", config[entry])
  if is_gpt:
    _check_gpt(file, config, arrays[gpt_names.EMBEDDING].shape[1])
  elif "feed_forward_proj" in config:
    _check_activations(file, config, arrays)


def t5_sizes(arrays: Mapping[str, StoredArray]) -> dict[str, int]:
  """Returns the sizes in the config.json of a T5 with these arrays, in T5X's plain tree."""
  vocabulary, width = arrays[t5_names.EMBEDDING].shape
  biases = [array for name, array in arrays.items() if name.endswith("rel_embedding")]
  if not biases:
    raise ValueError("the model must have a relative bias, as T5 has, got none")
  heads, buckets = biases[0].shape
  layers, decoder_layers = (
    count_layers(arrays, rf"target/{side}/layers_") for side in ("encoder", "decoder")
  )
  _, heads_width = arrays["target/encoder/layers_0/attention/query/kernel"].shape
  # Layer 0 may have experts, whose number is then the first dimension.
  hidden = next(array.shape[-2] for name, array in arrays.items() if name.endswith("/wo/kernel"))
  return {
    "vocab_size": vocabulary,
    "d_model": width,
    "d_kv": heads_width // heads,
    "d_ff": hidden,
    "num_heads": heads,
    "num_layers": layers,
    "relative_attention_num_buckets": buckets,
    **({"num_decoder_layers": decoder_layers} if decoder_layers else {}),
  }


def gpt_sizes(arrays: Mapping[str, StoredArray], config: Mapping[str, Any]) -> dict[str, int]:
  """Returns the sizes in the config.json of a GPT with these arrays, in the plain tree."""
  names = gpt_names.FAMILIES[config["model_type"]].sizes
  rows, width = arrays[gpt_names.EMBEDDING].shape
  positions, _ = arrays[gpt_names.POSITIONS].shape
  _, hidden = arrays["target/decoder/layers_0/mlp/wi/kernel"].shape
  return {
    "vocab_size": rows - (not config.get(gpt_reader.PADDING_IS_TOKEN_0)),
    names["emb_dim"]: width,
    names["max_length"]: positions,
    names["num_layers"]: count_layers(arrays, "target/decoder/layers_"),
    names["mlp_dim"]: hidden,
  }


def _check_gpt(file: Any, config: Mapping[str, Any], width: int) -> None:
  """Checks what the arrays of a GPT do not show."""
  entry = gpt_names.FAMILIES[config["model_type"]].sizes["num_heads"]
  heads = config.get(entry)
  if type(heads) is not int or heads < 1 or width % heads:
    raise _error(file, entry, f"a number of heads that divides {width}, the model's width", heads)
  epsilon = config.get("layer_norm_epsilon", 1e-5)
  if type(epsilon) not in (int, float) or not 0 < epsilon < math.inf:
    raise _error(file, "layer_norm_epsilon", "a number greater than 0", epsilon)
  for entry in ("bos_token_id", "eos_token_id"):
    token = config.get(entry)
    if token is not None and type(token) is not int:
      raise _error(file, entry, "a token's number or null", token)


def _check_activations(
  file: Any, config: Mapping[str, Any], arrays: Mapping[str, StoredArray]
) -> None:
  is_gated = any(name.endswith("/mlp/wi_1/kernel") for name in arrays)
  if (len(t5_reader.read_activations(config)) > 1) != is_gated:
    expected = "gated, such as 'gated-gelu'," if is_gated else "not gated, such as 'relu',"
    entry, value = t5_reader.activation_entry(config)
    raise _error(file, entry, f"{expected} as the weights are", value)


def _error(file: Any, entry: str, expected: str, value: Any) -> ValueError:
  return ValueError(f"{file}: {entry} must be {expected}, got {reprlib.repr(value)}")
