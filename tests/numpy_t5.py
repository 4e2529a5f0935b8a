"""T5's forward pass in numpy, an oracle for the networks and for what checkpoints are read as.

It follows the paper's formulas and shares no code with `networks`, so that a mistake in one of them is
not hidden by the other. Parameters are in T5X's plain tree, with 2-D kernels.
"""

from __future__ import annotations

import math
import re

import numpy as np

_MAX_DISTANCE = 128
_EPSILON = 1e-6


def encode(arrays, inputs_BS):
  """Returns the encoded inputs [B, S, D] of tokens, of which 0 is padding."""
  is_token_BS = inputs_BS > 0
  x_BSD = _table(arrays, "encoder")[inputs_BS]
  for layer in range(_count_layers(arrays, "encoder")):
    read = _reader(arrays, "encoder", layer)
    y_BSD = _norm(x_BSD, read("pre_attention_layer_norm/scale"))
    allowed_B1SS = is_token_BS[:, None, None, :] & is_token_BS[:, None, :, None]
    x_BSD = x_BSD + _attend(read, "attention", y_BSD, y_BSD, allowed_B1SS, is_relative=True)
    x_BSD = x_BSD + _feed_forward(read, x_BSD)
  return _norm(x_BSD, _reader(arrays, "encoder")("encoder_norm/scale"))


def compute_logits(arrays, inputs_BS, targets_BT):
  """Returns the logits [B, T, V].

  Args:
    arrays: {T5X's name: array}.
    inputs_BS: token ids of the encoder.
    targets_BT: the decoder's inputs, which are the targets shifted right; none of them is padding.
  """
  encoded_BSD, table_VD = encode(arrays, inputs_BS), _table(arrays, "decoder")
  x_BTD = table_VD[targets_BT]
  causal_TT = np.tril(np.ones((targets_BT.shape[1],) * 2, bool))
  is_token_B11S = (inputs_BS > 0)[:, None, None, :]
  for layer in range(_count_layers(arrays, "decoder")):
    read = _reader(arrays, "decoder", layer)
    y_BTD = _norm(x_BTD, read("pre_self_attention_layer_norm/scale"))
    x_BTD = x_BTD + _attend(read, "self_attention", y_BTD, y_BTD, causal_TT, is_relative=True)
    y_BTD = _norm(x_BTD, read("pre_cross_attention_layer_norm/scale"))
    x_BTD = x_BTD + _attend(read, "encoder_decoder_attention", y_BTD, encoded_BSD, is_token_B11S)
    x_BTD = x_BTD + _feed_forward(read, x_BTD)
  y_BTD = _norm(x_BTD, _reader(arrays, "decoder")("decoder_norm/scale"))
  head = arrays.get("target/decoder/logits_dense/kernel")
  if head is None:
    return y_BTD @ (table_VD.T / math.sqrt(y_BTD.shape[-1]))
  return y_BTD @ np.asarray(head.get(), np.float32)


def _reader(arrays, side, layer=None):
  """Returns a function that returns a parameter of a layer or, where it has none, of its stack."""

  def read(name):
    own = f"target/{side}/layers_{layer}/{name}"
    array = arrays.get(own) or arrays.get(f"target/{side}/{name}")
    return None if array is None else np.asarray(array.get(), np.float32)

  return read


def _table(arrays, side):
  own = arrays.get(f"target/{side}/token_embedder/embedding")
  return np.asarray((own or arrays["target/token_embedder/embedding"]).get(), np.float32)


def _count_layers(arrays, side):
  return len({m[0] for name in arrays if (m := re.match(rf"target/{side}/layers_\d+", name))})


def _feed_forward(read, x_BTD):
  """Returns the block of T5 1.1 (gated, GELU by tanh) or of T5 1.0 (ReLU), for what it is added to."""
  y_BTD = _norm(x_BTD, read("pre_mlp_layer_norm/scale"))
  if read("mlp/wi_0/kernel") is None:
    return np.maximum(y_BTD @ read("mlp/wi/kernel"), 0) @ read("mlp/wo/kernel")
  h = y_BTD @ read("mlp/wi_0/kernel")
  h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
  return (h * (y_BTD @ read("mlp/wi_1/kernel"))) @ read("mlp/wo/kernel")


def _attend(read, name, q_BTD, kv_BSD, allowed, is_relative=False):
  """Returns multi-head attention, without scaling; heads are side by side in the kernels."""
  table_HN = read("relpos_bias/rel_embedding")
  q_BHTK, k_BHSK, v_BHSK = (
    (x @ read(f"{name}/{kernel}/kernel")).reshape(*x.shape[:2], len(table_HN), -1).swapaxes(1, 2)
    for x, kernel in ((q_BTD, "query"), (kv_BSD, "key"), (kv_BSD, "value"))
  )
  scores_BHTS = q_BHTK @ k_BHSK.swapaxes(-1, -2)
  if is_relative:
    scores_BHTS = scores_BHTS + _relative_bias(table_HN, q_BTD.shape[1], name == "attention")
  scores_BHTS = np.where(allowed, scores_BHTS, np.float32(-1e10))
  weights_BHTS = np.exp(scores_BHTS - scores_BHTS.max(-1, keepdims=True))
  weights_BHTS /= weights_BHTS.sum(-1, keepdims=True)
  mixed_BTE = (weights_BHTS @ v_BHSK).swapaxes(1, 2).reshape(*q_BTD.shape[:2], -1)
  return mixed_BTE @ read(f"{name}/out/kernel")


def _norm(x_BTD, scale_D):
  mean_square_BT1 = np.mean(np.square(x_BTD), axis=-1, keepdims=True)
  return x_BTD / np.sqrt(mean_square_BT1 + _EPSILON) * scale_D


def _relative_bias(table_HN, length, bidirectional):
  """Returns the bias [H, T, T] of each query and key (Raffel et al., 2020, section 2.1)."""
  distance_TT = np.arange(length)[:, None] - np.arange(length)
  buckets = table_HN.shape[1] // (2 if bidirectional else 1)
  first_TT = np.where(bidirectional & (distance_TT < 0), buckets, 0)
  distance_TT = np.abs(distance_TT) if bidirectional else np.maximum(distance_TT, 0)
  # Half of the buckets are exact distances; the others grow logarithmically up to _MAX_DISTANCE.
  exact = buckets // 2
  ratio_TT = distance_TT.astype(np.float32) / exact + np.finfo(np.float32).eps
  growth_TT = np.log(ratio_TT) / np.log(_MAX_DISTANCE / exact) * (buckets - exact)
  far_TT = np.minimum(exact + growth_TT.astype(np.int32), buckets - 1)
  return table_HN[:, first_TT + np.where(distance_TT < exact, distance_TT, far_TT)]
