"""Reads the weights of Transformers' T5 family: T5 1.0 and 1.1, mT5, ByT5, UMT5, Flan-T5, Switch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray, scale, transpose
from rosetta_t5.checkpoints.formats.hugging_face import switch_names, t5_names, weight_mapping
from rosetta_t5.checkpoints.formats.hugging_face.t5_names import EMBEDDING, HEAD, HF_EMBEDDING

# Weights that only some of the models have.
_OPTIONAL = re.compile(r"lm_head|relative_attention_bias|DenseReluDense\.wi|final_layer_norm")


def read_arrays(
  weights: Mapping[str, StoredArray], config: Mapping[str, Any]
) -> dict[str, StoredArray]:
  """Returns {T5X's name: array} of a model, in T5X's plain tree; the values are read later.

  A relative bias of one layer becomes its stack's (`encoder/relpos_bias`); where every layer has one
  (UMT5), they remain the layers'. The output layer is left out if it is the embedding table divided
  by √d_model, which is how T5 1.0 computes logits.

  Raises:
    ValueError: weights are missing, or belong to another architecture.
  """
  weights = dict(weights)
  copies = [weights.pop(name) for name in t5_names.HF_EMBEDDING_COPIES if name in weights]
  if HF_EMBEDDING not in weights:
    if not copies:
      raise ValueError(f"the embedding table ({HF_EMBEDDING}) is missing: the folder is incomplete")
    weights[HF_EMBEDDING] = copies[0]
  if not all(_are_equal(copy, weights[HF_EMBEDDING]) for copy in copies):
    raise ValueError(
      f"encoder and decoder must share the embedding table {HF_EMBEDDING}, but their own tables "
      f"({', '.join(t5_names.HF_EMBEDDING_COPIES)}) differ from it"
    )
  experts: dict[str, StoredArray] = {}
  if config["model_type"] == switch_names.FAMILY:
    weights, experts = switch_names.split_weights(weights, config)
  encoder_layers = weight_mapping.count_layers(weights, r"encoder\.block\.")
  decoder_layers = weight_mapping.count_layers(weights, r"decoder\.block\.")
  table = t5_names.weight_table(encoder_layers, decoder_layers)
  arrays = weight_mapping.from_transformers(weights, table, "T5X's T5")
  required = [x for x in table if not _OPTIONAL.search(x.theirs)]
  # Layers with experts have no block of their own.
  required = [x for x in required if x.ours[0].replace("/mlp/", "/mlp/expert/") not in experts]
  weight_mapping.check_complete(weights, required, "T5")
  arrays = t5_names.rename_shared_biases(arrays) | experts
  return _with_head(arrays, config) if decoder_layers else arrays


def activation_entry(config: Mapping[str, Any]) -> tuple[str, str]:
  """Returns the name and the value of the entry of a config.json that names the activation."""
  entry = "dense_act_fn" if config["model_type"] == switch_names.FAMILY else "feed_forward_proj"
  return entry, str(config.get(entry, "relu"))


def read_activations(config: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns T5Config.mlp_activations for a config.json.

  Raises:
    ValueError: the activation is unknown, or is the exact GELU.
  """
  entry, value = activation_entry(config)
  gate, _, name = value.rpartition("-")
  if gate not in ("", "gated"):
    raise ValueError(
      f"{entry} must be an activation such as 'relu', or one such as 'gated-gelu', got {value!r}"
    )
  if value == "gelu":  # 'gated-gelu' is the approximation in Transformers too.
    raise ValueError(
      f"{entry} must be 'gelu_new', got 'gelu': Transformers' 'gelu' is computed without the "
      "approximation by tanh, which is used here. Change the entry if small differences are acceptable"
    )
  name = "gelu" if name == "gelu_new" else name
  return (name, "linear") if gate else (name,)


def scales_logits(config: Mapping[str, Any]) -> bool:
  """Returns whether the model divides the input of its output layer by √d_model.

  Transformers 4 decides by `tie_word_embeddings`. Transformers 5 always writes True there: T5 has
  `scale_decoder_outputs` instead, mT5 never divides, and UMT5 always does. Switch still decides by it.
  """
  tied = config.get("tie_word_embeddings")
  if config["model_type"] == "t5":
    return bool(config.get("scale_decoder_outputs", tied is not False))
  if config["model_type"] in ("umt5", switch_names.FAMILY):
    return tied is not False
  return tied is True and re.match(r"[0-4]\.", str(config.get("transformers_version"))) is not None


def _with_head(arrays: dict[str, StoredArray], config: Mapping[str, Any]) -> dict[str, StoredArray]:
  """Returns the arrays, with an output layer if the model does not compute logits as T5 1.0 does."""
  embedding = arrays[EMBEDDING]
  head = arrays.pop(HEAD, None)
  if head is not None and _are_equal(transpose(head), embedding):
    head = None  # It is the embedding table: PyTorch's files contain tied weights twice.
  if not scales_logits(config):
    arrays[HEAD] = transpose(embedding) if head is None else head
  elif head is not None:
    arrays[HEAD] = scale(head, 1 / math.sqrt(embedding.shape[1]))
  return arrays


def _are_equal(a: StoredArray, b: StoredArray) -> bool:
  """Compares two matrices in parts, so that tables of gigabytes are never in memory as a whole."""
  return a.shape == b.shape and all(np.array_equal(a.read(p), b.read(p)) for p in a.parts())
