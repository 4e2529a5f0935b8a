"""Reads and writes the weights of Transformers' Cohere models (Command R, Aya 23) as those of a decoder.

Ids are theirs: padding is token 0, and a text starts with `bos_token_id`.
"""

import re
from typing import Any

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.formats.hugging_face import layer_settings, name_tables
from rosetta_t5.checkpoints.formats.hugging_face.name_tables import Arrays, Config, WeightMapping
from rosetta_t5.networks.config import TransformerConfig

MODEL_TYPES = {"cohere": "CohereForCausalLM"}
IS_DECODER = True
SHIFTS_IDS = False
EMBEDDING = "target/decoder/token_embedder/embedding"
FIXED = {
  "attention_bias": False,
  "use_qk_norm": False,
  "tie_word_embeddings": True,
  "pad_token_id": 0,
}
CLASS_DEFAULTS: dict[str, Config] = {}
DEFAULTS: Config = {"bos_token_id": 5, "eos_token_id": 255001}
SIZES = {
  "cohere": {
    "vocab_size": "vocab_size",
    "hidden_size": "emb_dim",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "kv_heads",
    "num_hidden_layers": "num_layers",
    "intermediate_size": "mlp_dim",
    "max_position_embeddings": "max_length",
  }
}
IGNORED = re.compile(r"lm_head\.weight|.*\.inv_freq")
_LAYER, _THEIRS = "target/decoder/layers_{n}", "model.layers.{n}"
_MATRICES = {
  "self_attn.q_proj": "self_attention/query",
  "self_attn.k_proj": "self_attention/key",
  "self_attn.v_proj": "self_attention/value",
  "self_attn.o_proj": "self_attention/out",
  "mlp.gate_proj": "mlp/wi_0",
  "mlp.up_proj": "mlp/wi_1",
  "mlp.down_proj": "mlp/wo",
}
_NORM = f"{_LAYER}/pre_self_attention_layer_norm/scale"
_TABLE = [
  WeightMapping("model.embed_tokens.weight", (EMBEDDING,)),
  WeightMapping("model.norm.weight", ("target/decoder/decoder_norm/scale",)),
  WeightMapping(f"{_THEIRS}.input_layernorm.weight", (_NORM,)),
  *(
    WeightMapping(f"{_THEIRS}.{theirs}.weight", (f"{_LAYER}/{ours}/kernel",), is_transposed=True)
    for theirs, ours in _MATRICES.items()
  ),
]
# The fields of TransformerConfig that all of these models have.
_FAMILY: dict[str, Any] = {
  "positions": "rotary",
  "rope_interleaved": True,
  "norm": "layer_without_bias",
  "parallel_blocks": True,
  "logits_via_embedding": True,
  "divide_tied_logits": False,
  "padding_never_follows": False,
  "scale_queries": True,
  "use_bias": False,
}


def has(arrays: Arrays) -> bool:
  """Returns whether weights have layers with one norm, whose blocks are parallel."""
  first = "target/decoder/layers_0/pre_{}_layer_norm/scale"
  return first.format("self_attention") in arrays and first.format("mlp") not in arrays


def weight_table(config: Config) -> list[WeightMapping]:
  """Returns the table of weights, which all of these models have."""
  del config
  return _TABLE


def sizes(arrays: Arrays) -> dict[str, int]:
  """Returns the fields of TransformerConfig that the shapes of arrays in the plain tree show."""
  rows, width = arrays[EMBEDDING].shape
  return {
    "vocab_size": rows,
    "emb_dim": width,
    "num_layers": name_tables.count_layers(arrays, "target/decoder/layers_"),
    "mlp_dim": arrays["target/decoder/layers_0/mlp/wi_0/kernel"].shape[1],
  }


def network_settings(config: Config, arrays: Arrays) -> dict[str, Any]:
  """Returns the fields of TransformerConfig for a config.json and its arrays."""
  found, heads = sizes(arrays), config["num_attention_heads"]
  rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
  theta, scaling = layer_settings.read_rope(rope, config)
  activation = name_tables.our_activation("hidden_act", config.get("hidden_act", "silu"))
  return {
    **found,
    **_FAMILY,
    "num_heads": heads,
    "num_kv_heads": config.get("num_key_value_heads") or heads,
    "head_dim": found["emb_dim"] // heads,
    "mlp_activations": (activation, "linear"),
    "norm_epsilon": config.get("layer_norm_eps", 1e-5),
    "logit_scale": config.get("logit_scale", 0.0625),
    "rope_theta": theta,
    "rope_scaling": scaling,
    "max_length": config.get("max_position_embeddings", 8192),
    "decoder_start_token_id": name_tables.start_token(config),
  }


def read_arrays(weights: Arrays, config: Config) -> dict[str, StoredArray]:
  """Returns {our name: array} for {Transformers' name: array}; the values are read later."""
  return name_tables.from_transformers(weights, _TABLE, config["model_type"])


def find_model_type(arrays: Arrays, network: TransformerConfig | None, source: Config) -> str:
  """Returns the type of a model.

  Raises:
    ValueError: the network's settings are not known, or Transformers' models do not have them.
  """
  wrong = [name for name, value in _FAMILY.items() if getattr(network, name, None) != value]
  if wrong:
    raise ValueError(f"Transformers' cohere needs other values of {', '.join(wrong)}, or --config")
  return "cohere"


def make_config(
  arrays: Arrays, network: TransformerConfig, model_type: str, source: Config, is_shifted: bool
) -> dict[str, Any]:
  """Returns the entries of config.json that are the family's; see `families`."""
  return {
    **FIXED,
    "hidden_act": name_tables.their_activation(network.mlp_activations[0]),
    "layer_norm_eps": network.norm_epsilon,
    "logit_scale": network.logit_scale,
    "rope_parameters": {
      "rope_type": "default",
      **(network.rope_scaling or {}),
      "rope_theta": network.rope_theta,
    },
  }


def make_weights(arrays: Arrays, config: Config) -> dict[str, StoredArray]:
  """Returns {Transformers' name: array} for weights in the plain tree."""
  return name_tables.to_transformers(arrays, _TABLE, config["model_type"])
