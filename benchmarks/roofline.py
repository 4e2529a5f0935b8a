"""Computes a lower bound on the time of a training step of T5 1.1 on a GPU, part by part.

  python -m benchmarks.roofline --size base --batch 128
  python -m benchmarks.roofline --size large --batch 64 --products 790 --bandwidth 4.3

The bound for a part is its floating-point operations at the rate of matmuls, or its bytes to and
from memory at the memory bandwidth, whichever takes longer. Parts run one after another. Everything is
computed from shapes; nothing runs. Attention is counted both as XLA computes it, with scores in memory,
and fused.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from rosetta_t5.bench.harness import SIZES, argument_parser, model_config
from rosetta_t5.telemetry.flops import training_flops_of

BF16, FLOAT32 = 2, 4
# Passes over an array, forward and backward together.
SCORE_PASSES = 10  # scores, bias, softmax and probabilities; the gradients, with two matmuls
STREAM_PASSES = 14  # a norm, a residual addition and their gradients, in each sublayer
GATE_PASSES = 8  # two inputs, one output, and their gradients
LOGIT_PASSES = 6  # written, read for the maximum and the sum, and the gradient
# Reads the float32 parameter, the gradient and both moments; writes all but the gradient, which the
# backward pass writes.
ADAMW_BYTES = 32
BACKWARD = 3  # one matmul forward, two backward
FLASH_BACKWARD = 3.5  # computes the scores again


@dataclasses.dataclass(frozen=True)
class Part:
  """A part of the step; operations and bytes are sums over all layers."""

  name: str
  flops: float = 0.0
  bytes: float = 0.0

  def milliseconds(self, flops_rate: float, byte_rate: float) -> float:
    """Returns the lower bound at these rates (per second)."""
    return 1e3 * max(self.flops / flops_rate, self.bytes / byte_rate)


def parts(size: str, batch: int, lengths: tuple[int, int], fused: bool) -> list[Part]:
  """Returns the parts of one step with bfloat16 activations, float32 parameters and AdamW."""
  emb_dim, heads, head_dim, layers, mlp_dim, vocab_size = SIZES[size]
  inner = heads * head_dim
  encoder, decoder = (batch * length for length in lengths)
  # (queries, keys) of each attention; then the tokens that pass through its projections.
  attentions = [(lengths[0], lengths[0]), (lengths[1], lengths[1]), (lengths[1], lengths[0])]
  projected = 4 * encoder + 4 * decoder + 2 * decoder + 2 * encoder  # cross: q, out; k, v
  mlp_weights = 3 * emb_dim * mlp_dim
  scores = sum(batch * heads * queries * keys for queries, keys in attentions) * layers
  streams = layers * (2 * encoder + 3 * decoder) * emb_dim
  parameters = 2 * vocab_size * emb_dim + layers * (12 * emb_dim * inner + 2 * mlp_weights)
  attention_bytes = 4 * BF16 * layers * sum(batch * (q + k) * inner for q, k in attentions)
  if not fused:
    attention_bytes += SCORE_PASSES * BF16 * scores
  matmuls = BACKWARD * 2 * layers
  return [
    Part("projections of attention", matmuls * projected * emb_dim * inner),
    Part(
      "attention",
      (FLASH_BACKWARD if fused else BACKWARD) * 4 * scores * head_dim,
      attention_bytes,
    ),
    Part("feed-forward", matmuls * (encoder + decoder) * mlp_weights),
    Part("gelu and gate", bytes=GATE_PASSES * BF16 * layers * (encoder + decoder) * mlp_dim),
    Part("norms and residuals", bytes=STREAM_PASSES * BF16 * streams),
    Part(
      "logits and loss",
      BACKWARD * 2 * decoder * emb_dim * vocab_size,
      LOGIT_PASSES * FLOAT32 * decoder * vocab_size,
    ),
    Part("AdamW", bytes=ADAMW_BYTES * parameters),
  ]


def table(args: argparse.Namespace) -> list[str]:
  """Returns the lines of a Markdown table with its totals."""
  rates = args.products * 1e12, args.bandwidth * 1e12
  lengths = tuple(args.lengths)
  columns = [parts(args.size, args.batch, lengths, fused) for fused in (False, True)]
  lines = [
    f"| {args.size}, batch {args.batch} | TFLOP | GB by XLA | ms by XLA | GB fused | ms fused |",
    "| --- | --- | --- | --- | --- | --- |",
  ]
  for plain, fused in zip(*columns, strict=True):
    lines.append(
      f"| {plain.name} | {plain.flops / 1e12:.2f} | {plain.bytes / 1e9:.1f} | "
      f"{plain.milliseconds(*rates):.1f} | {fused.bytes / 1e9:.1f} | {fused.milliseconds(*rates):.1f} |"
    )
  sums = [sum(part.milliseconds(*rates) for part in column) for column in columns]
  flops = training_flops_of(
    model_config(args.size), encoder_length=lengths[0], decoder_length=lengths[1]
  )
  speeds = [
    f"{args.batch / ms * 1e3:.0f} seq/s ({args.batch * flops / ms / 1e9 / args.peak:.0%})"
    for ms in sums
  ]
  lines.append(f"| at least | | | {sums[0]:.1f} | | {sums[1]:.1f} |")
  lines.append(f"| at most (MFU of {args.peak:.0f}) | | | {speeds[0]} | | {speeds[1]} |")
  return lines


def main(argv: Sequence[str] | None = None) -> None:
  """Prints the table."""
  parser = argument_parser("python -m benchmarks.roofline", __doc__ or "", steps=1)
  parser.add_argument("--products", type=float, default=790, help="TFLOP/s of matmuls")
  parser.add_argument("--bandwidth", type=float, default=4.3, help="memory bandwidth in TB/s")
  parser.add_argument("--peak", type=float, default=989, help="nominal TFLOP/s, for the MFU")
  print("\n".join(table(parser.parse_args(argv))))


if __name__ == "__main__":
  main()
