"""Trains one model twice, in bfloat16 and in fp8, and says whether fp8 pays on this machine.

  rosetta-t5 bench fp8 --size small --batch 128
  rosetta-t5 bench fp8 --size small --batch 8 --lengths 128 32 --emulate    # without fp8 hardware

Both begin with the same parameters and learn span corruption from the same batches: the docstrings of
Python's own library, byte by byte. The losses that are compared are the means over the last quarter.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax

from rosetta_t5.bench.train_step import add_switches, compile_step, switches
from rosetta_t5.bench.workload import SIZES, argument_parser
from rosetta_t5.data.prepared.corruption import corrupt_spans, keys_of
from rosetta_t5.data.span_corruption import random_spans_helper
from rosetta_t5.data.stdlib_text import stdlib_paragraphs
from rosetta_t5.training.optimizers import OptaxWrapper

# More than this above bfloat16's loss is too much.
MAX_LOSS_RATIO = 1.01
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
    keys_B = keys_of(step, np.arange(batch_size))
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


def train(args: argparse.Namespace, tokens: np.ndarray, fp8: bool) -> dict[str, Any]:
  """Returns the losses of all steps, the median milliseconds of one, and what computed them."""
  args.fp8 = fp8
  schedule = optax.linear_schedule(0.0, args.learning_rate, max(1, args.steps // 10))
  compiled, state, placed, computation = compile_step(args, OptaxWrapper(optax.adamw(schedule)))
  rng = jax.random.PRNGKey(1)
  losses, seconds = [], []
  batches = text_batches(tokens, args.batch, tuple(args.lengths), SIZES[args.size][-1])
  for step in range(1, args.steps + 1):
    begun = time.perf_counter()
    batch = {name: jax.device_put(x, placed[name].sharding) for name, x in next(batches).items()}
    state, metrics = compiled(state, batch, rng)
    losses.append(float(metrics["loss_per_nonpadding_target_token"].compute()))
    seconds.append(time.perf_counter() - begun)
    if step % max(1, args.steps // 4) == 0:
      print(f"{'fp8' if fp8 else args.dtype} step {step}: loss {losses[-1]:.4f}", flush=True)
  return {
    "losses": losses,
    "final_loss": statistics.fmean(losses[-max(1, args.steps // 4) :]),
    "step_ms": statistics.median(seconds) * 1e3,
    "computation": computation,
  }


def recommendation(loss_ratio: float, speedup: float, emulated: bool) -> str:
  """Returns what to do with fp8 here, and why."""
  if not loss_ratio <= MAX_LOSS_RATIO:
    return f"leave fp8 off: its loss is {loss_ratio - 1:.1%} above bfloat16's"
  if emulated:
    return "fp8 learns as bfloat16 does; its speed shows only on hardware that has fp8"
  if speedup < MIN_SPEEDUP:
    return f"leave fp8 off: {speedup:.2f}x bfloat16's speed at this size is no gain"
  return (
    f"use fp8: {speedup:.2f}x bfloat16's speed at the same loss "
    "(te_helper.TransformerEngineConfig.enabled = 1)"
  )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Trains both, prints losses and times, and recommends."""
  parser = argument_parser("rosetta-t5 bench fp8", __doc__ or "", steps=200)
  add_switches(parser)
  parser.add_argument("--learning-rate", type=float, default=1e-3)
  args = parser.parse_args(argv)
  text = "\n\n".join(stdlib_paragraphs()).encode()
  tokens = np.frombuffer(text, np.uint8).astype(np.int32) + _SPECIAL_IDS
  runs = {name: train(args, tokens, name == "fp8") for name in (args.dtype, "fp8")}
  other, fp8 = runs.values()
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
    "speedup": other["step_ms"] / fp8["step_ms"],
    "runs": runs,
  }
  result["recommendation"] = recommendation(result["loss_ratio"], result["speedup"], args.emulate)
  for name, run in runs.items():
    print(
      f"{name:<9} loss {run['losses'][0]:.4f} at first, {run['final_loss']:.4f} over the last "
      f"quarter of {args.steps} steps; {run['step_ms']:.1f} ms a step; {run['computation']}"
    )
  print(
    f"{result['device']}, {result['versions']}: loss {result['loss_ratio'] - 1:+.2%}, "
    f"{result['speedup']:.2f}x the speed"
  )
  print(result["recommendation"], flush=True)
  if args.json:
    with open(args.json, "w", encoding="utf-8") as out:
      json.dump(result, out, indent=2)
  return result
