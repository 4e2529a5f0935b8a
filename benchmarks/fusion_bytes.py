"""Compares the bytes of a compiled step's fusions with the least that its shapes allow.

  rosetta-t5 compile gin/examples/base_pile_pretrain.gin --gpu h200 --devices 1 … --json base.json
  python -m benchmarks.fusion_bytes base.json --size base --batch 128

The step is T5 1.1's with 512 inputs and 128 targets, without dropout, in bfloat16, on one GPU, with AdamW. The least is
that of one kernel for each purpose and layer, which reads its operands once and writes its results once. Matmuls
and attention are other kernels: they write what fusions read.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from rosetta_t5.gpu_program import kernels

INPUTS, TARGETS, VOCABULARY = 512, 128, 32128
FUSIONS = (kernels.REDUCTION, kernels.LOOP, kernels.COPY, kernels.OTHER)


class Size(NamedTuple):
  """The sizes of a T5 1.1, with the same number of layers on each side."""

  layers: int
  width: int
  heads_width: int
  hidden: int


SIZES = {
  "small": Size(8, 512, 384, 1024),
  "base": Size(12, 768, 768, 2048),
  "large": Size(24, 1024, 1024, 2816),
}
# Purpose → the sources of its kernels; a kernel has the first purpose that matches.
PURPOSES = {
  "gate, forward": r"^forward .*/mlp/mul",
  "gate, backward": r"^backward .*/mlp/",
  "norms, forward": r"^forward .*(_norm/|logits_dense/reshape)",
  "norms, backward, with the residual's gradient": r"^backward .*_norm/",
  "gradient of the encoder's output": r"^backward .*/add_any",
  "embeddings": r"token_embedder|^$",
  "bfloat16 kernels": r"^forward .*/(convert_element_type|div)$",
  "logits: loss and gradient": r"^forward (reduce_|mul)|^backward add|logits_dense",
  "AdamW with the gradients' norm": r"^(add|reduce_sum|mul|)$",
}
REST = "rest: relative bias, copies"


def least_bytes(size: Size, batch: int) -> dict[str, float]:
  """Returns the least bytes of each purpose in a step."""
  rows = {"encoder": batch * INPUTS, "decoder": batch * TARGETS}
  width, hidden = ({side: 2 * n * d for side, n in rows.items()} for d in (size.width, size.hidden))
  norms = {"encoder": 2 * size.layers + 1, "decoder": 3 * size.layers + 1}
  per_norm = sum(norms[side] * width[side] for side in rows)
  gates = size.layers * sum(hidden.values())
  table = VOCABULARY * size.width
  matrices = size.layers * (12 * size.width * size.heads_width + 6 * size.width * size.hidden)
  return {
    "gate, forward": 3 * gates,  # two branches → their product
    "gate, backward": 5 * gates,  # its gradient, two branches → two gradients
    "norms, forward": 2 * per_norm + width["decoder"],  # the last result is float32
    # Gradient, input, residual's gradient → their sum; the last norms have no residual.
    "norms, backward, with the residual's gradient": 4 * per_norm - sum(width.values()),
    "gradient of the encoder's output": (size.layers + 1) * width["encoder"],
    # float32 rows → bfloat16; gradient → float32 table.
    "embeddings": 4 * sum(width.values()) + 4 * table,
    "bfloat16 kernels": 6 * matrices,
    # Softmax; softmax and gradient; the input's gradient from float32.
    "logits: loss and gradient": 3 * 4 * rows["decoder"] * VOCABULARY + 3 * width["decoder"],
    # Gradients (of matmuls with bfloat16 operands in bfloat16) twice; three float32 arrays read and written.
    "AdamW with the gradients' norm": (24 + 4) * matrices + (24 + 8) * 2 * table,
  }


def bytes_by_purpose(found: Sequence[dict]) -> collections.Counter[str]:
  """Returns the bytes of each purpose of the fusions among a compiled step's kernels."""
  total: collections.Counter[str] = collections.Counter()
  for kernel in found:
    if kernel["kind"] in FUSIONS:
      matches = (name for name, sources in PURPOSES.items() if re.search(sources, kernel["source"]))
      total[next(matches, REST)] += kernel["count"] * kernel["bytes"]
  return total


def main(argv: Sequence[str] | None = None) -> None:
  """Prints the table as Markdown."""
  parser = argparse.ArgumentParser("python -m benchmarks.fusion_bytes")
  parser.add_argument("json", type=pathlib.Path, help="what `rosetta-t5 compile --json` wrote")
  parser.add_argument("--size", choices=SIZES, default="base")
  parser.add_argument("--batch", type=int, default=128)
  args = parser.parse_args(argv)
  found = bytes_by_purpose(json.loads(args.json.read_text())["kernels"])
  least = least_bytes(SIZES[args.size], args.batch)
  print("| GB in a step | least | the program | ratio |\n| --- | --- | --- | --- |")
  for name, size in least.items():
    print(f"| {name} | {size / 1e9:.2f} | {found[name] / 1e9:.2f} | {found[name] / size:.2f} |")
  print(f"| {REST} | | {found[REST] / 1e9:.2f} | |")
  total, of_program = sum(least.values()), sum(found.values())
  print(f"| all | {total / 1e9:.1f} | {of_program / 1e9:.1f} | {of_program / total:.2f} |")


if __name__ == "__main__":
  main()
