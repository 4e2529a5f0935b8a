"""Times the products of a decoding step on a CPU: float32, and what XLA makes of int8.

  python -m benchmarks.int8_products

The shapes are those of T5 1.1 small: projections, the gated block, and logits. `dynamic` scales each row of the
input to int8 and multiplies int8 by int8 into int32; `weights` stores the kernel as int8 and multiplies in
float32. Times are processor time of all threads, the least of several rounds in turns, because a machine may be shared.
"""

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SHAPES = [(512, 384), (512, 1024), (1024, 512), (512, 32128)]


def plain(x: jax.Array, w: jax.Array) -> jax.Array:
  return x @ w


def dynamic(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
  largest = jnp.max(jnp.abs(x), axis=1, keepdims=True) / 127
  rounded = jnp.round(x / largest).astype(jnp.int8)
  product = jax.lax.dot(rounded, w, preferred_element_type=jnp.int32)
  return product.astype(jnp.float32) * largest * scale


def weights(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
  return (x @ w.astype(jnp.float32)) * scale


def processor_seconds(run: Callable[[], Any], calls: int) -> float:
  started = time.process_time()
  for _ in range(calls):
    jax.block_until_ready(run())
  return (time.process_time() - started) / calls


def measure(batch: int, inner: int, outer: int, rounds: int) -> Sequence[float]:
  """Returns the seconds of each variant for [batch, inner] by [inner, outer]."""
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(batch, inner)), jnp.float32)
  kernel = rng.normal(size=(inner, outer)).astype(np.float32)
  scale = np.abs(kernel).max(axis=0, keepdims=True) / 127
  integers = jnp.asarray(np.round(kernel / scale), jnp.int8)
  runs = [functools.partial(jax.jit(plain), x, jnp.asarray(kernel))]
  runs += [
    functools.partial(jax.jit(f), x, integers, jnp.asarray(scale)) for f in (dynamic, weights)
  ]
  exact, *others = (np.asarray(run()) for run in runs)
  for other in others:  # the error of rounding to int8
    assert np.abs(other - exact).max() < 0.05 * np.abs(exact).max()
  calls = max(3, int(2e8 / (batch * inner * outer)))
  times = [[processor_seconds(run, calls) for run in runs] for _ in range(rounds)]
  return [min(column) for column in zip(*times, strict=True)]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument(
    "--largest", type=int, default=1 << 20, help="of the outputs; skips larger products"
  )
  options = parser.parse_args()
  print("| batch | product | float32, us | dynamic | weights |\n| --- | --- | --- | --- | --- |")
  for batch in (1, 16, 64):
    for inner, outer in filter(lambda shape: shape[1] <= options.largest, SHAPES):
      base, *others = measure(batch, inner, outer, options.rounds)
      ratios = " | ".join(f"{other / base:.2f}x" for other in others)
      print(f"| {batch} | {inner} x {outer} | {1e6 * base:,.0f} | {ratios} |", flush=True)


if __name__ == "__main__":
  main()
