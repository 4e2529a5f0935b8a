"""Reads and writes the weights of Transformers' Llama 3, Qwen 2.5 and 3, Gemma 2 and 3, Cohere as those of a decoder.

Padding is token 0 in our networks. If a folder has no padding token, or pads with another token, our ids are
therefore one higher than its ids. Row 0 of our tables, which nothing reads, is then a copy of the start token's
row. Unused rows at the end make the number of rows a multiple of 128, so that devices can split them.
"""

import re
from typing import Any

import numpy as np

from rosetta_t5.checkpoints.arrays import lazy_arrays
from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.arrays.parameter_trees import HEAD
from rosetta_t5.checkpoints.formats.hugging_face import layer_settings, name_tables
from rosetta_t5.checkpoints.formats.hugging_face.name_tables import Arrays, Config, WeightMapping
from rosetta_t5.networks.config import TransformerConfig

MODEL_TYPES = {
  "llama": "LlamaForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
  "gemma2": "Gemma2ForCausalLM",
  "gemma3_text": "Gemma3ForCausalLM",
  "cohere": "CohereForCausalLM",  # Command R, Aya 23
}
IS_DECODER = True
EMBEDDING = "target/decoder/token_embedder/embedding"
FIXED: Config = {}
DEFAULTS: Config = {}
CLASS_DEFAULTS = {name: layer_settings.CLASS_DEFAULTS[name] for name in MODEL_TYPES}
_ROWS_MULTIPLE = 128
IGNORED = re.compile(r".*\.inv_freq")
_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COHERE_NORMS = {"input_layernorm": "pre_self_attention_layer_norm"}
_LLAMA_NORMS = {**_COHERE_NORMS, "post_attention_layernorm": "pre_mlp_layer_norm"}
_GEMMA_NORMS = {
  **_COHERE_NORMS,
  "post_attention_layernorm": "post_self_attention_layer_norm",
  "pre_feedforward_layernorm": "pre_mlp_layer_norm",
  "post_feedforward_layernorm": "post_mlp_layer_norm",
}


def has(arrays: Arrays) -> bool:
  """Returns whether weights are a decoder's with a gated feed-forward block, and no positions."""
  first = "target/decoder/layers_0"
  norm = f"{first}/pre_self_attention_layer_norm/scale"
  needed = (norm, f"{first}/mlp/wi_1/kernel", EMBEDDING)
  return all(name in arrays for name in needed) and not any(
    name.startswith("target/encoder/") or name.endswith(("_embedding", "_norm/bias"))
    for name in arrays
  )


def weight_table(config: Config) -> list[WeightMapping]:
  """Returns the table of every weight that a model may have."""
  name = config["model_type"]
  norms = _GEMMA_NORMS if name.startswith("gemma") else _LLAMA_NORMS
  norms = _COHERE_NORMS if name == "cohere" else norms
  return [
    WeightMapping(_TABLE, (EMBEDDING,)),
    WeightMapping(_HEAD, (HEAD,), is_transposed=True, is_required=False),
    *layer_settings.layer_table("model", "decoder", norms),
  ]


def sizes(arrays: Arrays) -> dict[str, int]:
  """Returns the fields of TransformerConfig that the shapes of arrays in the plain tree show."""
  layers = name_tables.count_layers(arrays, "target/decoder/layers_")
  return {**layer_settings.stack_sizes(arrays, "decoder", EMBEDDING), "num_layers": layers}


def network_settings(config: Config, arrays: Arrays) -> dict[str, Any]:
  """Returns the fields of TransformerConfig for a config.json and its arrays."""
  found = sizes(arrays)
  is_shifted = not config.get(name_tables.PADDING_IS_TOKEN_0)
  return {
    **found,
    **layer_settings.read_layers(config, found["emb_dim"], found["num_layers"]),
    "logits_via_embedding": HEAD not in arrays,
    "padding_never_follows": is_shifted,
    "unused_rows": found["vocab_size"] - config["vocab_size"] - 1 if is_shifted else 0,
    "decoder_start_token_id": name_tables.start_token(config) + is_shifted,
  }


def read_arrays(weights: Arrays, config: Config) -> dict[str, StoredArray]:
  """Returns {our name: array} for {Transformers' name: array}; the values are read later.

  Raises:
    ValueError: weights are missing, or belong to another architecture.
  """
  weights, model_type = dict(weights), config["model_type"]
  for name in {_TABLE, _HEAD} & weights.keys():
    weight = weights[name]
    if weight.shape[0] != config["vocab_size"]:
      raise ValueError(
        f"vocab_size is {config['vocab_size']}, but {name} has the shape {weight.shape}"
      )
    if not config.get(name_tables.PADDING_IS_TOKEN_0):
      weights[name] = _shift_rows(weight, name_tables.start_token(config))
  arrays = name_tables.from_transformers(weights, weight_table(config), model_type)
  return name_tables.without_tied_head(arrays, EMBEDDING, HEAD, config)


def _shift_rows(table_VD: StoredArray, start: int) -> StoredArray:
  """Returns a table with a copy of the start token's row before it, and rows of zeros after it."""
  rows, width = table_VD.shape
  unused = np.zeros((-(rows + 1) % _ROWS_MULTIPLE, width), table_VD.dtype)
  first_1D = lazy_arrays.slice_axis(table_VD, 0, start, start + 1)
  return lazy_arrays.concatenate([first_1D, table_VD, lazy_arrays.as_stored_array(unused)], 0)


def find_model_type(arrays: Arrays, network: TransformerConfig | None, source: Config) -> str:
  """Returns the first model_type that the network's settings fit, beginning with the one of `source`.

  Raises:
    ValueError: there is no network's config, or no model of Transformers can have its settings.
  """
  if network is None:
    raise ValueError(name_tables.UNKNOWN_HEADS)
  wrong = {name: layer_settings.wrong_fields(network, "decoder", name) for name in MODEL_TYPES}
  for name in (str(source.get("model_type")), *MODEL_TYPES):
    if wrong.get(name) == []:
      return name
  nearest = min(wrong, key=lambda name: len(wrong[name]))
  raise ValueError(f"Transformers' {nearest} needs other values of {', '.join(wrong[nearest])}")


def make_config(
  arrays: Arrays, network: TransformerConfig, model_type: str, source: Config
) -> dict[str, Any]:
  """Returns the entries of config.json that are the family's; see `families`."""
  if wrong := layer_settings.wrong_fields(network, "decoder", model_type):
    raise ValueError(f"Transformers' {model_type} needs other values of {', '.join(wrong)}")
  start, is_shifted = network.decoder_start_token_id, network.padding_never_follows
  ids: dict[str, Any] = {}
  if not is_shifted:
    ids["pad_token_id"] = 0
  if not source:  # The ids are those of a SentencePiece vocabulary, whose padding starts texts.
    ids |= {name_tables.PADDING_IS_TOKEN_0: not is_shifted, "eos_token_id": 1}
    ids["bos_token_id"] = (start or 0) - is_shifted
  return {
    **layer_settings.write_layers(network, "decoder", model_type),
    "vocab_size": network.vocab_size - network.unused_rows - is_shifted,
    "tie_word_embeddings": HEAD not in arrays,
    **ids,
  }


def make_weights(arrays: Arrays, config: Config) -> dict[str, StoredArray]:
  """Returns {Transformers' name: array} for weights in the plain tree."""
  model_type = config["model_type"]
  theirs = name_tables.to_transformers(arrays, weight_table(config), model_type)
  first = 0 if config.get(name_tables.PADDING_IS_TOKEN_0) or config.get("pad_token_id") == 0 else 1
  for name in {_TABLE, _HEAD} & theirs.keys():
    theirs[name] = lazy_arrays.slice_axis(theirs[name], 0, first, first + config["vocab_size"])
  return theirs
