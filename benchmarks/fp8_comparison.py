"""Trains one model twice in bfloat16 and once in fp8, and recommends whether to use fp8 here.

  python -m benchmarks.fp8_comparison --size small --batch 128
  python -m benchmarks.fp8_comparison --size small --batch 8 --lengths 128 32 --emulate    # without fp8 hardware

All runs learn span corruption from the same batches: the docstrings of Python's standard library, as
bytes. Their losses are compared by the mean over the last quarter of the steps. Rounding alone makes two
runs diverge, the more the larger the learning rate and the smaller the batch. The second bfloat16 run
therefore starts from parameters perturbed by bfloat16's rounding error. Its difference from the first run
is the noise with which fp8's difference is compared. The fp8 run starts from the first run's parameters.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from rosetta_t5.cli.bench import SIZES, add_arguments, compile_step
from rosetta_t5.data.objectives import random_spans_helper
from rosetta_t5.data.prepared.prepared_batches import random_keys
from rosetta_t5.data.prepared.task import corrupt_spans
from rosetta_t5.data.quickstart_data import stdlib_paragraphs
from rosetta_t5.files import write_atomically
from rosetta_t5.training import TrainState
from rosetta_t5.training.optimizers.optax_wrapper import OptaxWrapper

# The largest acceptable relative increase of the loss over bfloat16.
MAX_EXCESS = 0.01
# A difference above this multiple of the noise is not caused by rounding.
NOISE_FACTOR = 2.0
# A smaller speedup is not worth the change.
MIN_SPEEDUP = 1.03
_SPECIAL_IDS = 3  # padding, EOS, unknown; then the bytes, as in T5's ByteVocabulary
_EOS = 1


def text_batches(
  tokens: np.ndarray, batch_size: int, lengths: tuple[int, int], vocab_size: int
) -> Iterator[dict[str, np.ndarray]]:
  """Yields batches of span corruption without end; each depends only on its number.

  Args:
    tokens: int32 [N], the text.
    vocab_size: the sentinels are the last ids, in decreasing order.

  Raises:
    ValueError: the targets are too short for the tokens that are removed from the inputs.
  """
  window, targets_length = random_spans_helper(lengths[0])
  if targets_length > lengths[1]:
    raise ValueError(
      f"--lengths {lengths[0]} {lengths[1]}: the second length must be at least {targets_length}, because "
      f"span corruption of {lengths[0]} tokens produces that many targets."
    )
  step = 0
  while True:
    keys_B = random_keys(step, np.arange(batch_size))
    starts_B1 = (keys_B % np.uint64(len(tokens) - window)).astype(np.int64)[:, None]
    corrupted = corrupt_spans(tokens[starts_B1 + np.arange(window)], keys_B, vocab_size, 0.15, 3.0)
    inputs_BL, targets_BT = (_append_eos(x, n) for x, n in zip(corrupted, lengths, strict=True))
    yield {
      "encoder_input_tokens": inputs_BL,
      "decoder_target_tokens": targets_BT,
      "decoder_input_tokens": np.pad(targets_BT, ((0, 0), (1, 0)))[:, :-1],
      "decoder_loss_weights": (targets_BT > 0).astype(np.int32),
    }
    step += 1


def _append_eos(tokens_BL: np.ndarray, length: int) -> np.ndarray:
  with_eos_BL = np.pad(tokens_BL, ((0, 0), (0, 1)), constant_values=_EOS)
  return np.pad(with_eos_BL, ((0, 0), (0, length - with_eos_BL.shape[1])))


class Program(NamedTuple):
  """A compiled step, and the initial state of its runs on the host."""

  compiled: Any
  state: TrainState
  state_shardings: TrainState
  batch_shardings: dict[str, jax.sharding.Sharding]
  computation: str


def compile_program(args: argparse.Namespace, fp8: bool) -> Program:
  """Returns the step in fp8 or in `args.dtype`, with AdamW and a warmup over a tenth of the steps."""
  args.fp8 = fp8
  schedule = optax.linear_schedule(0.0, args.learning_rate, max(1, args.steps // 10))
  compiled = compile_step(args, OptaxWrapper(optax.adamw(schedule)))
  state_shardings, batch_shardings = jax.tree.map(
    lambda x: x.sharding, (compiled.state, compiled.batch)
  )
  return Program(
    compiled.step,
    jax.device_get(compiled.state),
    state_shardings,
    batch_shardings,
    compiled.computation,
  )


def nudge_params(state: TrainState) -> TrainState:
  """Returns the state with parameters perturbed by up to bfloat16's rounding error, 2^-9."""
  rng = np.random.default_rng(0)

  def nudge(x: np.ndarray) -> np.ndarray:
    return x * (1 + (rng.random(x.shape, np.float32) - 0.5) * 2.0**-8).astype(x.dtype)

  return state.replace_params(jax.tree.map(nudge, state.params))


def train(
  program: Program, state: TrainState, args: argparse.Namespace, tokens: np.ndarray, name: str
) -> dict[str, Any]:
  """Returns the losses of all steps, the median time of a step, and what computed it."""
  state = jax.device_put(state, program.state_shardings)
  rng = jax.random.PRNGKey(1)
  losses, seconds = [], []
  batches = text_batches(tokens, args.batch, tuple(args.lengths), SIZES[args.size][-1])
  for step in range(1, args.steps + 1):
    started = time.perf_counter()
    batch = jax.device_put(next(batches), program.batch_shardings)
    state, metrics = program.compiled(state, batch, rng)
    losses.append(float(metrics["loss_per_nonpadding_target_token"].compute()))
    seconds.append(time.perf_counter() - started)
    if step % max(1, args.steps // 4) == 0:
      print(f"{name} step {step}: loss {losses[-1]:.4f}", flush=True)
  return {
    "losses": losses,
    "final_loss": statistics.fmean(losses[-max(1, args.steps // 4) :]),
    "step_ms": statistics.median(seconds) * 1e3,
    "computation": program.computation,
  }


def noise_between(losses: Sequence[float], again: Sequence[float]) -> float:
  """Returns the relative difference of two runs' mean losses, the larger of the last two quarters.

  The difference in one quarter alone may be small by chance.
  """
  quarter = max(1, len(losses) // 4)
  means = [
    [statistics.fmean(x[-quarter:]), statistics.fmean(x[-2 * quarter : -quarter] or x)]
    for x in (losses, again)
  ]
  return max(abs(theirs / mine - 1) for mine, theirs in zip(*means, strict=True))


def recommendation(loss_ratio: float, noise: float, speedup: float, emulated: bool) -> str:
  """Returns whether to use fp8 on this machine, and why.

  Args:
    loss_ratio: the loss of fp8 divided by that of bfloat16.
    noise: the relative difference of two bfloat16 runs.
    speedup: the time of bfloat16 divided by that of fp8.
    emulated: whether fp8 was emulated, so that the speedup is meaningless.
  """
  excess = loss_ratio - 1
  # The comparison is also false for NaN, which must not recommend fp8.
  if not excess <= max(MAX_EXCESS, NOISE_FACTOR * noise):
    return f"do not use fp8: its loss is {excess:.1%} above that of bfloat16"
  if noise > MAX_EXCESS or excess > MAX_EXCESS:
    return (
      f"inconclusive: the loss of fp8 differs by {excess:+.1%} from that of bfloat16, but two bfloat16 runs "
      f"differ by {noise:.1%} because of rounding alone. A larger --batch, a lower --learning-rate or more "
      "--steps reduces this noise"
    )
  if emulated:
    return "fp8 learns as well as bfloat16; its speed can be measured only on hardware with fp8"
  if speedup < MIN_SPEEDUP:
    return f"do not use fp8: it runs at only {speedup:.2f}x the speed of bfloat16 at this size"
  return (
    f"use fp8: {speedup:.2f}x the speed of bfloat16 at the same loss "
    "(te_helper.TransformerEngineConfig.enabled = 1)"
  )


def compare(args: argparse.Namespace, tokens: np.ndarray) -> dict[str, dict[str, Any]]:
  """Returns the results of the three runs by name: plain, perturbed, and fp8."""
  plain, again = args.dtype, f"{args.dtype}, nudged"
  program = compile_program(args, fp8=False)
  runs = {
    plain: train(program, program.state, args, tokens, plain),
    again: train(program, nudge_params(program.state), args, tokens, again),
  }
  program = compile_program(args, fp8=True)
  return runs | {"fp8": train(program, program.state, args, tokens, "fp8")}


def main() -> None:
  """Runs all three, prints losses and times, and prints the recommendation."""
  parser = argparse.ArgumentParser(description=__doc__)
  add_arguments(parser, steps=200)
  parser.add_argument("--learning-rate", type=float, default=1e-3, help="AdamW's (default: 0.001)")
  args = parser.parse_args()
  text = "\n\n".join(stdlib_paragraphs()).encode()
  tokens = np.frombuffer(text, np.uint8).astype(np.int32) + _SPECIAL_IDS
  runs = compare(args, tokens)
  plain, again, fp8 = runs.values()
  device = jax.devices()[0]
  result = {
    "size": args.size,
    "batch": args.batch,
    "lengths": list(args.lengths),
    "steps": args.steps,
    "device": f"{len(jax.devices())} {device.device_kind}",
    "versions": f"jax {jax.__version__}",
    "date": datetime.date.today().isoformat(),
    "loss_ratio": fp8["final_loss"] / plain["final_loss"],
    "noise": noise_between(plain["losses"], again["losses"]),
    "speedup": plain["step_ms"] / fp8["step_ms"],
    "runs": runs,
  }
  result["recommendation"] = recommendation(
    result["loss_ratio"], result["noise"], result["speedup"], args.emulate
  )
  for name, run in runs.items():
    print(
      f"{name:<16} loss {run['losses'][0]:.4f} at the start, {run['final_loss']:.4f} over the last "
      f"quarter of {args.steps} steps; {run['step_ms']:.1f} ms/step; {run['computation']}"
    )
  print(
    f"{result['device']}, {result['versions']}: loss of fp8 {result['loss_ratio'] - 1:+.2%}, "
    f"noise {result['noise']:.2%}; {result['speedup']:.2f}x the speed"
  )
  print(result["recommendation"], flush=True)
  if args.json:
    write_atomically(args.json, json.dumps(result, indent=2))


if __name__ == "__main__":
  main()
