"""Transformers' names of a GPT's weights beside `networks.decoder_only`'s, for reading and writing."""

from __future__ import annotations

from typing import NamedTuple

EMBEDDING = "target/decoder/token_embedder/embedding"
POSITIONS = "target/decoder/position_embedding"
HEADS = ("query", "key", "value")


class Row(NamedTuple):
  """One weight of Transformers' and what it is here.

  Attributes:
    theirs: its name, without the prefix `transformer.`.
    ours: flat names; of several, their last axes side by side are the weight.
    is_turned: whether it is the transpose of ours (PyTorch's Linear; GPT-2's Conv1D is not).
  """

  theirs: str
  ours: tuple[str, ...]
  is_turned: bool = False


_NORMS = {
  "ln_1": "pre_self_attention_layer_norm",
  "ln_2": "pre_mlp_layer_norm",
}
# {theirs: ours} of a layer's products that have biases in both.
_PRODUCTS: dict[str, dict[str, tuple[str, ...]]] = {
  "gpt2": {
    "attn.c_attn": tuple(f"self_attention/{head}" for head in HEADS),
    "attn.c_proj": ("self_attention/out",),
    "mlp.c_fc": ("mlp/wi",),
    "mlp.c_proj": ("mlp/wo",),
  },
  "gpt_neo": {
    "attn.attention.out_proj": ("self_attention/out",),
    "mlp.c_fc": ("mlp/wi",),
    "mlp.c_proj": ("mlp/wo",),
  },
}
# Those that have none there.
_BARE_PRODUCTS: dict[str, dict[str, str]] = {
  "gpt2": {},
  "gpt_neo": {f"attn.attention.{head[0]}_proj": f"self_attention/{head}" for head in HEADS},
}
_IS_TURNED = {"gpt2": False, "gpt_neo": True}
FAMILIES = tuple(_PRODUCTS)
# What config.json calls fields of `TransformerConfig`.
SIZES = {
  "gpt2": {
    "emb_dim": "n_embd",
    "num_heads": "n_head",
    "num_layers": "n_layer",
    "max_length": "n_positions",
    "mlp_dim": "n_inner",
  },
  "gpt_neo": {
    "emb_dim": "hidden_size",
    "num_heads": "num_heads",
    "num_layers": "num_layers",
    "max_length": "max_position_embeddings",
    "mlp_dim": "intermediate_size",
  },
}


def rows(family: str, layers: int) -> list[Row]:
  """Returns all weights of a model of one of FAMILIES with so many layers."""
  is_turned = _IS_TURNED[family]
  found = [
    Row("wte.weight", (EMBEDDING,)),
    Row("wpe.weight", (POSITIONS,)),
    *_norm("ln_f", "target/decoder/decoder_norm"),
  ]
  for layer in range(layers):
    theirs, ours = f"h.{layer}.", f"target/decoder/layers_{layer}/"
    for their_norm, our_norm in _NORMS.items():
      found += _norm(theirs + their_norm, ours + our_norm)
    for product, parts in _PRODUCTS[family].items():
      kernels = tuple(f"{ours}{part}/kernel" for part in parts)
      biases = tuple(f"{ours}{part}/bias" for part in parts)
      found.append(Row(f"{theirs}{product}.weight", kernels, is_turned))
      found.append(Row(f"{theirs}{product}.bias", biases))
    for product, part in _BARE_PRODUCTS[family].items():
      found.append(Row(f"{theirs}{product}.weight", (f"{ours}{part}/kernel",), is_turned))
  return found


def biases_only_here(family: str, layers: int) -> list[str]:
  """Returns our names of biases that the family lacks, so that they must be zero."""
  return [
    f"target/decoder/layers_{layer}/{part}/bias"
    for layer in range(layers)
    for part in _BARE_PRODUCTS[family].values()
  ]


def _norm(theirs: str, ours: str) -> list[Row]:
  return [Row(f"{theirs}.weight", (f"{ours}/scale",)), Row(f"{theirs}.bias", (f"{ours}/bias",))]
