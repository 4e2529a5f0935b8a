"""T5X's names of T5's parameters in the plain tree, which other programs' names are mapped to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

EMBEDDING = "target/token_embedder/embedding"
HEAD = "target/decoder/logits_dense/kernel"
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
_LAYER_BIAS = re.compile(r"(.*/(encoder|decoder)/)layers_(\d+)/(relpos_bias/.*)")


def rename_shared_biases(arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `arrays` with a relative bias that only layer 0 has under its stack's name.

  The layers of such a stack share the bias: `encoder/layers_0/relpos_bias` becomes
  `encoder/relpos_bias`.
  """
  matches = [match for name in arrays if (match := _LAYER_BIAS.fullmatch(name))]
  own = {match[2] for match in matches if match[3] != "0"}
  renamed = {match[0]: match[1] + match[4] for match in matches if match[2] not in own}
  return {renamed.get(name, name): array for name, array in arrays.items()}
