"""Maps the names of GPT-2's and GPT-Neo's weights in Transformers to those of `networks.decoder`."""

from __future__ import annotations

import dataclasses

from rosetta_t5.checkpoints.formats.hugging_face.weight_mapping import WeightMapping

EMBEDDING = "target/decoder/token_embedder/embedding"
POSITIONS = "target/decoder/position_embedding"
_HEADS = ("query", "key", "value")


@dataclasses.dataclass(frozen=True)
class GPTFamily:
  """How one of the two architectures names and stores its weights.

  Attributes:
    architecture: the class in Transformers.
    sizes: {field of TransformerConfig: entry of config.json}.
    matrices: {Transformers' name: our names} of a layer's matrices that have a bias.
    matrices_without_bias: {Transformers' name: our name} of the matrices that have a bias only in our networks.
    is_transposed: whether matrices are stored as [out, in].
  """

  architecture: str
  sizes: dict[str, str]
  matrices: dict[str, tuple[str, ...]]
  matrices_without_bias: dict[str, str]
  is_transposed: bool


FAMILIES = {
  "gpt2": GPTFamily(
    architecture="GPT2LMHeadModel",
    sizes={
      "emb_dim": "n_embd",
      "num_heads": "n_head",
      "num_layers": "n_layer",
      "max_length": "n_positions",
      "mlp_dim": "n_inner",
    },
    matrices={
      "attn.c_attn": tuple(f"self_attention/{head}" for head in _HEADS),
      "attn.c_proj": ("self_attention/out",),
      "mlp.c_fc": ("mlp/wi",),
      "mlp.c_proj": ("mlp/wo",),
    },
    matrices_without_bias={},
    is_transposed=False,
  ),
  "gpt_neo": GPTFamily(
    architecture="GPTNeoForCausalLM",
    sizes={
      "emb_dim": "hidden_size",
      "num_heads": "num_heads",
      "num_layers": "num_layers",
      "max_length": "max_position_embeddings",
      "mlp_dim": "intermediate_size",
    },
    matrices={
      "attn.attention.out_proj": ("self_attention/out",),
      "mlp.c_fc": ("mlp/wi",),
      "mlp.c_proj": ("mlp/wo",),
    },
    matrices_without_bias={
      f"attn.attention.{head[0]}_proj": f"self_attention/{head}" for head in _HEADS
    },
    is_transposed=True,
  ),
}


def weight_table(family: str, layers: int) -> list[WeightMapping]:
  """Returns all weights of a model of one of FAMILIES; names lack the prefix `transformer.`."""
  table = [
    WeightMapping("wte.weight", (EMBEDDING,)),
    WeightMapping("wpe.weight", (POSITIONS,)),
    *_norm("ln_f", "target/decoder/decoder_norm"),
  ]
  for layer in range(layers):
    theirs, ours = f"h.{layer}.", f"target/decoder/layers_{layer}/"
    table += _norm(f"{theirs}ln_1", f"{ours}pre_self_attention_layer_norm")
    table += _norm(f"{theirs}ln_2", f"{ours}pre_mlp_layer_norm")
    table += _layer_table(FAMILIES[family], theirs, ours)
  return table


def _norm(theirs: str, ours: str) -> list[WeightMapping]:
  return [
    WeightMapping(f"{theirs}.weight", (f"{ours}/scale",)),
    WeightMapping(f"{theirs}.bias", (f"{ours}/bias",)),
  ]


def _layer_table(family: GPTFamily, theirs: str, ours: str) -> list[WeightMapping]:
  table = []
  for name, parts in family.matrices.items():
    kernels = tuple(f"{ours}{part}/kernel" for part in parts)
    biases = tuple(f"{ours}{part}/bias" for part in parts)
    table.append(WeightMapping(f"{theirs}{name}.weight", kernels, family.is_transposed))
    table.append(WeightMapping(f"{theirs}{name}.bias", biases))
  for name, part in family.matrices_without_bias.items():
    kernel = (f"{ours}{part}/kernel",)
    table.append(WeightMapping(f"{theirs}{name}.weight", kernel, family.is_transposed))
  return table


def unsupported_biases(family: str, layers: int) -> list[str]:
  """Returns our names of the biases that the family lacks; they must be zero in such a model."""
  return [
    f"target/decoder/layers_{layer}/{part}/bias"
    for layer in range(layers)
    for part in FAMILIES[family].matrices_without_bias.values()
  ]
