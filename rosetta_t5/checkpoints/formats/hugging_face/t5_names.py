"""Hugging Face's names of a T5's weights beside T5X's, and which matrices are stored transposed."""

from __future__ import annotations

import re

_ATTENTION = {"q": "query", "k": "key", "v": "value", "o": "out"}
_NORMS = {
  "encoder": ("pre_attention_layer_norm", "pre_mlp_layer_norm"),
  "decoder": (
    "pre_self_attention_layer_norm",
    "pre_cross_attention_layer_norm",
    "pre_mlp_layer_norm",
  ),
}
# What Transformers keeps twice: the embedding under three names.
COPIES = frozenset({"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"})
EMBEDDING = "target/token_embedder/embedding"
HEAD = "target/decoder/logits_dense/kernel"
HF_HEAD = "lm_head.weight"
_LAYER = re.compile(r"(encoder|decoder)\.block\.(\d+)\.layer\.(\d+)\.(.+)\.weight")


def t5x_name(name: str) -> tuple[str, bool] | None:
  """Returns T5X's name for Hugging Face's, and whether the matrix is transposed; None for a stranger.

  Relative biases keep their layer's number; whether they are shared shows only in all of them.
  """
  if name == "shared.weight":
    return EMBEDDING, False
  if name == HF_HEAD:
    return HEAD, True
  if match := re.fullmatch(r"(encoder|decoder)\.final_layer_norm\.weight", name):
    return f"target/{match[1]}/{match[1]}_norm/scale", False
  match = _LAYER.fullmatch(name)
  if not match:
    return None
  side, layer, part, inner = match[1], match[2], int(match[3]), match[4]
  prefix = f"target/{side}/layers_{layer}"
  if inner == "layer_norm":
    return f"{prefix}/{_NORMS[side][part]}/scale", False
  if inner == "SelfAttention.relative_attention_bias":
    return f"{prefix}/relpos_bias/rel_embedding", True
  block, _, matrix = inner.partition(".")
  if block == "DenseReluDense":
    return f"{prefix}/mlp/{matrix}/kernel", True
  if block in ("SelfAttention", "EncDecAttention") and matrix in _ATTENTION:
    return f"{prefix}/{_attention(side, block)}/{_ATTENTION[matrix]}/kernel", True
  return None


def _attention(side: str, block: str) -> str:
  if side == "encoder":
    return "attention"
  return "self_attention" if block == "SelfAttention" else "encoder_decoder_attention"


def hf_name(name: str) -> tuple[str, bool] | None:
  """Returns Hugging Face's name for T5X's (plain tree), and whether the matrix is transposed.

  A shared relative bias is the one of layer 0. None for names that Hugging Face's T5 lacks.
  """
  if name == EMBEDDING:
    return "shared.weight", False
  if name == HEAD:
    return HF_HEAD, True
  if match := re.fullmatch(r"target/(encoder|decoder)/\1_norm/scale", name):
    return f"{match[1]}.final_layer_norm.weight", False
  if match := re.fullmatch(
    r"target/(encoder|decoder)/(layers_\d+/)?relpos_bias/rel_embedding", name
  ):
    layer = (match[2] or "layers_0/").removeprefix("layers_")[:-1]
    bias = "layer.0.SelfAttention.relative_attention_bias.weight"
    return f"{match[1]}.block.{layer}.{bias}", True
  match = re.fullmatch(r"target/(encoder|decoder)/layers_(\d+)/(.+)", name)
  return _layer_hf_name(match[1], f"{match[1]}.block.{match[2]}.layer", match[3]) if match else None


def _layer_hf_name(side: str, prefix: str, inner: str) -> tuple[str, bool] | None:
  block, _, rest = inner.partition("/")
  if block in _NORMS[side] and rest == "scale":
    return f"{prefix}.{_NORMS[side].index(block)}.layer_norm.weight", False
  matrix = rest.removesuffix("/kernel")
  if block == "mlp" and matrix in ("wi", "wi_0", "wi_1", "wo"):
    return f"{prefix}.{len(_NORMS[side]) - 1}.DenseReluDense.{matrix}.weight", True
  letters = {long: short for short, long in _ATTENTION.items()}
  blocks = {
    "attention": (0, "SelfAttention"),
    "self_attention": (0, "SelfAttention"),
    "encoder_decoder_attention": (1, "EncDecAttention"),
  }
  if block in blocks and matrix in letters:
    part, theirs = blocks[block]
    return f"{prefix}.{part}.{theirs}.{letters[matrix]}.weight", True
  return None
