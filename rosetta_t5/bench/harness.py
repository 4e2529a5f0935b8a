"""The workload of the training-step benchmarks: arguments, model, batch, timing and result."""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rosetta_t5.files import write_atomically
from rosetta_t5.networks.t5_config import T5Config
from rosetta_t5.telemetry.flops import peak_of, training_flops_of
from rosetta_t5.terminal import positive_integer

# Size → (emb_dim, num_heads, head_dim, layers in each stack, mlp_dim, vocab_size).
SIZES = {
  "tiny": (64, 2, 16, 1, 128, 1024),
  "small": (512, 6, 64, 8, 1024, 32128),
  "base": (768, 12, 64, 12, 2048, 32128),
  "large": (1024, 16, 64, 24, 2816, 32128),
  "xl": (2048, 32, 64, 24, 5120, 32128),
}


def add_workload(parser: argparse.ArgumentParser, steps: int) -> None:
  """Adds the arguments of the workload: the model's size and the batch."""
  add = parser.add_argument
  add("--size", choices=SIZES, default="small", help="the size of T5 1.1 (default: small)")
  add("--batch", type=positive_integer, default=128, help="sequences in a batch (default: 128)")
  add(
    "--lengths",
    type=positive_integer,
    nargs=2,
    default=(512, 128),
    metavar=("ENC", "DEC"),
    help="tokens of inputs and targets (default: 512 128)",
  )
  add(
    "--dtype",
    choices=("float32", "bfloat16"),
    default="bfloat16",
    help="the dtype of activations (default: bfloat16)",
  )
  add("--steps", type=positive_integer, default=steps, help="training steps (default: %(default)s)")
  add("--json", type=_writable, metavar="OUT", help="file for the result")


def add_timed_workload(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of the workload and of the timing."""
  add_workload(parser, steps=40)
  parser.add_argument(
    "--group", type=positive_integer, default=5, help="steps that are timed together (default: 5)"
  )
  parser.add_argument(
    "--warmup", type=positive_integer, default=5, help="steps before the first group (default: 5)"
  )


def _writable(path: str) -> str:
  # Checked at the start, so that no measurement is lost.
  if not pathlib.Path(path).absolute().parent.is_dir():
    raise argparse.ArgumentTypeError(f"folder {pathlib.Path(path).parent} does not exist")
  if pathlib.Path(path).is_dir():
    raise argparse.ArgumentTypeError(f"{path} is a folder: give a file")
  return path


def model_config(size: str, **switches: Any) -> T5Config:
  """Returns the configuration of a size of T5 1.1, without dropout, with other fields as given."""
  emb_dim, heads, head_dim, layers, mlp_dim, vocab_size = SIZES[size]
  return T5Config(
    vocab_size=vocab_size,
    emb_dim=emb_dim,
    num_heads=heads,
    num_encoder_layers=layers,
    num_decoder_layers=layers,
    head_dim=head_dim,
    mlp_dim=mlp_dim,
    mlp_activations=("gelu", "linear"),
    dropout_rate=0.0,
    **switches,
  )


def make_batch(
  batch_size: int, lengths: tuple[int, int], vocab_size: int, pack: bool
) -> dict[str, np.ndarray]:
  """Returns random tokens without padding; with `pack`, each row contains two examples."""
  draw = np.random.default_rng(0).integers
  targets = draw(2, vocab_size, (batch_size, lengths[1]), dtype=np.int32)
  batch = {
    "encoder_input_tokens": draw(2, vocab_size, (batch_size, lengths[0]), dtype=np.int32),
    "decoder_target_tokens": targets,
    "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
    "decoder_loss_weights": np.ones_like(targets),
  }
  for side, length in zip(("encoder", "decoder") if pack else (), lengths, strict=False):
    row = 1 + (np.arange(length, dtype=np.int32) >= length // 2)
    batch[f"{side}_segment_ids"] = np.broadcast_to(row, (batch_size, length)).copy()
  return batch


def time_steps(
  step: Callable[[], Any], wait: Callable[[], Any], args: argparse.Namespace
) -> list[float]:
  """Returns the seconds per step for each group of steps, without the warmup.

  Args:
    step: starts one step.
    wait: returns when the last step is finished.
    args: `steps`, `group` and `warmup`.
  """

  def run_group(steps: int) -> float:
    started = time.perf_counter()
    for _ in range(steps):
      step()
    wait()
    return (time.perf_counter() - started) / steps

  run_group(args.warmup)
  return [run_group(args.group) for _ in range(max(1, args.steps // args.group))]


def make_row(
  args: argparse.Namespace,
  seconds: Sequence[float],
  *,
  device: str,
  devices: int,
  peak_memory: int | None,
  **facts: Any,
) -> dict[str, Any]:
  """Returns the result: rates with T5X's formula for FLOPs, memory in GB, and `facts`."""
  step_seconds = statistics.median(seconds)
  rate = args.batch / step_seconds / devices
  flops = training_flops_of(model_config(args.size), *args.lengths)
  peak = peak_of(device)
  return {
    "size": args.size,
    "batch": args.batch,
    "lengths": list(args.lengths),
    "device": f"{devices} {device}",
    "date": datetime.date.today().isoformat(),
    "step_ms": step_seconds * 1e3,
    "spread_ms": [min(seconds) * 1e3, max(seconds) * 1e3],
    "seq_per_s_per_device": rate,
    "tflops_per_device": rate * flops / 1e12,
    "mfu": rate * flops / peak if peak else None,
    "peak_memory_gb": peak_memory / 1e9 if peak_memory else None,
    **facts,
  }


def run(measure: Callable[[argparse.Namespace], dict[str, Any]], args: argparse.Namespace) -> int:
  """Prints the result of a measurement, and writes it to the file that --json gives."""
  row = measure(args)
  mfu = f", MFU {row['mfu']:.1%}" if row["mfu"] else ""
  memory = f", {row['peak_memory_gb']:.1f} GB" if row["peak_memory_gb"] else ""
  print(f"{row['device']}, {row['versions']}; {row['computation']}")
  print(
    f"{row['size']} {row['switches']} batch {row['batch']} {row['lengths'][0]}/{row['lengths'][1]}: "
    f"{row['step_ms']:.1f} ms, {row['seq_per_s_per_device']:.1f} seq/s per device, "
    f"{row['tflops_per_device']:.2f} TFLOP/s{mfu}{memory}; ready after {row['compile_s']:.0f} s"
    + (f"; HLO {row['hlo']}" if row["hlo"] else ""),
    flush=True,
  )
  write_result(row, args.json)
  return 0


def write_result(result: Any, path: str | None) -> None:
  """Writes a result as JSON to `path`, if one is given; a killed process leaves no partial file."""
  if path:
    write_atomically(path, json.dumps(result, indent=2))
