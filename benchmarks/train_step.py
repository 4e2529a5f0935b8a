"""Times T5 1.1's training step on this machine's devices: the one to run on a GPU.

  python -m benchmarks.train_step --size base --batch 128
  python -m benchmarks.train_step --size large --batch 96 --fp8 --kernel cudnn --json out.json

Forward, backward and AdamW's update of all parameters, donated state, random tokens without padding
(with --pack, two examples a row), no dropout. It needs neither TensorFlow nor seqio nor gin. Time is the
median over groups of steps, compilation and first steps left out; a group ends when its last step's
parameters are there. FLOPs are T5X's formula (rosetta_t5.telemetry.flops).
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rosetta_t5.models import EncoderDecoderModel
from rosetta_t5.networks.computation import computation_text
from rosetta_t5.networks.precision import TransformerEngineConfig, choose_fp8, with_fp8
from rosetta_t5.networks.remat import REMAT_POLICIES
from rosetta_t5.networks.t5 import Transformer
from rosetta_t5.networks.t5_config import ATTENTION_KERNELS, T5Config
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.telemetry.flops import training_flops_of
from rosetta_t5.training import TrainState, train_step
from rosetta_t5.training.optimizers import OptaxWrapper

# emb_dim, num_heads, head_dim, layers of encoder and of decoder, mlp_dim, vocabulary
SIZES = {
  "tiny": (64, 2, 16, 2, 128, 1024),
  "small": (512, 6, 64, 8, 1024, 32128),
  "base": (768, 12, 64, 12, 2048, 32128),
  "large": (1024, 16, 64, 24, 2816, 32128),
  "xl": (2048, 32, 64, 24, 5120, 32128),
}
# Dense bfloat16 peaks, FLOP/s, from the vendor's data sheets, by a part of the device's name.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
# What to count in the compiled program, and how the compiler writes it.
HLO_FACTS = {
  "fp8 products": '"__cublas$lt$matmul$f8"',
  "cuDNN attentions": '"__cudnn$fmha',
  "Triton calls": '"__gpu$xla.gpu.triton"',
  "e4m3 arrays": "f8e4m3fn[",
  "e5m2 arrays": "f8e5m2[",
}


def make_config(args: argparse.Namespace) -> T5Config:
  """Returns T5 1.1 of the size and with the switches asked for."""
  emb_dim, heads, head_dim, layers, mlp_dim, vocab_size = SIZES[args.size]
  return T5Config(
    vocab_size=vocab_size,
    dtype=args.dtype,
    emb_dim=emb_dim,
    num_heads=heads,
    num_encoder_layers=layers,
    num_decoder_layers=layers,
    head_dim=head_dim,
    mlp_dim=mlp_dim,
    mlp_activations=("gelu", "linear"),
    dropout_rate=0.0,
    fuse_qkv_params=args.fuse_qkv,
    transpose_batch_sequence=args.transpose,
    attention_kernel=args.kernel,
    remat_policy=args.remat,
  )


def make_batch(
  batch_size: int, lengths: tuple[int, int], vocab_size: int, pack: bool
) -> dict[str, np.ndarray]:
  """Returns random tokens without padding; packed, two examples share a row."""
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


def compile_step(args: argparse.Namespace) -> tuple[Any, TrainState, Any, str]:
  """Returns the compiled step, a state, the batch on the devices, and what is computed how."""
  config = make_config(args)
  optimizer = OptaxWrapper(optax.adamw(1e-4, weight_decay=0.01))
  model = EncoderDecoderModel(
    Transformer(config), None, None, optimizer, z_loss=1e-4, loss_chunk_length=args.loss_chunk
  )
  te_config = TransformerEngineConfig(
    enabled=args.fp8, recipe=args.recipe, backend=args.fp8_backend, emulate=args.emulate
  )
  fp8 = choose_fp8(te_config)
  model = with_fp8(model, fp8)
  batch = make_batch(args.batch, tuple(args.lengths), config.vocab_size, args.pack)
  shapes = {name: value.shape for name, value in batch.items()}

  def init(rng: jax.Array) -> TrainState:
    return TrainState.create(optimizer, model.get_initial_variables(rng, shapes))

  partitioner = PjitPartitioner(num_partitions=1)
  axes = partitioner.get_mesh_axes(jax.eval_shape(init, jax.random.PRNGKey(0)))
  state = partitioner.partition(init, None, axes)(jax.random.PRNGKey(0))
  step = partitioner.partition(
    functools.partial(
      train_step,
      loss_fn=model.loss_fn,
      learning_rate_fn=lambda _: jnp.float32(1e-4),
      num_microbatches=args.microbatches,
    ),
    (axes, partitioner.data_partition_spec, None),
    (axes, None),
    donate_argnums=(0,),
  )
  spec = jax.sharding.NamedSharding(partitioner.mesh, partitioner.data_partition_spec)
  batch_on_devices = jax.device_put(batch, spec)
  compiled = step.lower(state, batch_on_devices, jax.random.PRNGKey(1)).compile()
  return compiled, state, batch_on_devices, computation_text(model, fp8) or ""


def measure(args: argparse.Namespace) -> dict[str, Any]:
  """Returns one row of the table."""
  started = time.perf_counter()
  compiled, state, batch, computation = compile_step(args)
  compile_seconds = time.perf_counter() - started
  rng = jax.random.PRNGKey(1)
  metrics: Any = None

  def run_group(steps: int) -> float:
    nonlocal state, metrics
    begun = time.perf_counter()
    for _ in range(steps):
      state, metrics = compiled(state, batch, rng)
    jax.block_until_ready((state.params, metrics["loss"]))
    return (time.perf_counter() - begun) / steps

  run_group(args.warmup)
  seconds = [run_group(args.group) for _ in range(max(1, args.steps // args.group))]
  step_seconds = statistics.median(seconds)
  devices = jax.devices()
  config = make_config(args)
  flops = training_flops_of(config, encoder_length=args.lengths[0], decoder_length=args.lengths[1])
  rate = args.batch / step_seconds / len(devices)
  peak = next((v for name, v in PEAKS.items() if name in devices[0].device_kind), None)
  return {
    "size": args.size,
    "batch": args.batch,
    "lengths": list(args.lengths),
    "device": f"{len(devices)} {devices[0].device_kind}",
    "jax": jax.__version__,
    "computation": computation,
    "switches": _switches(args),
    "step_ms": step_seconds * 1e3,
    "spread_ms": [min(seconds) * 1e3, max(seconds) * 1e3],
    "seq_per_s_per_device": rate,
    "tflops_per_device": rate * flops / 1e12,
    "mfu": rate * flops / peak if peak else None,
    "peak_memory_gb": _peak_memory(devices[0]),
    "compile_s": compile_seconds,
    "loss_per_token": float(metrics["loss_per_nonpadding_target_token"].compute()),
    "hlo": _hlo_facts(compiled),
  }


def _switches(args: argparse.Namespace) -> str:
  words = [args.dtype, f"kernel={args.kernel}", "fp8" if args.fp8 else ""]
  words += [f"{args.recipe}/{args.fp8_backend}" if args.fp8 else ""]
  words += ["fuse_qkv" if args.fuse_qkv else "", "transpose" if args.transpose else ""]
  words += ["pack" if args.pack else "", f"remat={args.remat}" if args.remat != "none" else ""]
  words += [f"loss_chunk={args.loss_chunk}" if args.loss_chunk else ""]
  words += [f"microbatches={args.microbatches}" if args.microbatches else ""]
  return " ".join(word for word in words if word)


def _peak_memory(device: Any) -> float | None:
  stats = device.memory_stats() or {}
  return stats["peak_bytes_in_use"] / 1e9 if "peak_bytes_in_use" in stats else None


def _hlo_facts(compiled: Any) -> dict[str, int]:
  text = compiled.as_text()
  return {name: count for name, mark in HLO_FACTS.items() if (count := text.count(mark))}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
  """Returns the command line's arguments."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--size", choices=SIZES, default="small")
  parser.add_argument("--batch", type=int, default=128)
  parser.add_argument("--lengths", type=int, nargs=2, default=(512, 128), metavar=("ENC", "DEC"))
  parser.add_argument("--steps", type=int, default=40)
  parser.add_argument("--group", type=int, default=5, help="steps that are timed as one")
  parser.add_argument("--warmup", type=int, default=5)
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
  parser.add_argument("--kernel", choices=ATTENTION_KERNELS, default="auto")
  parser.add_argument("--remat", choices=REMAT_POLICIES, default="none")
  parser.add_argument("--loss-chunk", type=int, default=None, metavar="POSITIONS")
  parser.add_argument("--microbatches", type=int, default=None)
  parser.add_argument("--recipe", choices=("current", "delayed"), default="current")
  parser.add_argument("--fp8-backend", choices=("auto", "native", "te"), default="auto")
  parser.add_argument("--json", metavar="OUT", help="a file to write the row to")
  for name in ("fp8", "fuse-qkv", "transpose", "pack", "emulate"):
    parser.add_argument(f"--{name}", action="store_true")
  return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, Any]:
  """Measures, prints the row, and writes it where --json says."""
  args = parse(argv)
  row = measure(args)
  mfu = f", MFU {row['mfu']:.1%}" if row["mfu"] else ""
  memory = f", {row['peak_memory_gb']:.1f} GB" if row["peak_memory_gb"] else ""
  print(f"{row['device']}, jax {row['jax']}; {row['computation']}")
  print(
    f"{args.size} {row['switches']} batch {args.batch} {args.lengths[0]}/{args.lengths[1]}: "
    f"{row['step_ms']:.1f} ms, {row['seq_per_s_per_device']:.1f} seq/s a device, "
    f"{row['tflops_per_device']:.2f} TFLOP/s{mfu}{memory}; compiled in {row['compile_s']:.0f} s; "
    f"HLO {row['hlo']}",
    flush=True,
  )
  if args.json:
    with open(args.json, "w", encoding="utf-8") as out:
      json.dump(row, out, indent=2)
  return row


if __name__ == "__main__":
  main()
