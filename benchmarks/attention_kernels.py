"""Times the attention kernels alone, forward and backward, at T5's shapes.

python -m benchmarks.attention_kernels --batch 64 --json out.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rosetta_t5.files import write_atomically
from rosetta_t5.kernels.attention import Operands, Visibility, attend

# Name → (queries, keys, whether there is a bias, whether it is causal).
ATTENTIONS = {
  "encoder": (512, 512, True, False),
  "decoder": (128, 128, True, True),
  "cross": (128, 512, False, False),
}


def measure(
  attention: str, kernel: str, batch: int, heads: int, packed: bool, repeats: int
) -> float:
  """Returns the milliseconds of one forward and backward pass, the median of `repeats`."""
  queries, keys, has_bias, causal = ATTENTIONS[attention]
  rng = np.random.default_rng(0)

  def draw(*shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape) / 4, jnp.bfloat16)

  q, k, v = (draw(batch, length, heads, 64) for length in (queries, keys, keys))
  bias = draw(1, heads, queries, keys) if has_bias else None
  query_ids, key_ids = (
    jnp.broadcast_to(1 + packed * (jnp.arange(n, dtype=jnp.int32) >= n // 2), (batch, n))
    for n in (queries, keys)
  )

  def loss(operands: tuple, query_ids: jax.Array, key_ids: jax.Array) -> jax.Array:
    q, k, v, bias = operands
    visible = Visibility(query_ids, key_ids, causal=causal, packed=packed)
    return jnp.sum(attend(kernel, Operands(q, k, v, bias, visible)).astype(jnp.float32))

  arguments = ((q, k, v, bias), query_ids, key_ids)
  step = jax.jit(jax.grad(loss)).lower(*arguments).compile()
  times = []
  for _ in range(repeats + 2):
    started = time.perf_counter()
    jax.block_until_ready(step(*arguments))
    times.append(time.perf_counter() - started)
  return statistics.median(times[2:]) * 1e3


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
  """Prints a line for each attention and kernel, with the time or the error."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--batch", type=int, default=64)
  parser.add_argument("--heads", type=int, default=12)
  parser.add_argument("--repeats", type=int, default=20)
  parser.add_argument("--attentions", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
  parser.add_argument("--kernels", nargs="+", default=["xla", "cudnn", "flash"])
  parser.add_argument("--pack", action="store_true")
  parser.add_argument("--json", metavar="OUT")
  args = parser.parse_args(argv)
  rows: list[dict[str, Any]] = []
  for attention in args.attentions:
    for kernel in args.kernels:
      row: dict[str, Any] = {"attention": attention, "kernel": kernel, "packed": args.pack}
      row |= {"batch": args.batch, "heads": args.heads}
      try:
        if kernel == "cudnn" and args.pack:
          raise ValueError("cuDNN does not support segments")
        row["ms"] = measure(attention, kernel, args.batch, args.heads, args.pack, args.repeats)
        print(f"{attention} {kernel}: {row['ms']:.2f} ms", flush=True)
      except Exception as error:  # one failed row must not prevent the others
        row["error"] = str(error).splitlines()[0][:200]
        print(f"{attention} {kernel}: {row['error']}", flush=True)
      rows.append(row)
  if args.json:
    write_atomically(args.json, json.dumps(rows, indent=2))
  return rows


if __name__ == "__main__":
  main()
