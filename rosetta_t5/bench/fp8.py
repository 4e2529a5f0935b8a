"""Trains one model in bfloat16, again, and in fp8, and says whether fp8 pays on this machine.

  rosetta-t5 bench fp8 --size small --batch 128
  rosetta-t5 bench fp8 --size small --batch 8 --lengths 128 32 --emulate    # without fp8 hardware

All learn span corruption from the same batches: the docstrings of Python's own library, byte by byte. The
losses that are compared are the means over the last quarter. Two runs part by rounding alone, the more the
larger the learning rate and the smaller the batch: so the second run in bfloat16 begins with parameters that
are moved by as much as bfloat16 rounds, and how far it comes from the first is the noise that fp8's
difference is held against. fp8 begins with the first run's parameters.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from rosetta_t5.bench.train_step import add_switches, compile_step, switches
from rosetta_t5.bench.workload import SIZES, argument_parser, write_result
from rosetta_t5.data.local_files.stdlib_text import stdlib_paragraphs
from rosetta_t5.data.objectives.span_corruption import random_spans_helper
from rosetta_t5.data.prepared.corruption import corrupt_spans, random_keys
from rosetta_t5.training import TrainState
from rosetta_t5.training.optimizers import OptaxWrapper

# More than this above bfloat16's loss is too much.
MAX_EXCESS = 0.01
# A difference that is more than this many times the noise is none of its making.
NOISE_FACTOR = 2.0
# A gain below this is not worth a change.
MIN_SPEEDUP = 1.03
_SPECIAL_IDS = 3  # padding, end, unknown: bytes come after them, as in T5's ByteVocabulary
_EOS = 1


def text_batches(
  tokens: np.ndarray, batch_size: int, lengths: tuple[int, int], vocab_size: int
) -> Iterator[dict[str, np.ndarray]]:
  """Yields batches of span corruption without end; each depends on its number alone.

  Args:
    tokens: int32 [N], the text.
    batch_size: rows of a batch.
    lengths: of the encoder's inputs and of the decoder's targets.
    vocab_size: sentinels are the ids from the last one down.

  Raises:
    ValueError: the targets are too short for what is dropped from the inputs.
  """
  window, targets_length = random_spans_helper(lengths[0])
  if targets_length > lengths[1]:
    raise ValueError(
      f"--lengths {lengths[0]} {lengths[1]}: span corruption of {lengths[0]} tokens makes targets "
      f"of {targets_length}."
    )
  step = 0
  while True:
    keys_B = random_keys(step, np.arange(batch_size))
    starts_B1 = (keys_B % np.uint64(len(tokens) - window)).astype(np.int64)[:, None]
    corrupted = corrupt_spans(tokens[starts_B1 + np.arange(window)], keys_B, vocab_size)
    inputs_BL, targets_BT = (_ended(x, n) for x, n in zip(corrupted, lengths, strict=True))
    yield {
      "encoder_input_tokens": inputs_BL,
      "decoder_target_tokens": targets_BT,
      "decoder_input_tokens": np.pad(targets_BT, ((0, 0), (1, 0)))[:, :-1],
      "decoder_loss_weights": (targets_BT > 0).astype(np.int32),
    }
    step += 1


def _ended(tokens_BL: np.ndarray, length: int) -> np.ndarray:
  ended_BL = np.pad(tokens_BL, ((0, 0), (0, 1)), constant_values=_EOS)
  return np.pad(ended_BL, ((0, 0), (0, length - ended_BL.shape[1])))


class Program(NamedTuple):
  """A compiled step and what its runs begin with, kept on the host."""

  compiled: Any
  state: TrainState
  state_shardings: TrainState
  batch_shardings: dict[str, jax.sharding.Sharding]
  computation: str


def compile_program(args: argparse.Namespace, fp8: bool) -> Program:
  """Returns the step of a model in fp8 or in `args.dtype`, with AdamW after a tenth of warm-up."""
  args.fp8 = fp8
  schedule = optax.linear_schedule(0.0, args.learning_rate, max(1, args.steps // 10))
  ready = compile_step(args, OptaxWrapper(optax.adamw(schedule)))
  of_state, of_batch = jax.tree.map(lambda x: x.sharding, (ready.state, ready.batch))
  return Program(ready.step, jax.device_get(ready.state), of_state, of_batch, ready.computation)


def nudged(state: TrainState) -> TrainState:
  """Returns a state on the host whose parameters are moved by up to bfloat16's rounding, 2^-9."""
  rng = np.random.default_rng(0)

  def nudge(x: np.ndarray) -> np.ndarray:
    return x * (1 + (rng.random(x.shape, np.float32) - 0.5) * 2.0**-8).astype(x.dtype)

  return state.replace_params(jax.tree.map(nudge, state.params))


def train(
  program: Program, state: TrainState, args: argparse.Namespace, tokens: np.ndarray, name: str
) -> dict[str, Any]:
  """Returns the losses of all steps, the median milliseconds of one, and what computed them."""
  state = jax.device_put(state, program.state_shardings)
  rng = jax.random.PRNGKey(1)
  losses, seconds = [], []
  batches = text_batches(tokens, args.batch, tuple(args.lengths), SIZES[args.size][-1])
  for step in range(1, args.steps + 1):
    begun = time.perf_counter()
    batch = jax.device_put(next(batches), program.batch_shardings)
    state, metrics = program.compiled(state, batch, rng)
    losses.append(float(metrics["loss_per_nonpadding_target_token"].compute()))
    seconds.append(time.perf_counter() - begun)
    if step % max(1, args.steps // 4) == 0:
      print(f"{name} step {step}: loss {losses[-1]:.4f}", flush=True)
  return {
    "losses": losses,
    "final_loss": statistics.fmean(losses[-max(1, args.steps // 4) :]),
    "step_ms": statistics.median(seconds) * 1e3,
    "computation": program.computation,
  }


def noise_between(losses: Sequence[float], again: Sequence[float]) -> float:
  """Returns how far apart two runs' losses are, relative, in the last quarters of their steps.

  It is the larger difference of the two last quarters: one of them alone may be small by chance.
  """
  quarter = max(1, len(losses) // 4)
  means = [
    [statistics.fmean(x[-quarter:]), statistics.fmean(x[-2 * quarter : -quarter] or x)]
    for x in (losses, again)
  ]
  return max(abs(theirs / mine - 1) for mine, theirs in zip(*means, strict=True))


def recommendation(loss_ratio: float, noise: float, speedup: float, emulated: bool) -> str:
  """Returns what to do with fp8 here, and why.

  Args:
    loss_ratio: fp8's loss by bfloat16's.
    noise: how far apart, relative, two runs in bfloat16 are.
    speedup: bfloat16's time by fp8's.
    emulated: whether there was no fp8 hardware, so that the speedup says nothing.
  """
  excess = loss_ratio - 1
  # Written so that NaN leaves fp8 off.
  if not excess <= max(MAX_EXCESS, NOISE_FACTOR * noise):
    return f"leave fp8 off: its loss is {excess:.1%} above bfloat16's"
  if noise > MAX_EXCESS or excess > MAX_EXCESS:
    return (
      f"this run cannot tell: fp8's loss is {excess:+.1%} from bfloat16's, but two runs in bfloat16 "
      f"are {noise:.1%} apart by rounding alone. A larger --batch, a lower --learning-rate or more "
      "--steps makes that less"
    )
  if emulated:
    return "fp8 learns as bfloat16 does; its speed shows only on hardware that has fp8"
  if speedup < MIN_SPEEDUP:
    return f"leave fp8 off: {speedup:.2f}x bfloat16's speed at this size is no gain"
  return (
    f"use fp8: {speedup:.2f}x bfloat16's speed at the same loss "
    "(te_helper.TransformerEngineConfig.enabled = 1)"
  )


def compare(args: argparse.Namespace, tokens: np.ndarray) -> dict[str, dict[str, Any]]:
  """Returns the three runs by their names: the plain one, the plain one again, and fp8."""
  plain, again = args.dtype, f"{args.dtype}, nudged"
  program = compile_program(args, fp8=False)
  runs = {
    plain: train(program, program.state, args, tokens, plain),
    again: train(program, nudged(program.state), args, tokens, again),
  }
  program = compile_program(args, fp8=True)
  return runs | {"fp8": train(program, program.state, args, tokens, "fp8")}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Trains all three, prints losses and times, and recommends."""
  parser = argument_parser("rosetta-t5 bench fp8", __doc__ or "", steps=200)
  add_switches(parser)
  parser.add_argument("--learning-rate", type=float, default=1e-3)
  args = parser.parse_args(argv)
  text = "\n\n".join(stdlib_paragraphs()).encode()
  tokens = np.frombuffer(text, np.uint8).astype(np.int32) + _SPECIAL_IDS
  runs = compare(args, tokens)
  other, again, fp8 = runs.values()
  device = jax.devices()[0]
  result = {
    "size": args.size,
    "batch": args.batch,
    "lengths": list(args.lengths),
    "steps": args.steps,
    "device": f"{len(jax.devices())} {device.device_kind}",
    "versions": f"jax {jax.__version__}",
    "date": datetime.date.today().isoformat(),
    "switches": switches(args),
    "loss_ratio": fp8["final_loss"] / other["final_loss"],
    "noise": noise_between(other["losses"], again["losses"]),
    "speedup": other["step_ms"] / fp8["step_ms"],
    "runs": runs,
  }
  result["recommendation"] = recommendation(
    result["loss_ratio"], result["noise"], result["speedup"], args.emulate
  )
  for name, run in runs.items():
    print(
      f"{name:<16} loss {run['losses'][0]:.4f} at first, {run['final_loss']:.4f} over the last "
      f"quarter of {args.steps} steps; {run['step_ms']:.1f} ms a step; {run['computation']}"
    )
  print(
    f"{result['device']}, {result['versions']}: fp8's loss {result['loss_ratio'] - 1:+.2%}, "
    f"noise {result['noise']:.2%}; {result['speedup']:.2f}x the speed"
  )
  print(result["recommendation"], flush=True)
  write_result(result, args.json)
  return result
