"""Reads and writes the weights of Transformers' GPT-2 and GPT-Neo as those of `networks.transformer`.

Our ids are one higher, because id 0 is padding and starts every text. Row 0 of our embedding table is
a copy of the row of `<|endoftext|>`, the token that these models have seen before a text, and
`padding_never_follows` removes its logit. A model that was trained here with padding as its own token
0 keeps its ids: the config.json that we write for it contains `padding_is_token_0`.
"""

import re
from typing import Any

import numpy as np

from rosetta_t5.checkpoints.arrays import lazy_arrays
from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.formats.hugging_face import name_tables
from rosetta_t5.checkpoints.formats.hugging_face.name_tables import Arrays, Config, WeightMapping
from rosetta_t5.networks.config import TransformerConfig

MODEL_TYPES = {"gpt2": "GPT2LMHeadModel", "gpt_neo": "GPTNeoForCausalLM"}
IS_DECODER = True
FIXED = {
  "scale_attn_weights": True,
  "scale_attn_by_inverse_layer_idx": False,
  "add_cross_attention": False,
  "tie_word_embeddings": True,
}
DEFAULTS: Config = {}
CLASS_DEFAULTS: dict[str, Config] = {}
# {model_type: {entry of config.json: field of the network's config}}
_SIZES = {
  "gpt2": {
    "n_embd": "emb_dim",
    "n_head": "num_heads",
    "n_layer": "num_layers",
    "n_positions": "max_length",
    "n_inner": "mlp_dim",
  },
  "gpt_neo": {
    "hidden_size": "emb_dim",
    "num_heads": "num_heads",
    "num_layers": "num_layers",
    "max_position_embeddings": "max_length",
    "intermediate_size": "mlp_dim",
  },
}
EMBEDDING = "target/decoder/token_embedder/embedding"
_POSITIONS = "target/decoder/position_embedding"
# Masks in PyTorch's files, which are not weights.
IGNORED = re.compile(r"(transformer\.)?h\.\d+\.(attn|crossattention)\.(attention\.)?(masked_)?bias")
_LAYER = "target/decoder/layers_{n}"
_PREFIX = "transformer."
_HEADS = ("query", "key", "value")
# {model_type: {Transformers' name: our names}} of a layer's matrices. GPT-2 joins three of them.
_MATRICES: dict[str, dict[str, tuple[str, ...]]] = {
  "gpt2": {
    "attn.c_attn": tuple(f"self_attention/{head}" for head in _HEADS),
    "attn.c_proj": ("self_attention/out",),
  },
  "gpt_neo": {
    **{f"attn.attention.{head[0]}_proj": (f"self_attention/{head}",) for head in _HEADS},
    "attn.attention.out_proj": ("self_attention/out",),
  },
}
# Our biases that GPT-Neo lacks; they must be zero in such a model.
_HEAD_BIAS = re.compile(r".*/self_attention/(query|key|value)/bias")
_NORMS = {
  "ln_f": "target/decoder/decoder_norm",
  "h.{n}.ln_1": f"{_LAYER}/pre_self_attention_layer_norm",
  "h.{n}.ln_2": f"{_LAYER}/pre_mlp_layer_norm",
}
_GPT2_END = 50256


def has(arrays: Arrays) -> bool:
  """Returns whether weights have no encoder. Those of other decoders are looked for before."""
  return not any(name.startswith("target/encoder/") for name in arrays)


def weight_table(config: Config) -> list[WeightMapping]:
  """Returns all weights, by the names in a model with an output layer."""
  model_type = config["model_type"]
  is_neo = model_type == "gpt_neo"  # whose matrices are [out, in], and some of which have no bias
  table = [WeightMapping("wte.weight", (EMBEDDING,)), WeightMapping("wpe.weight", (_POSITIONS,))]
  for theirs, ours in _NORMS.items():
    table.append(WeightMapping(f"{theirs}.weight", (f"{ours}/scale",)))
    table.append(WeightMapping(f"{theirs}.bias", (f"{ours}/bias",)))
  matrices = _MATRICES[model_type] | {"mlp.c_fc": ("mlp/wi",), "mlp.c_proj": ("mlp/wo",)}
  for name, parts in matrices.items():
    kernels, biases = (tuple(f"{_LAYER}/{x}/{kind}" for x in parts) for kind in ("kernel", "bias"))
    table.append(WeightMapping(f"h.{{n}}.{name}.weight", kernels, is_neo))
    if not (is_neo and parts[0].endswith(_HEADS)):
      table.append(WeightMapping(f"h.{{n}}.{name}.bias", biases))
  return [row._replace(theirs=f"{_PREFIX}{row.theirs}") for row in table]


def sizes(arrays: Arrays) -> dict[str, int]:
  """Returns the fields of TransformerConfig that the shapes of arrays in the plain tree show."""
  rows, width = arrays[EMBEDDING].shape
  return {
    "vocab_size": rows,
    "emb_dim": width,
    "max_length": arrays[_POSITIONS].shape[0],
    "num_layers": name_tables.count_layers(arrays, "target/decoder/layers_"),
    "mlp_dim": arrays["target/decoder/layers_0/mlp/wi/kernel"].shape[1],
  }


def network_settings(config: Config, arrays: Arrays) -> dict[str, Any]:
  """Returns the fields of TransformerConfig for the config.json of a GPT-2 or GPT-Neo and its arrays.

  Raises:
    ValueError: the number of heads does not divide the width, or this project's network lacks the
      activation or the pattern of local layers.
  """
  is_neo = config["model_type"] == "gpt_neo"
  entry, found = "num_heads" if is_neo else "n_head", sizes(arrays)
  width, heads = found["emb_dim"], config.get(entry, 0)
  if heads not in range(1, width + 1) or width % heads:
    raise ValueError(f"{entry} must divide {width}, the model's width, got {heads}")
  activation = str(config.get("activation_function", "gelu_new"))
  return {
    **found,
    "num_heads": heads,
    "head_dim": found["emb_dim"] // heads,
    "mlp_activations": (name_tables.our_activation("activation_function", activation),),
    "logits_via_embedding": True,
    "positions": "learned",
    "norm": "layer",
    "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
    "use_bias": True,
    "scale_queries": not is_neo,
    "float32_attention_logits": is_neo,
    "divide_tied_logits": False,
    "padding_never_follows": not config.get(name_tables.PADDING_IS_TOKEN_0),
    **_local_layers(config),
  }


def _local_layers(config: Config) -> dict[str, Any]:
  """Returns the window of GPT-Neo's local layers, in positions, and which layers are local."""
  layers, types = config.get("num_layers", 0), config.get("attention_types", [])
  kinds = [kind for group, times in types for kind in group * min(times, layers + 1)]
  if "local" not in kinds:
    return {}
  pattern = name_tables.layer_pattern(kinds, layers, "attention_types")
  return {"window": config.get("window_size", 256), "layer_pattern": pattern}


def read_arrays(weights: Arrays, config: Config) -> dict[str, StoredArray]:
  """Returns {our name: array} of a model's weights; the values are read later.

  Args:
    weights: {Transformers' name: array}.
    config: the content of config.json.

  Raises:
    ValueError: weights are missing, or belong to another architecture.
  """
  model_type, weights = config["model_type"], dict(weights)
  head = weights.pop("lm_head.weight", None)
  # Without its output layer, a GPT is saved without the prefix.
  weights = {f"{_PREFIX}{name.removeprefix(_PREFIX)}": x for name, x in weights.items()}
  table = weights.get(f"{_PREFIX}wte.weight")
  if head is not None and table is not None and not name_tables.are_equal(head, table):
    raise ValueError("lm_head.weight must equal wte.weight: this project's GPTs have tied tables")
  arrays = name_tables.from_transformers(weights, weight_table(config), model_type)
  if not config.get(name_tables.PADDING_IS_TOKEN_0):
    table_VD = arrays[EMBEDDING]
    start = name_tables.start_token({**config, "vocab_size": table_VD.shape[0]})
    start_row_1D = lazy_arrays.slice_axis(table_VD, 0, start, start + 1)
    arrays[EMBEDDING] = lazy_arrays.concatenate([start_row_1D, table_VD], 0)
  for name in [name for name in arrays if model_type == "gpt_neo" and name.endswith("/kernel")]:
    bias = f"{name.removesuffix('kernel')}bias"
    if _HEAD_BIAS.fullmatch(bias):
      size = arrays[name].shape[1]
      arrays[bias] = lazy_arrays.as_stored_array(np.zeros(size, np.float32))
  return arrays


def find_model_type(arrays: Arrays, network: TransformerConfig | None, source: Config) -> str:
  """Returns the type of a model: GPT-Neo if it has local layers or does not scale queries.

  Raises:
    ValueError: the weights are not those of a GPT, or the network's settings are not known.
  """
  layers = range(name_tables.count_layers(arrays, "target/decoder/layers_"))
  table = weight_table({"model_type": "gpt2"})
  names = {x.format(n=n) for row in table for x in row.ours for n in layers}
  if differing := names ^ arrays.keys():
    raise ValueError(
      "a decoder is written as GPT-2 or GPT-Neo, which have learned positions, layer norms, biases and one "
      f"activation. This one differs in {name_tables.list_names(differing)}"
    )
  if network is None:
    raise ValueError(name_tables.UNKNOWN_HEADS)
  is_neo = network.window is not None or not _scales_queries(network)
  return "gpt_neo" if is_neo else "gpt2"


def _scales_queries(network: TransformerConfig) -> bool:
  return network.scale_queries or network.scale_attn_logits


def make_config(
  arrays: Arrays, network: TransformerConfig, model_type: str, source: Config
) -> dict[str, Any]:
  """Returns the entries of config.json that are the family's, for weights in the plain tree.

  Args:
    arrays: the weights by our names.
    network: the settings of the network.
    model_type: 'gpt2' or 'gpt_neo'.
    source: the config.json that the model came with; or {}.

  Raises:
    ValueError: Transformers does not support the config, or the config does not match these weights.
  """
  _check_network(arrays, network, model_type)
  return {
    **{entry: getattr(network, field) for entry, field in _SIZES[model_type].items()},
    **(_attention_types(network) if model_type == "gpt_neo" else {}),
    **_vocabulary_entries(arrays[EMBEDDING], source, network.padding_never_follows),
    "activation_function": name_tables.their_activation(network.mlp_activations[0]),
    "layer_norm_epsilon": network.norm_epsilon,
    "tie_word_embeddings": True,
  }


def _check_network(arrays: Arrays, network: TransformerConfig, model_type: str) -> None:
  width, window = arrays[EMBEDDING].shape[1], network.window
  reason = ""
  if network.num_heads * network.head_dim != width:
    reason = f"num_heads * head_dim must be {width}, got {network.num_heads} * {network.head_dim}"
  elif model_type == "gpt2" and window is not None:
    reason = f"window must be None, got {window}; --model-type gpt_neo supports it"
  elif network.divide_tied_logits or _scales_queries(network) != (model_type == "gpt2"):
    reason = "divide_tied_logits must be False, and scale_queries True only for gpt2"
  elif model_type == "gpt_neo" and any(
    np.any(array.get()) for name, array in arrays.items() if _HEAD_BIAS.fullmatch(name)
  ):
    reason = "the biases of queries, keys and values must be zero, but they are not"
  if reason:
    raise ValueError(f"this model cannot be written as Transformers' {model_type}: {reason}")


def _attention_types(config: TransformerConfig) -> dict[str, Any]:
  layers, pattern = config.num_layers, list(config.layer_pattern)
  groups: list[Any] = [[pattern, layers // len(pattern)]] if layers >= len(pattern) else []
  groups += [[pattern[:rest], 1]] if (rest := layers % len(pattern)) else []
  return {"attention_types": groups, **({"window_size": config.window} if config.window else {})}


def _vocabulary_entries(table: StoredArray, source: Config, is_shifted: bool) -> dict[str, Any]:
  """Returns the vocabulary size and the special tokens in config.json.

  If training has changed our row 0, which starts texts, it becomes a token of its own, the last one.
  """
  size = table.shape[0]
  if not is_shifted:
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
    return {"vocab_size": size, name_tables.PADDING_IS_TOKEN_0: True, **ids}
  end = source.get("eos_token_id", _GPT2_END if size > _GPT2_END + 1 else size - 2)
  start = name_tables.start_token({"vocab_size": size - 1, **source}) if source else end
  first, copied = (table.read((slice(n, n + 1), slice(None))) for n in (0, start + 1))
  if not np.array_equal(first, copied):
    return {"vocab_size": size, "eos_token_id": end, "bos_token_id": size - 1}
  ids = {"vocab_size": size - 1, "eos_token_id": end}
  # The bos_token_id of the source, or its absence, is kept.
  return ids if source else {**ids, "bos_token_id": start}


def make_weights(arrays: Arrays, config: Config) -> dict[str, StoredArray]:
  """Returns {Transformers' name: array} for weights in the plain tree and their config.json."""
  is_neo = config["model_type"] == "gpt_neo"
  kept = {n: x for n, x in arrays.items() if not (is_neo and _HEAD_BIAS.fullmatch(n))}
  if not config.get(name_tables.PADDING_IS_TOKEN_0):
    table_VD = arrays[EMBEDDING]
    parts = [lazy_arrays.slice_axis(table_VD, 0, 1, table_VD.shape[0])]
    if config["vocab_size"] == table_VD.shape[0]:
      # Row 0 is no longer a copy of another token's row, so it becomes the last one.
      parts.append(lazy_arrays.slice_axis(table_VD, 0, 0, 1))
    kept[EMBEDDING] = lazy_arrays.concatenate(parts, 0)
  return name_tables.to_transformers(kept, weight_table(config), config["model_type"])
