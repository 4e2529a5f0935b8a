"""GPT-2's and GPT-Neo's forward pass in numpy, a layer in memory at a time; see `plain_forward`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.conversion.numpy_t5 import (
  as_float,
  embed,
  output_layer,
  split_heads,
  tanh_gelu,
)
from rosetta_t5.networks.decoder_config import TransformerConfig

Arrays = Mapping[str, StoredArray]


def logits(arrays: Arrays, config: TransformerConfig, tokens_BT: np.ndarray) -> np.ndarray:
  """Returns the logits [B, T, V], padding's too, of a sequence without padding.

  Args:
    arrays: parameters in the plain tree.
    config: heads, windows, scales and the norms' epsilon are taken from it.
    tokens_BT: ids, shifted right.
  """
  length = tokens_BT.shape[1]
  places_TD = arrays["target/decoder/position_embedding"].read((slice(0, length), slice(None)))
  x_BTD = embed(arrays, "decoder", tokens_BT) + as_float(places_TD)
  distance_TS = np.arange(length)[:, None] - np.arange(length)
  for layer in range(config.num_layers):
    window = config.local_attention_window if layer % 2 else None
    seen_TS = (distance_TS >= 0) & (distance_TS < (window or length))
    params = _layer(arrays, f"target/decoder/layers_{layer}/")
    x_BTD = x_BTD + _attention(params, config, x_BTD, seen_TS)
    x_BTD = x_BTD + _mlp(params, config, x_BTD)
  last = _layer(arrays, "target/decoder/decoder_norm/", "decoder_norm/")
  y_BTD = _norm(last, "decoder_norm", x_BTD, config.norm_epsilon)
  return output_layer(arrays, y_BTD, config.divide_tied_logits)


def _layer(arrays: Arrays, prefix: str, kept: str = "") -> dict[str, np.ndarray]:
  names = [name for name in arrays if name.startswith(prefix)]
  return {kept + name.removeprefix(prefix): as_float(arrays[name].get()) for name in names}


def _attention(
  params: Mapping[str, np.ndarray],
  config: TransformerConfig,
  x_BTD: np.ndarray,
  seen_TS: np.ndarray,
) -> np.ndarray:
  y_BTD = _norm(params, "pre_self_attention_layer_norm", x_BTD, config.norm_epsilon)
  q_BHTK, k_BHSK, v_BHSK = (
    split_heads(_product(params, f"self_attention/{name}", y_BTD), config.num_heads)
    for name in ("query", "key", "value")
  )
  if config.scale_queries or config.scale_attn_logits:
    q_BHTK = q_BHTK / math.sqrt(config.head_dim)
  scores_BHTS = np.where(seen_TS, q_BHTK @ k_BHSK.swapaxes(-1, -2), -np.inf)
  weights_BHTS = np.exp(scores_BHTS - scores_BHTS.max(-1, keepdims=True))
  weights_BHTS /= weights_BHTS.sum(-1, keepdims=True)
  mixed_BTHK = (weights_BHTS @ v_BHSK).swapaxes(1, 2)
  return _product(params, "self_attention/out", mixed_BTHK.reshape(*x_BTD.shape[:2], -1))


def _mlp(
  params: Mapping[str, np.ndarray], config: TransformerConfig, x_BTD: np.ndarray
) -> np.ndarray:
  y_BTD = _norm(params, "pre_mlp_layer_norm", x_BTD, config.norm_epsilon)
  return _product(params, "mlp/wo", tanh_gelu(_product(params, "mlp/wi", y_BTD)))


def _product(params: Mapping[str, np.ndarray], name: str, x_BTD: np.ndarray) -> np.ndarray:
  return x_BTD @ params[f"{name}/kernel"] + params[f"{name}/bias"]


def _norm(
  params: Mapping[str, np.ndarray], name: str, x_BTD: np.ndarray, epsilon: float
) -> np.ndarray:
  centred_BTD = x_BTD - x_BTD.mean(-1, keepdims=True)
  variance_BT1 = np.square(centred_BTD).mean(-1, keepdims=True)
  normed_BTD = centred_BTD / np.sqrt(variance_BT1 + epsilon)
  return normed_BTD * params[f"{name}/scale"] + params[f"{name}/bias"]
