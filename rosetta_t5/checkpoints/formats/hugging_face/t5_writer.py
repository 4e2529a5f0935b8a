"""Writes a model of T5X as one of Transformers' T5 family."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray, scale
from rosetta_t5.checkpoints.formats.hugging_face import switch_names, t5_names
from rosetta_t5.checkpoints.formats.hugging_face.config_sizes import t5_sizes
from rosetta_t5.checkpoints.formats.hugging_face.t5_names import EMBEDDING, HEAD, HF_HEAD
from rosetta_t5.checkpoints.formats.hugging_face.weight_mapping import count_layers, to_transformers

_MT5_VOCABULARY = 250112
_ARCHITECTURES = {
  "t5": "T5",
  "mt5": "MT5",
  "umt5": "UMT5",
  switch_names.FAMILY: "SwitchTransformers",
}
_SHARED_BIAS = re.compile(r"target/(encoder|decoder)/relpos_bias/")
# Transformers' names of flax's activations. T5 1.1's GELU is the approximation by tanh.
_PROJECTIONS = {
  ("relu",): "relu",
  ("gelu",): "gelu_new",
  ("gelu", "linear"): "gated-gelu",
  ("silu", "linear"): "gated-silu",
  ("swish", "linear"): "gated-silu",
  ("relu", "linear"): "gated-relu",
}


def find_family(arrays: Mapping[str, StoredArray]) -> str:
  """Returns the family of weights: UMT5 has a bias in each layer, and mT5's vocabulary a known size."""
  if switch_names.has_experts(arrays):
    return switch_names.FAMILY
  if any(re.search(r"/layers_\d+/relpos_bias/", name) for name in arrays):
    return "umt5"
  return "mt5" if arrays[EMBEDDING].shape[0] == _MT5_VOCABULARY else "t5"


def make_config(
  arrays: Mapping[str, StoredArray],
  family: str,
  activations: Sequence[str],
  source_config: Mapping[str, Any],
  expert_capacity: int | None = None,
) -> dict[str, Any]:
  """Returns the content of config.json for weights in T5X's plain tree.

  Args:
    arrays: the weights by T5X's names, with 2-D kernels.
    family: 't5', 'mt5', 'umt5' or 'switch_transformers'.
    activations: flax's names, such as ('gelu', 'linear').
    source_config: the config.json that the model came with, whose other entries are kept; or {}.
    expert_capacity: the number of slots that an expert has in a row; None without experts.

  Raises:
    ValueError: Transformers has no name for the activations, or cannot have experts in these layers.
  """
  projection = _PROJECTIONS.get(tuple(activations))
  if projection is None:
    raise ValueError(
      f"mlp_activations must be one of {', '.join(map(str, _PROJECTIONS))} for Transformers, got "
      f"{tuple(activations)}"
    )
  sizes = t5_sizes(arrays)
  has_decoder = "num_decoder_layers" in sizes
  class_suffix = "ForConditionalGeneration" if has_decoder else "EncoderModel"
  dtype = arrays[EMBEDDING].dtype.name
  dropped = ("_name_or_path", "scale_decoder_outputs")
  experts: dict[str, Any] = {}
  if expert_capacity is not None:
    experts = switch_names.config_entries(arrays, expert_capacity)
  return {
    "dropout_rate": 0.1,
    "initializer_factor": 1.0,
    **{key: value for key, value in source_config.items() if key not in dropped},
    "architectures": [_ARCHITECTURES[family] + class_suffix],
    "model_type": family,
    "num_decoder_layers": sizes["num_layers"],
    **sizes,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": projection,
    "is_gated_act": projection.startswith("gated-"),
    "dense_act_fn": "gelu_new" if projection == "gated-gelu" else projection.split("-")[-1],
    "is_encoder_decoder": has_decoder,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "use_cache": has_decoder,
    # Transformers 4 decides by this entry whether logits are divided by √d_model, as in T5 1.0.
    # Transformers 5 decides by `scale_decoder_outputs`, whose default is this entry's value.
    "tie_word_embeddings": HEAD not in arrays or family == "umt5",
    "dtype": dtype,
    "torch_dtype": dtype,
    "transformers_version": "5.0.0",
    **experts,
  }


def make_weights(arrays: Mapping[str, StoredArray], family: str) -> dict[str, StoredArray]:
  """Returns {Transformers' name: array} for weights in T5X's plain tree.

  Raises:
    ValueError: Transformers' T5 lacks some of the parameters.
  """
  # A bias that the layers share belongs to layer 0.
  own = {
    _SHARED_BIAS.sub(r"target/\1/layers_0/relpos_bias/", name): x for name, x in arrays.items()
  }
  own, experts = switch_names.split_arrays(own)
  theirs = to_transformers(own, t5_names.weight_table(*_layer_counts(arrays)), "T5")
  if family == switch_names.FAMILY:
    theirs = switch_names.rename_mlp(theirs) | experts
  sqrt_d_model = math.sqrt(arrays[EMBEDDING].shape[1])
  if family == "umt5" and HF_HEAD in theirs:
    # Transformers 5 divides the input of UMT5's head by √d_model, whatever its config contains.
    theirs[HF_HEAD] = scale(theirs[HF_HEAD], sqrt_d_model)
  if family == "mt5" and HF_HEAD not in theirs and any("decoder" in name for name in theirs):
    # Transformers' mT5 never divides, so tied logits need a head of their own.
    theirs[HF_HEAD] = scale(theirs[t5_names.HF_EMBEDDING], 1 / sqrt_d_model)
  return theirs


def _layer_counts(arrays: Mapping[str, StoredArray]) -> list[int]:
  return [count_layers(arrays, rf"target/{side}/layers_") for side in ("encoder", "decoder")]
