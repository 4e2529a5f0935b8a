"""GPT-2's and GPT-Neo's forward pass in numpy, for the same purpose as `numpy_t5`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy_layers
from numpy_layers import Arrays

from rosetta_t5.networks.decoder_config import TransformerConfig

Params = Mapping[str, np.ndarray]


def compute_logits(arrays: Arrays, config: TransformerConfig, tokens_BT: np.ndarray) -> np.ndarray:
  """Returns the logits [B, T, V], including padding's, of sequences without padding.

  Args:
    arrays: parameters in the plain tree.
    config: heads, windows, scales and the norms' epsilon are taken from it.
    tokens_BT: token ids, shifted right.
  """
  length = tokens_BT.shape[1]
  positions_TD = arrays["target/decoder/position_embedding"].read((slice(0, length), slice(None)))
  x_BTD = numpy_layers.embed(arrays, "decoder", tokens_BT) + numpy_layers.as_float(positions_TD)
  distance_TS = np.arange(length)[:, None] - np.arange(length)
  for layer in range(config.num_layers):
    window = config.local_attention_window if layer % 2 else None
    allowed_TS = (distance_TS >= 0) & (distance_TS < (window or length))
    params = _read(arrays, f"target/decoder/layers_{layer}/")
    x_BTD = x_BTD + _attention(params, config, x_BTD, allowed_TS)
    x_BTD = x_BTD + _mlp(params, config, x_BTD)
  last = _read(arrays, "target/decoder/", "decoder_norm/")
  y_BTD = _norm(last, "decoder_norm", x_BTD, config)
  return numpy_layers.output_layer(arrays, y_BTD, config.divide_tied_logits)


def _read(arrays: Arrays, prefix: str, group: str = "") -> dict[str, np.ndarray]:
  """Returns the parameters whose names begin with `prefix + group`, under names without `prefix`."""
  names = [name for name in arrays if name.startswith(prefix + group)]
  return {name.removeprefix(prefix): numpy_layers.as_float(arrays[name].get()) for name in names}


def _attention(
  params: Params, config: TransformerConfig, x_BTD: np.ndarray, allowed_TS: np.ndarray
) -> np.ndarray:
  y_BTD = _norm(params, "pre_self_attention_layer_norm", x_BTD, config)
  q_BTE, k_BTE, v_BTE = (
    _dense(params, f"self_attention/{name}", y_BTD) for name in ("query", "key", "value")
  )
  if config.scale_queries or config.scale_attn_logits:
    q_BTE = q_BTE / math.sqrt(config.head_dim)
  mixed_BTE = numpy_layers.attend(q_BTE, k_BTE, v_BTE, config.num_heads, allowed_TS)
  return _dense(params, "self_attention/out", mixed_BTE)


def _mlp(params: Params, config: TransformerConfig, x_BTD: np.ndarray) -> np.ndarray:
  y_BTD = _norm(params, "pre_mlp_layer_norm", x_BTD, config)
  return _dense(params, "mlp/wo", numpy_layers.tanh_gelu(_dense(params, "mlp/wi", y_BTD)))


def _dense(params: Params, name: str, x_BTD: np.ndarray) -> np.ndarray:
  return x_BTD @ params[f"{name}/kernel"] + params[f"{name}/bias"]


def _norm(params: Params, name: str, x_BTD: np.ndarray, config: TransformerConfig) -> np.ndarray:
  centred_BTD = x_BTD - x_BTD.mean(-1, keepdims=True)
  variance_BT1 = np.square(centred_BTD).mean(-1, keepdims=True)
  normed_BTD = centred_BTD / np.sqrt(variance_BT1 + config.norm_epsilon)
  return normed_BTD * params[f"{name}/scale"] + params[f"{name}/bias"]
