"""Maps the names of T5's weights in Transformers to T5X's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rosetta_t5.checkpoints.formats.hugging_face.weight_mapping import WeightMapping

FAMILIES = ("t5", "mt5", "umt5", "switch_transformers")
EMBEDDING = "target/token_embedder/embedding"
HEAD = "target/decoder/logits_dense/kernel"
HF_EMBEDDING = "shared.weight"
HF_HEAD = "lm_head.weight"
# PyTorch's files may also contain the shared embedding under these names.
HF_EMBEDDING_COPIES = ("decoder.embed_tokens.weight", "encoder.embed_tokens.weight")
ATTENTION_MATRICES = {"q": "query", "k": "key", "v": "value", "o": "out"}
# The layer norms of a layer's blocks, in order.
NORMS = {
  "encoder": ("pre_attention_layer_norm", "pre_mlp_layer_norm"),
  "decoder": (
    "pre_self_attention_layer_norm",
    "pre_cross_attention_layer_norm",
    "pre_mlp_layer_norm",
  ),
}
_ATTENTION_BLOCKS = {
  "encoder": {"0.SelfAttention": "attention"},
  "decoder": {
    "0.SelfAttention": "self_attention",
    "1.EncDecAttention": "encoder_decoder_attention",
  },
}
_MLP_MATRICES = ("wi", "wi_0", "wi_1", "wo")
_LAYER_BIAS = re.compile(r"(.*/(encoder|decoder)/)layers_(\d+)/(relpos_bias/.*)")


def weight_table(encoder_layers: int, decoder_layers: int) -> list[WeightMapping]:
  """Returns every weight that a model of the T5 family may have, in the plain tree.

  Each layer has an entry for a relative bias; a bias that all layers share belongs to layer 0.
  """
  table = [
    WeightMapping(HF_EMBEDDING, (EMBEDDING,)),
    WeightMapping(HF_HEAD, (HEAD,), is_transposed=True),
  ]
  for side, layers in (("encoder", encoder_layers), ("decoder", decoder_layers)):
    norm = (f"target/{side}/{side}_norm/scale",)
    table.append(WeightMapping(f"{side}.final_layer_norm.weight", norm))
    for layer in range(layers):
      table += _layer_table(side, layer)
  return table


def _layer_table(side: str, layer: int) -> list[WeightMapping]:
  theirs, ours = f"{side}.block.{layer}.layer", f"target/{side}/layers_{layer}"
  scales = {f"{number}.layer_norm": f"{norm}/scale" for number, norm in enumerate(NORMS[side])}
  matrices = {"0.SelfAttention.relative_attention_bias": "relpos_bias/rel_embedding"}
  for their_block, our_block in _ATTENTION_BLOCKS[side].items():
    for letter, name in ATTENTION_MATRICES.items():
      matrices[f"{their_block}.{letter}"] = f"{our_block}/{name}/kernel"
  mlp = f"{len(NORMS[side]) - 1}.DenseReluDense"
  matrices |= {f"{mlp}.{name}": f"mlp/{name}/kernel" for name in _MLP_MATRICES}
  return [
    WeightMapping(f"{theirs}.{their_name}.weight", (f"{ours}/{our_name}",), their_name in matrices)
    for their_name, our_name in (scales | matrices).items()
  ]


def rename_shared_biases(arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `arrays` with a relative bias that only layer 0 has under its stack's name.

  The layers of such a stack share the bias: `encoder/layers_0/relpos_bias` becomes
  `encoder/relpos_bias`.
  """
  matches = [match for name in arrays if (match := _LAYER_BIAS.fullmatch(name))]
  own = {match[2] for match in matches if match[3] != "0"}
  renamed = {match[0]: match[1] + match[4] for match in matches if match[2] not in own}
  return {renamed.get(name, name): array for name, array in arrays.items()}
