"""T5's forward pass in numpy, an oracle for the networks and for what checkpoints are read as.

It follows the paper's formulas and shares no code with `networks`, so that a mistake in one of them is
not hidden by the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy_layers
from numpy_layers import Arrays

from rosetta_t5.checkpoints.formats.hugging_face.name_tables import count_layers
from rosetta_t5.kernels.expert_routing import expert_slots
from rosetta_t5.networks.expert_settings import ExpertSettings

_MAX_DISTANCE = 128
_EPSILON = 1e-6
_EXPERTS = ExpertSettings()
_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
  "gelu": numpy_layers.tanh_gelu,
  "linear": lambda x: x,
  "relu": lambda x: np.maximum(x, 0),
  "silu": lambda x: x / (1 + np.exp(-x)),
  "swish": lambda x: x / (1 + np.exp(-x)),
}


def default_activations(arrays: Arrays) -> tuple[str, ...]:
  """Returns T5 1.1's activations if the feed-forward blocks are gated, and T5 1.0's otherwise."""
  is_gated = any(name.endswith("/wi_1/kernel") for name in arrays)
  return ("gelu", "linear") if is_gated else ("relu",)


def encode(
  arrays: Arrays,
  inputs_BS: np.ndarray,
  activations: Sequence[str] | None = None,
  experts: ExpertSettings = _EXPERTS,
) -> np.ndarray:
  """Returns the encoded inputs [B, S, D] in float32, or in float64 if the parameters are.

  Args:
    arrays: parameters in T5X's plain tree, with 2-D kernels.
    inputs_BS: token ids; 0 is padding.
    activations: of the feed-forward block; None for those of the weights' version of T5.
    experts: the capacity of experts, which are chosen as in Switch Transformer.

  Raises:
    ValueError: the model lacks a parameter of T5.
  """
  is_token_BS = inputs_BS > 0
  allowed_B1SS = is_token_BS[:, None, None, :] & is_token_BS[:, None, :, None]
  x_BSD = numpy_layers.embed(arrays, "encoder", inputs_BS)
  for layer in _layers(arrays, "encoder", activations, experts):
    x_BSD = x_BSD + layer.self_attention(x_BSD, allowed_B1SS)
    x_BSD = x_BSD + layer.mlp(x_BSD)
  return _norm(x_BSD, _read(arrays, "target/encoder/encoder_norm/scale"))


def compute_logits(
  arrays: Arrays,
  inputs_BS: np.ndarray | None,
  targets_BT: np.ndarray,
  activations: Sequence[str] | None = None,
  experts: ExpertSettings = _EXPERTS,
) -> np.ndarray:
  """Returns the logits [B, T, V] in float32, or in float64 if the parameters are.

  Args:
    arrays: parameters in T5X's plain tree, with 2-D kernels.
    inputs_BS: token ids of the encoder; None for a model without one.
    targets_BT: the decoder's inputs, which are the targets shifted right; none of them is padding.
    activations: see `encode`.
    experts: see `encode`.

  Raises:
    ValueError: the model lacks a parameter of T5.
  """
  length = targets_BT.shape[1]
  causal_TT = np.tril(np.ones((length, length), bool))
  encoded_BSD = None if inputs_BS is None else encode(arrays, inputs_BS, activations, experts)
  x_BTD = numpy_layers.embed(arrays, "decoder", targets_BT)
  for layer in _layers(arrays, "decoder", activations, experts):
    x_BTD = x_BTD + layer.self_attention(x_BTD, causal_TT)
    if inputs_BS is not None and encoded_BSD is not None:
      x_BTD = x_BTD + layer.cross_attention(x_BTD, encoded_BSD, inputs_BS > 0)
    x_BTD = x_BTD + layer.mlp(x_BTD)
  return numpy_layers.output_layer(
    arrays, _norm(x_BTD, _read(arrays, "target/decoder/decoder_norm/scale"))
  )


def _layers(
  arrays: Arrays, side: str, activations: Sequence[str] | None, experts: ExpertSettings
) -> list[_Layer]:
  count = count_layers(arrays, f"target/{side}/layers_")
  activations = activations or default_activations(arrays)
  if unknown := [name for name in activations if name not in _ACTIVATIONS]:
    raise ValueError(
      f"an activation of the feed-forward block must be one of {', '.join(_ACTIVATIONS)}, got "
      f"{unknown[0]!r}"
    )
  return [_Layer(arrays, side, number, activations, experts) for number in range(count)]


@dataclasses.dataclass(frozen=True)
class _Layer:
  """A layer of the encoder or the decoder, whose parameters are read when they are used."""

  arrays: Arrays
  side: str
  number: int
  activations: Sequence[str]
  experts: ExpertSettings

  def self_attention(self, x_BTD: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Returns what the block adds to `x_BTD`."""
    name = "attention" if self.side == "encoder" else "self_attention"
    y_BTD = _norm(x_BTD, self._read(f"pre_{name}_layer_norm/scale"))
    bias_HTT = _relative_bias(self._bias_table(), x_BTD.shape[1], self.side == "encoder")
    return self._attend(name, y_BTD, y_BTD, allowed, bias_HTT)

  def cross_attention(
    self, x_BTD: np.ndarray, encoded_BSD: np.ndarray, is_token_BS: np.ndarray
  ) -> np.ndarray:
    """Returns what the block adds to `x_BTD`."""
    y_BTD = _norm(x_BTD, self._read("pre_cross_attention_layer_norm/scale"))
    allowed_B11S = is_token_BS[:, None, None, :]
    return self._attend("encoder_decoder_attention", y_BTD, encoded_BSD, allowed_B11S, 0.0)

  def mlp(self, x_BTD: np.ndarray) -> np.ndarray:
    """Returns what the block adds to `x_BTD`."""
    y_BTD = _norm(x_BTD, self._read("pre_mlp_layer_norm/scale"))
    if f"target/{self.side}/layers_{self.number}/mlp/expert/wo/kernel" in self.arrays:
      return self._expert_mlp(y_BTD)
    return self._feed_forward(y_BTD, lambda matrix: self._read(f"mlp/{matrix}/kernel"))

  def _feed_forward(self, y: np.ndarray, read: Callable[[str], np.ndarray]) -> np.ndarray:
    hidden = np.ones((), np.float32)
    for number, activation in enumerate(self.activations):
      matrix = "wi" if len(self.activations) == 1 else f"wi_{number}"
      hidden = hidden * _ACTIVATIONS[activation](y @ read(matrix))
    return hidden @ read("wo")

  def _expert_mlp(self, y_BTD: np.ndarray) -> np.ndarray:
    """Returns the output of each token's most probable expert, times its probability (Switch)."""
    logits_BTE = y_BTD @ self._read("mlp/router/router_weights/w/kernel")
    exponentials_BTE = np.exp(logits_BTE - logits_BTE.max(-1, keepdims=True))
    probs_BTE = exponentials_BTE / exponentials_BTE.sum(-1, keepdims=True)
    _, length, num_experts = probs_BTE.shape
    factor = self.experts.eval_capacity_factor
    slots = self.experts.expert_capacity or expert_slots(length, num_experts, factor)
    result_BTD = np.zeros_like(y_BTD)
    for expert in range(num_experts):
      is_chosen_BT = probs_BTE.argmax(-1) == expert
      is_chosen_BT &= np.cumsum(is_chosen_BT, axis=1) <= slots

      def read(matrix: str, expert: int = expert) -> np.ndarray:
        return self._read(f"mlp/expert/{matrix}/kernel")[expert]

      weight_N1 = probs_BTE[is_chosen_BT][:, expert, None]
      result_BTD[is_chosen_BT] = weight_N1 * self._feed_forward(y_BTD[is_chosen_BT], read)
    return result_BTD

  def _attend(
    self,
    name: str,
    y_BTD: np.ndarray,
    kv_BSD: np.ndarray,
    allowed: np.ndarray,
    bias: np.ndarray | float,
  ) -> np.ndarray:
    q_BTE = y_BTD @ self._read(f"{name}/query/kernel")
    k_BSE = kv_BSD @ self._read(f"{name}/key/kernel")
    v_BSE = kv_BSD @ self._read(f"{name}/value/kernel")
    mixed_BTE = numpy_layers.attend(q_BTE, k_BSE, v_BSE, len(self._bias_table()), allowed, bias)
    return mixed_BTE @ self._read(f"{name}/out/kernel")

  def _bias_table(self) -> np.ndarray:
    own = f"layers_{self.number}/relpos_bias/rel_embedding"
    shared = "relpos_bias/rel_embedding"
    name = own if f"target/{self.side}/{own}" in self.arrays else shared
    return _read(self.arrays, f"target/{self.side}/{name}")

  def _read(self, name: str) -> np.ndarray:
    return _read(self.arrays, f"target/{self.side}/layers_{self.number}/{name}")


def _read(arrays: Arrays, name: str) -> np.ndarray:
  if name not in arrays:
    raise ValueError(f"the model lacks {name}: its forward pass is not that of a T5")
  return numpy_layers.as_float(arrays[name].get())


def _norm(x_BTD: np.ndarray, scale_D: np.ndarray) -> np.ndarray:
  mean_square_BT1 = np.mean(np.square(x_BTD), axis=-1, keepdims=True)
  return x_BTD / np.sqrt(mean_square_BT1 + _EPSILON) * scale_D


def _relative_bias(table_HN: np.ndarray, length: int, bidirectional: bool) -> np.ndarray:
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
