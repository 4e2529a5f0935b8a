"""Reads and writes the weights of Transformers' GPT-2 and GPT-Neo as those of `networks.decoder`.

Our ids are one higher, because id 0 is padding and starts every text. Row 0 of our embedding table is
a copy of the row of `<|endoftext|>`, the token that these models have seen before a text, and
`padding_never_follows` removes its logit. A model that was trained here with padding as its own token
0 keeps its ids: the config.json that we write for it contains `padding_is_token_0`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from rosetta_t5.checkpoints.arrays import lazy_arrays
from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.formats.hugging_face import weight_mapping
from rosetta_t5.checkpoints.formats.hugging_face.activations import flax_name, transformers_name
from rosetta_t5.checkpoints.formats.hugging_face.weight_mapping import WeightMapping, count_layers
from rosetta_t5.networks.decoder_config import TransformerConfig

# The entry of config.json that marks a model whose ids are those of its SentencePiece vocabulary.
PADDING_IS_TOKEN_0 = "padding_is_token_0"
EMBEDDING = "target/decoder/token_embedder/embedding"
POSITIONS = "target/decoder/position_embedding"
# Masks in PyTorch's files, which are not weights.
IGNORED = re.compile(r"h\.\d+\.(attn|crossattention)\.(attention\.)?(masked_)?bias")
_HEADS = ("query", "key", "value")
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
  POSITIONS: "no learned positions (positions = 'rotary' or 'relative')",
  "target/decoder/decoder_norm/bias": "T5's norm (norm = 'rms')",
  "target/decoder/layers_0/mlp/wo/bias": "no biases (use_bias = False)",
}


@dataclasses.dataclass(frozen=True)
class GPTFamily:
  """How one of the two architectures names and stores its weights."""

  architecture: str  # the class in Transformers
  sizes: dict[str, str]  # {entry of config.json: field of TransformerConfig}
  matrices: dict[str, tuple[str, ...]]  # {their name: our names} of matrices that have a bias
  matrices_without_bias: dict[str, str]  # {their name: our name}; ours have a bias, which is zero
  is_transposed: bool  # whether matrices are stored as [out, in]


FAMILIES = {
  "gpt2": GPTFamily(
    architecture="GPT2LMHeadModel",
    sizes={
      "n_embd": "emb_dim",
      "n_head": "num_heads",
      "n_layer": "num_layers",
      "n_positions": "max_length",
      "n_inner": "mlp_dim",
    },
    matrices={
      "attn.c_attn": tuple(f"self_attention/{head}" for head in _HEADS),
      "attn.c_proj": ("self_attention/out",),
      "mlp.c_fc": ("mlp/wi",),
      "mlp.c_proj": ("mlp/wo",),
    },
    matrices_without_bias={},
    is_transposed=False,
  ),
  "gpt_neo": GPTFamily(
    architecture="GPTNeoForCausalLM",
    sizes={
      "hidden_size": "emb_dim",
      "num_heads": "num_heads",
      "num_layers": "num_layers",
      "max_position_embeddings": "max_length",
      "intermediate_size": "mlp_dim",
    },
    matrices={
      "attn.attention.out_proj": ("self_attention/out",),
      "mlp.c_fc": ("mlp/wi",),
      "mlp.c_proj": ("mlp/wo",),
    },
    matrices_without_bias={
      f"attn.attention.{head[0]}_proj": f"self_attention/{head}" for head in _HEADS
    },
    is_transposed=True,
  ),
}


def _weight_table(family: str, layers: int) -> list[WeightMapping]:
  """Returns all weights of a model of one of FAMILIES; names lack the prefix `transformer.`."""
  is_transposed = FAMILIES[family].is_transposed
  matrices, bare = FAMILIES[family].matrices, FAMILIES[family].matrices_without_bias
  table = [WeightMapping("wte.weight", (EMBEDDING,)), WeightMapping("wpe.weight", (POSITIONS,))]
  norms = {"ln_f": "target/decoder/decoder_norm"}
  for layer in range(layers):
    theirs, ours = f"h.{layer}.", f"target/decoder/layers_{layer}/"
    norms |= {f"{theirs}ln_1": f"{ours}pre_self_attention_layer_norm"}
    norms |= {f"{theirs}ln_2": f"{ours}pre_mlp_layer_norm"}
    for name, parts in (matrices | {name: (part,) for name, part in bare.items()}).items():
      kernels = tuple(f"{ours}{part}/kernel" for part in parts)
      table.append(WeightMapping(f"{theirs}{name}.weight", kernels, is_transposed))
      if name in matrices:
        biases = tuple(f"{ours}{part}/bias" for part in parts)
        table.append(WeightMapping(f"{theirs}{name}.bias", biases))
  for theirs, ours in norms.items():
    table.append(WeightMapping(f"{theirs}.weight", (f"{ours}/scale",)))
    table.append(WeightMapping(f"{theirs}.bias", (f"{ours}/bias",)))
  return table


def _unsupported_biases(family: str, layers: int) -> list[str]:
  """Returns our names of the biases that the family lacks; they must be zero in such a model."""
  parts = FAMILIES[family].matrices_without_bias.values()
  return [f"target/decoder/layers_{n}/{part}/bias" for n in range(layers) for part in parts]


def sizes(arrays: Mapping[str, StoredArray]) -> dict[str, int]:
  """Returns the fields of TransformerConfig that the shapes of arrays in the plain tree show."""
  rows, width = arrays[EMBEDDING].shape
  return {
    "vocab_size": rows,
    "emb_dim": width,
    "max_length": arrays[POSITIONS].shape[0],
    "num_layers": count_layers(arrays, "target/decoder/layers_"),
    "mlp_dim": arrays["target/decoder/layers_0/mlp/wi/kernel"].shape[1],
  }


def network_settings(
  config: Mapping[str, Any], arrays: Mapping[str, StoredArray]
) -> dict[str, Any]:
  """Returns the fields of TransformerConfig for the config.json of a GPT-2 or GPT-Neo and its arrays.

  Raises:
    ValueError: the number of heads does not divide the width, or this project's network lacks the
      activation or the pattern of local layers.
  """
  is_neo = config["model_type"] == "gpt_neo"
  entry = "num_heads" if is_neo else "n_head"
  found, heads = sizes(arrays), config.get(entry)
  if type(heads) is not int or heads < 1 or found["emb_dim"] % heads:
    raise ValueError(
      f"{entry} must be a number of heads that divides {found['emb_dim']}, the model's width, got "
      f"{reprlib.repr(heads)}"
    )
  activation = str(config.get("activation_function", "gelu_new"))
  keeps_ids = bool(config.get(PADDING_IS_TOKEN_0))
  return {
    **found,
    "num_heads": heads,
    "head_dim": found["emb_dim"] // heads,
    "mlp_activations": (flax_name("activation_function", activation),),
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
    config: the content of config.json.

  Raises:
    ValueError: weights are missing, or belong to another architecture.
  """
  family, weights = config["model_type"], dict(weights)
  head = weights.pop("lm_head.weight", None)
  if head is not None and not weight_mapping.are_equal(head, weights.get("wte.weight", head)):
    raise ValueError("lm_head.weight must equal wte.weight: this project's GPTs have tied tables")
  layers = count_layers(weights, r"h\.")
  table = _weight_table(family, layers)
  arrays = weight_mapping.from_transformers(weights, table, family)
  weight_mapping.check_complete(weights, table, family)
  if not config.get(PADDING_IS_TOKEN_0):
    table_VD = arrays[EMBEDDING]
    start = start_token({**config, "vocab_size": table_VD.shape[0]})
    start_row_1D = lazy_arrays.slice_axis(table_VD, 0, start, start + 1)
    arrays[EMBEDDING] = lazy_arrays.concatenate([start_row_1D, table_VD], 0)
  for name in _unsupported_biases(family, layers):
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
  scales_queries = config.scale_queries or config.scale_attn_logits
  is_neo = config.local_attention_window is not None or not scales_queries
  return "gpt_neo" if is_neo else "gpt2"


def make_config(
  arrays: Mapping[str, StoredArray],
  network: TransformerConfig,
  family: str,
  source_config: Mapping[str, Any],
  ids_are_shifted: bool,
) -> dict[str, Any]:
  """Returns the content of config.json for weights in the plain tree.

  Args:
    arrays: the weights by our names.
    network: the settings of the network.
    family: 'gpt2' or 'gpt_neo'.
    source_config: the config.json that the model came with, whose other entries are kept; or {}.
    ids_are_shifted: whether our ids are one higher than the tokenizer's, which has no padding.

  Raises:
    ValueError: the family does not support the config, or the config does not match these weights.
  """
  _check_network(arrays, network, family)
  dtype = arrays[EMBEDDING].dtype.name
  kept = source_config if source_config.get("model_type") == family else {}
  not_kept = ("_name_or_path", PADDING_IS_TOKEN_0)
  return {
    **{key: value for key, value in kept.items() if key not in not_kept},
    **{entry: getattr(network, field) for entry, field in FAMILIES[family].sizes.items()},
    **(_attention_types(network) if family == "gpt_neo" else {}),
    **_vocabulary_entries(arrays[EMBEDDING], ids_are_shifted, source_config),
    "architectures": [FAMILIES[family].architecture],
    "model_type": family,
    "activation_function": transformers_name(network.mlp_activations[0]),
    "layer_norm_epsilon": network.norm_epsilon,
    "tie_word_embeddings": True,
    "dtype": dtype,
    "torch_dtype": dtype,
    "transformers_version": "5.0.0",
  }


def _check_network(
  arrays: Mapping[str, StoredArray], network: TransformerConfig, family: str
) -> None:
  width, window = arrays[EMBEDDING].shape[1], network.local_attention_window
  kernel_width = arrays["target/decoder/layers_0/self_attention/query/kernel"].shape[1]
  reason = ""
  if not kernel_width == network.num_heads * network.head_dim == width:
    reason = (
      f"num_heads * head_dim must be {kernel_width}, as in the weights, and equal emb_dim, got "
      f"num_heads = {network.num_heads}, head_dim = {network.head_dim}, emb_dim = {width}"
    )
  elif family == "gpt2" and window is not None:
    reason = f"local_attention_window must be None, got {window}; --model-type gpt_neo supports it"
  if reason:
    raise ValueError(
      f"this model cannot be written as Transformers' {family}: {reason}{_OTHER_LAYOUTS}"
    )
  names = _unsupported_biases(family, network.num_layers)
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
  arrays: Mapping[str, StoredArray], network: TransformerConfig, their_config: Mapping[str, Any]
) -> dict[str, StoredArray]:
  """Returns {Transformers' name: array} for weights in the plain tree.

  `their_config` is the config.json that `make_config` returned.
  """
  family = their_config["model_type"]
  dropped = _unsupported_biases(family, network.num_layers)
  kept = {name: array for name, array in arrays.items() if name not in dropped}
  kept |= _scale_weights(kept, network, family)
  if not their_config.get(PADDING_IS_TOKEN_0):
    table_VD = arrays[EMBEDDING]
    parts = [lazy_arrays.slice_axis(table_VD, 0, 1, table_VD.shape[0])]
    if their_config["vocab_size"] == table_VD.shape[0]:
      # Row 0 is no longer a copy of another token's row, so it becomes the last one.
      parts.append(lazy_arrays.slice_axis(table_VD, 0, 0, 1))
    kept[EMBEDDING] = lazy_arrays.concatenate(parts, 0)
  theirs = weight_mapping.to_transformers(kept, _weight_table(family, network.num_layers), family)
  return {f"transformer.{name}": array for name, array in theirs.items()}


def _scale_weights(
  arrays: Mapping[str, StoredArray], config: TransformerConfig, family: str
) -> dict[str, StoredArray]:
  """Returns rescaled copies of the weights where network and family scale differently."""
  factors: dict[str, float] = {}
  factor = math.sqrt(config.head_dim) ** (
    (family == "gpt2") - (config.scale_queries or config.scale_attn_logits)
  )
  if factor != 1.0:
    factors |= {name: factor for name in arrays if "/self_attention/query/" in name}
  if config.divide_tied_logits:
    norms = [name for name in arrays if name.startswith("target/decoder/decoder_norm/")]
    factors |= dict.fromkeys(norms, 1 / math.sqrt(config.emb_dim))
  return {name: lazy_arrays.scale(arrays[name], factor) for name, factor in factors.items()}
