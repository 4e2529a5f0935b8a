"""T5's forward pass in numpy, a layer in memory at a time: what conversions are checked with.

It is written from the paper's formulas and shares no code with the networks, so that an error in one
does not hide in the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import numpy as np

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.networks.layers.embedding import relative_position_bucket

Arrays = Mapping[str, StoredArray]

_EMBEDDING = "target/token_embedder/embedding"
_HEAD = "target/decoder/logits_dense/kernel"
_MAX_DISTANCE = 128
_VOCABULARY_AT_ONCE = 8192
_EPSILON = 1e-6


def tanh_gelu(x: np.ndarray) -> np.ndarray:
  """Returns GELU in the approximation by tanh (Hendrycks and Gimpel 2016)."""
  return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
  "gelu": tanh_gelu,
  "linear": lambda x: x,
  "relu": lambda x: np.maximum(x, 0),
  "silu": lambda x: x / (1 + np.exp(-x)),
  "swish": lambda x: x / (1 + np.exp(-x)),
}


def default_activations(arrays: Arrays) -> tuple[str, ...]:
  """Returns the activations of T5 1.1 where its two matrices are there, else those of T5 1.0."""
  gated = any(name.endswith("/mlp/wi_1/kernel") for name in arrays)
  return ("gelu", "linear") if gated else ("relu",)


def encode(
  arrays: Arrays, inputs_BS: np.ndarray, activations: tuple[str, ...] | None = None
) -> np.ndarray:
  """Returns the encoded inputs [B, S, D] in float32.

  Args:
    arrays: parameters in T5X's plain tree (`layouts.unstack_layers`), kernels 2-D.
    inputs_BS: token ids; 0 is padding.
    activations: of the feed-forward block; None for those of the weights' version of T5.
  """
  stack = _Stack(arrays, "encoder", activations)
  allowed_B1SS = (inputs_BS > 0)[:, None, None, :] & (inputs_BS > 0)[:, None, :, None]
  x_BSD = embed(arrays, "encoder", inputs_BS)
  for layer in range(stack.layers):
    x_BSD = x_BSD + stack.attention(
      layer, "attention", "pre_attention_layer_norm", x_BSD, None, allowed_B1SS
    )
    x_BSD = x_BSD + stack.mlp(layer, x_BSD)
  return _norm(x_BSD, arrays["target/encoder/encoder_norm/scale"])


def logits(
  arrays: Arrays,
  inputs_BS: np.ndarray | None,
  targets_BT: np.ndarray,
  activations: tuple[str, ...] | None = None,
) -> np.ndarray:
  """Returns the logits [B, T, V] in float32; the targets hold no padding.

  Args:
    arrays: parameters in T5X's plain tree, kernels 2-D.
    inputs_BS: token ids of the encoder; None for a model without one.
    targets_BT: what the decoder is given: the targets shifted right.
    activations: see `encode`.
  """
  stack = _Stack(arrays, "decoder", activations)
  length = targets_BT.shape[1]
  causal_11TT = np.tril(np.ones((length, length), bool))[None, None]
  encoded_BSD, cross_B11S = None, None
  if inputs_BS is not None:
    encoded_BSD = encode(arrays, inputs_BS, activations)
    cross_B11S = (inputs_BS > 0)[:, None, None, :]
  first, norm = stack.self_attention_names()
  x_BTD = embed(arrays, "decoder", targets_BT)
  for layer in range(stack.layers):
    x_BTD = x_BTD + stack.attention(layer, first, norm, x_BTD, None, causal_11TT)
    if cross_B11S is not None:
      x_BTD = x_BTD + stack.attention(
        layer,
        "encoder_decoder_attention",
        "pre_cross_attention_layer_norm",
        x_BTD,
        encoded_BSD,
        cross_B11S,
      )
    x_BTD = x_BTD + stack.mlp(layer, x_BTD)
  return output_layer(arrays, _norm(x_BTD, arrays["target/decoder/decoder_norm/scale"]))


class _Stack:
  """The encoder's or the decoder's layers, read when they are computed."""

  def __init__(self, arrays: Arrays, side: str, activations: tuple[str, ...] | None):
    self.arrays = arrays
    self.side = side
    self.activations = activations or default_activations(arrays)
    pattern = re.compile(rf"target/{side}/layers_(\d+)/")
    self.layers = 1 + max(int(m[1]) for name in arrays if (m := pattern.match(name)))

  def self_attention_names(self) -> tuple[str, str]:
    prefix = f"target/{self.side}/layers_0/"
    for norm in ("pre_self_attention_layer_norm", "pre_attention_layer_norm"):
      if f"{prefix}{norm}/scale" in self.arrays:
        return "self_attention", norm
    raise ValueError(
      f"the decoder's layers have no norm before their attention ({prefix}pre_self_attention_"
      "layer_norm): this is no T5, whose forward pass is known here"
    )

  def _read(self, layer: int, name: str) -> np.ndarray:
    return as_float(self.arrays[f"target/{self.side}/layers_{layer}/{name}"].get())

  def attention(
    self,
    layer: int,
    name: str,
    norm: str,
    x_BTD: np.ndarray,
    encoded_BSD: np.ndarray | None,
    allowed: np.ndarray,
  ) -> np.ndarray:
    """Returns what an attention block adds: to itself, or to the encoded inputs without a bias."""
    scale = self.arrays[f"target/{self.side}/layers_{layer}/{norm}/scale"]
    q_BTD = _norm(x_BTD, scale)
    kv_BSD = q_BTD if encoded_BSD is None else encoded_BSD
    table_HN = as_float(self._bias_table(layer).get())
    heads = len(table_HN)
    q_BHTK = split_heads(q_BTD @ self._read(layer, f"{name}/query/kernel"), heads)
    k_BHSK = split_heads(kv_BSD @ self._read(layer, f"{name}/key/kernel"), heads)
    v_BHSK = split_heads(kv_BSD @ self._read(layer, f"{name}/value/kernel"), heads)
    scores_BHTS = q_BHTK @ k_BHSK.swapaxes(-1, -2)
    if encoded_BSD is None:
      scores_BHTS = scores_BHTS + _bias(table_HN, x_BTD.shape[1], self.side == "encoder")
    scores_BHTS = np.where(allowed, scores_BHTS, np.float32(-1e10))
    weights_BHTS = np.exp(scores_BHTS - scores_BHTS.max(-1, keepdims=True))
    weights_BHTS /= weights_BHTS.sum(-1, keepdims=True)
    mixed_BTHK = (weights_BHTS @ v_BHSK).swapaxes(1, 2)
    joined_BTD = mixed_BTHK.reshape(*mixed_BTHK.shape[:2], -1)
    return joined_BTD @ self._read(layer, f"{name}/out/kernel")

  def _bias_table(self, layer: int) -> StoredArray:
    own = f"target/{self.side}/layers_{layer}/relpos_bias/rel_embedding"
    return self.arrays.get(own) or self.arrays[f"target/{self.side}/relpos_bias/rel_embedding"]

  def mlp(self, layer: int, x_BTD: np.ndarray) -> np.ndarray:
    """Returns what the feed-forward block adds."""
    scale = self.arrays[f"target/{self.side}/layers_{layer}/pre_mlp_layer_norm/scale"]
    y_BTD = _norm(x_BTD, scale)
    hidden_BTF = np.ones((), np.float32)
    for number, activation in enumerate(self.activations):
      matrix = "wi" if len(self.activations) == 1 else f"wi_{number}"
      projected = y_BTD @ self._read(layer, f"mlp/{matrix}/kernel")
      hidden_BTF = hidden_BTF * _ACTIVATIONS[activation](projected)
    return hidden_BTF @ self._read(layer, "mlp/wo/kernel")


def split_heads(x_BTE: np.ndarray, heads: int) -> np.ndarray:
  """Returns [B, H, T, K] of heads side by side."""
  return x_BTE.reshape(*x_BTE.shape[:2], heads, -1).swapaxes(1, 2)


def _bias(table_HN: np.ndarray, length: int, bidirectional: bool) -> np.ndarray:
  distance_TS = np.arange(length)[None, :] - np.arange(length)[:, None]
  bucket_TS = relative_position_bucket(distance_TS, bidirectional, table_HN.shape[1], _MAX_DISTANCE)
  return table_HN[None, :, bucket_TS]


def _norm(x_BTD: np.ndarray, scale: StoredArray) -> np.ndarray:
  mean_square = np.mean(np.square(x_BTD), axis=-1, keepdims=True)
  return x_BTD / np.sqrt(mean_square + _EPSILON) * as_float(scale.get())


def embed(arrays: Arrays, side: str, tokens_BT: np.ndarray) -> np.ndarray:
  """Returns the tokens' vectors [B, T, D]; only their rows are read."""
  table = arrays.get(f"target/{side}/token_embedder/embedding") or arrays[_EMBEDDING]
  unique, places = np.unique(tokens_BT, return_inverse=True)
  rows = [table.read((slice(int(token), int(token) + 1), slice(None))) for token in unique]
  return as_float(np.concatenate(rows))[places.reshape(tokens_BT.shape)]


def output_layer(arrays: Arrays, y_BTD: np.ndarray, divides_tied: bool = True) -> np.ndarray:
  """Returns the logits [B, T, V], a part of the vocabulary in memory at a time.

  Args:
    arrays: parameters.
    y_BTD: the decoder's last activations.
    divides_tied: whether logits from the embedding table are divided by √D.
  """
  kernel = arrays.get(_HEAD)
  tied = arrays.get("target/decoder/token_embedder/embedding") or arrays.get(_EMBEDDING)
  size = kernel.shape[1] if kernel is not None else tied.shape[0]  # type: ignore[union-attr]
  parts = []
  for start in range(0, size, _VOCABULARY_AT_ONCE):
    columns = slice(start, min(start + _VOCABULARY_AT_ONCE, size))
    if kernel is not None:
      part_DV = as_float(kernel.read((slice(None), columns)))
    else:
      assert tied is not None, "a T5 without an output layer ties it to the embedding"
      part_DV = as_float(tied.read((columns, slice(None)))).T / (
        math.sqrt(y_BTD.shape[-1]) if divides_tied else 1.0
      )
    parts.append(y_BTD @ part_DV)
  return np.concatenate(parts, -1)


def as_float(values: np.ndarray) -> np.ndarray:
  """Returns values in float32, or in float64 if they are."""
  return np.asarray(values, np.result_type(values.dtype, np.float32))
