"""Layers in numpy for the forward passes of T5 and GPT; they share no code with `networks`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray, as_stored_array, transpose
from rosetta_t5.checkpoints.arrays.tree_layouts import EMBEDDING, HEAD

Arrays = Mapping[str, StoredArray]

_TOKENS_AT_ONCE = 8192


def as_float(values: np.ndarray) -> np.ndarray:
  """Returns float64 values unchanged, and all others as float32."""
  return np.asarray(values, np.result_type(values.dtype, np.float32))


def tanh_gelu(x: np.ndarray) -> np.ndarray:
  """Returns GELU in its approximation by tanh (Hendrycks and Gimpel, 2016)."""
  return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attend(
  q_BTE: np.ndarray,
  k_BSE: np.ndarray,
  v_BSE: np.ndarray,
  num_heads: int,
  allowed: np.ndarray,
  bias: np.ndarray | float = 0.0,
) -> np.ndarray:
  """Returns multi-head dot-product attention [B, T, E], without scaling; heads are side by side in E.

  Args:
    allowed: whether a query sees a key; broadcasts to [B, H, T, S].
    bias: added to the scores; broadcasts to [B, H, T, S].
  """
  q_BHTK, k_BHSK, v_BHSK = (_split_heads(x, num_heads) for x in (q_BTE, k_BSE, v_BSE))
  scores_BHTS = q_BHTK @ k_BHSK.swapaxes(-1, -2) + bias
  scores_BHTS = np.where(allowed, scores_BHTS, np.float32(-1e10))
  weights_BHTS = np.exp(scores_BHTS - scores_BHTS.max(-1, keepdims=True))
  weights_BHTS /= weights_BHTS.sum(-1, keepdims=True)
  return (weights_BHTS @ v_BHSK).swapaxes(1, 2).reshape(q_BTE.shape)


def _split_heads(x_BTE: np.ndarray, num_heads: int) -> np.ndarray:
  return x_BTE.reshape(*x_BTE.shape[:2], num_heads, -1).swapaxes(1, 2)


def embed(arrays: Arrays, side: str, tokens_BT: np.ndarray) -> np.ndarray:
  """Returns the embeddings [B, T, D] of the tokens; only their rows are read.

  Args:
    arrays: parameters in the plain tree.
    side: 'encoder' or 'decoder', which may have a table of its own.
    tokens_BT: token ids.
  """
  table = _readable_in_parts(_embedding_table(arrays, side))
  tokens, positions = np.unique(tokens_BT, return_inverse=True)
  rows = [table.read((slice(int(token), int(token) + 1), slice(None))) for token in tokens]
  return as_float(np.concatenate(rows))[positions.reshape(tokens_BT.shape)]


def output_layer(arrays: Arrays, y_BTD: np.ndarray, divide_tied_logits: bool = True) -> np.ndarray:
  """Returns the logits [B, T, V]; a part of the vocabulary is in memory at a time.

  Args:
    arrays: parameters in the plain tree.
    y_BTD: the decoder's last activations.
    divide_tied_logits: whether logits from the embedding table are divided by √D.
  """
  is_tied = HEAD not in arrays
  table_VD = _embedding_table(arrays, "decoder") if is_tied else transpose(arrays[HEAD])
  divisor = math.sqrt(y_BTD.shape[-1]) if is_tied and divide_tied_logits else 1.0
  table_VD = _readable_in_parts(table_VD)
  parts = []
  for start in range(0, table_VD.shape[0], _TOKENS_AT_ONCE):
    part_VD = as_float(table_VD.read((slice(start, start + _TOKENS_AT_ONCE), slice(None))))
    parts.append(y_BTD @ (part_VD.T / divisor))
  return np.concatenate(parts, -1)


def _embedding_table(arrays: Arrays, side: str) -> StoredArray:
  return arrays.get(f"target/{side}/token_embedder/embedding") or arrays[EMBEDDING]


def _readable_in_parts(array: StoredArray) -> StoredArray:
  """Returns an array that can be read in parts without reading all of it each time."""
  return array if array.sliceable else as_stored_array(array.get())
