"""`rosetta-t5 bench`: times the training step of T5 1.1 on this machine's devices.

A step is the forward pass, the backward pass and an AdamW step on all parameters, with a donated state and
without dropout. The batch is random tokens without padding (with --pack, two examples per row). The
benchmark needs neither TensorFlow nor seqio nor gin. The time is the median over groups of steps, without
compilation and warmup; a group ends when the parameters of its last step are computed.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rosetta_t5.files import write_atomically
from rosetta_t5.models import EncoderDecoderModel
from rosetta_t5.networks import precision
from rosetta_t5.networks.config import ATTENTION_KERNELS, T5Config
from rosetta_t5.networks.layers.stack import REMAT_POLICIES
from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.telemetry.run_metrics import peak_flops
from rosetta_t5.terminal import output_file, positive_integer
from rosetta_t5.traced.program import flops_of_training
from rosetta_t5.training import TrainState, train_step
from rosetta_t5.training.optimizers.optax_wrapper import OptaxWrapper
from rosetta_t5.training.optimizers.optimizer_def import OptimizerDef

_FIELDS = ("emb_dim", "num_heads", "head_dim", "num_encoder_layers", "mlp_dim", "vocab_size")
SIZES = {  # → the values of these fields; the decoder has as many layers as the encoder
  "tiny": (64, 2, 16, 1, 128, 1024),
  "small": (512, 6, 64, 8, 1024, 32128),
  "base": (768, 12, 64, 12, 2048, 32128),
  "large": (1024, 16, 64, 24, 2816, 32128),
  "xl": (2048, 32, 64, 24, 5120, 32128),
}
_GROUP = 5  # steps that are timed together, and steps before them


def model_config(size: str, **switches: Any) -> T5Config:
  """Returns the configuration of a size of T5 1.1, without dropout, with other fields as given."""
  fields: dict[str, Any] = dict(zip(_FIELDS, SIZES[size], strict=True))
  fields |= {"num_decoder_layers": fields["num_encoder_layers"], "dropout_rate": 0.0}
  return T5Config(**fields, mlp_activations=("gelu", "linear"), **switches)


def make_batch(
  batch_size: int, lengths: Sequence[int], vocab_size: int, pack: bool
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
    batch[f"{side}_segment_ids"] = np.tile(row, (batch_size, 1))
  return batch


class CompiledStep(NamedTuple):
  """A compiled step and its first arguments.

  Attributes:
    step: the compiled program: (state, batch, rng) → (state, metrics).
    state: the initial state, on the devices.
    batch: a batch, on the devices.
    model: the model.
    partitioner: places the arrays on the devices.
    computation: a description of the kernels and precisions.
    seconds: the time of building and compiling it.
  """

  step: Any
  state: TrainState
  batch: Any
  model: EncoderDecoderModel
  partitioner: PjitPartitioner
  computation: str
  seconds: float


def compile_step(args: argparse.Namespace, optimizer: OptimizerDef | None = None) -> CompiledStep:
  """Returns the compiled training step and its first arguments.

  Args:
    args: those of `add_arguments`.
    optimizer: the optimizer; AdamW by default.
  """
  started = time.perf_counter()
  switches = {"dtype": args.dtype, "attention_kernel": args.kernel, "remat_policy": args.remat}
  module = Transformer(model_config(args.size, fuse_qkv_params=args.fuse_qkv, **switches))
  optimizer = optimizer or OptaxWrapper(optax.adamw(1e-4, weight_decay=0.01))
  settings = precision.TransformerEngineConfig(enabled=args.fp8, emulate=args.emulate)
  fp8 = precision.choose_fp8(settings)
  chunk = args.loss_chunk
  model = EncoderDecoderModel(module, None, None, optimizer, z_loss=1e-4, loss_chunk_length=chunk)
  model = precision.with_fp8(model, fp8)
  batch = make_batch(args.batch, args.lengths, module.config.vocab_size, args.pack)
  shapes = {name: value.shape for name, value in batch.items()}

  def init(rng: jax.Array) -> TrainState:
    return TrainState.create(optimizer, model.get_initial_variables(rng, shapes))

  partitioner = PjitPartitioner(num_partitions=1)
  if args.batch % (shards := partitioner.mesh.shape["data"]):
    raise ValueError(f"--batch must be a multiple of the {shards} devices, got {args.batch}")
  axes = partitioner.get_mesh_axes(jax.eval_shape(init, jax.random.PRNGKey(0)))
  state = partitioner.partition(init, None, axes)(jax.random.PRNGKey(0))
  one_step = functools.partial(
    train_step,
    loss_fn=model.loss_fn,
    learning_rate_fn=lambda _: jnp.float32(1e-4),
    num_microbatches=args.microbatches,
  )
  spec = partitioner.data_partition_spec
  step = partitioner.partition(one_step, (axes, spec, None), (axes, None), donate_argnums=(0,))
  batch = jax.device_put(batch, jax.sharding.NamedSharding(partitioner.mesh, spec))
  compiled = step.lower(state, batch, jax.random.PRNGKey(1)).compile()
  text, seconds = precision.describe_computation(model, fp8) or "", time.perf_counter() - started
  return CompiledStep(compiled, state, batch, model, partitioner, text, seconds)


def sequence_flops(config: T5Config, lengths: Sequence[int]) -> float:
  """Returns the FLOPs of a training sequence with so many input and target tokens."""
  model = EncoderDecoderModel(Transformer(config), None, None, None)
  batch = make_batch(1, lengths, config.vocab_size, pack=False)
  shapes = {name: value.shape for name, value in batch.items()}
  init = functools.partial(model.get_initial_variables, input_shapes=shapes)
  variables = jax.eval_shape(init, jax.random.PRNGKey(0))
  return flops_of_training(model, variables["params"], batch) or 0.0


def measure(
  args: argparse.Namespace, step: Callable[[], Any], wait: Callable[[], Any], device: str
) -> dict[str, Any]:
  """Times a step after a warmup, and returns the options and the rates, with the FLOPs of the traced loss.

  Args:
    args: those of `add_arguments`.
    step: starts one step.
    wait: returns when the last step is finished.
    device: the kind of the devices.
  """

  def run_group() -> float:
    started = time.perf_counter()
    for _ in range(_GROUP):
      step()
    wait()
    return (time.perf_counter() - started) / _GROUP

  run_group()
  seconds = statistics.median(run_group() for _ in range(max(1, args.steps // _GROUP)))
  rate = args.batch / seconds / jax.device_count()
  flops = sequence_flops(model_config(args.size), args.lengths)
  peak = peak_flops(jax.devices()[:1])
  return {
    **{name: value for name, value in vars(args).items() if value and not callable(value)},
    "device": f"{jax.device_count()} {device}",
    "step_ms": seconds * 1e3,
    "seq_per_s_per_device": rate,
    "tflops_per_device": rate * flops / 1e12,
    "mfu": rate * flops / peak if peak else None,
  }


def measure_program(args: argparse.Namespace, program: CompiledStep) -> dict[str, Any]:
  """Times a step, which donates its state, and returns the result (see `measure`)."""
  state, metrics, rng = program.state, {}, jax.random.PRNGKey(1)

  def step() -> None:
    nonlocal state, metrics
    state, metrics = program.step(state, program.batch, rng)

  device = jax.devices()[0]
  row = measure(args, step, lambda: jax.block_until_ready(state.params), device.device_kind)
  return row | {
    "versions": f"jax {jax.__version__}",
    "computation": program.computation,
    "peak_memory_gb": (device.memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9,
    "compile_s": program.seconds,
    "loss_per_token": float(metrics["loss_per_nonpadding_target_token"].compute()),
  }


def _run(args: argparse.Namespace) -> int:
  show(measure_program(args, compile_step(args)), args.json)
  return 0


def show(row: dict[str, Any], path: str | None) -> None:
  """Prints a result, and writes it to a JSON file if a path is given."""
  mfu = f", MFU {row['mfu']:.1%}" if row["mfu"] else ""
  memory = f", {row['peak_memory_gb']:.1f} GB" if row["peak_memory_gb"] else ""
  print(f"{row['device']}, {row['versions']}; {row['computation']}")
  print(
    f"{row['size']} batch {row['batch']} {row['lengths'][0]}/{row['lengths'][1]}: "
    f"{row['step_ms']:.1f} ms, {row['seq_per_s_per_device']:.1f} seq/s per device, "
    f"{row['tflops_per_device']:.2f} TFLOP/s{mfu}{memory}; ready after {row['compile_s']:.0f} s",
    flush=True,
  )
  if path:
    write_atomically(path, json.dumps(row, indent=2))


def add_arguments(parser: argparse.ArgumentParser, steps: int = 40) -> None:
  """Adds the arguments of `rosetta-t5 bench`."""
  add = parser.add_argument
  add("--size", choices=SIZES, default="small", help="the size of T5 1.1 (default: small)")
  add("--batch", type=positive_integer, default=128, help="sequences in a batch (default: 128)")
  lengths = add("--lengths", type=positive_integer, nargs=2, metavar=("ENC", "DEC"))
  lengths.default, lengths.help = (512, 128), "tokens of inputs and targets (default: 512 128)"
  dtypes = ("bfloat16", "float32")
  add("--dtype", choices=dtypes, default=dtypes[0], help="of activations (default: bfloat16)")
  add("--steps", type=positive_integer, default=steps, help="training steps (default: %(default)s)")
  add("--json", type=output_file, metavar="OUT", help="file for the result")
  add("--kernel", choices=ATTENTION_KERNELS, default="auto", help="the attention kernel")
  add("--remat", choices=REMAT_POLICIES, default="none", help="T5Config.remat_policy")
  add("--loss-chunk", type=positive_integer, help="target positions whose logits exist at a time")
  add("--microbatches", type=positive_integer, help="parts that the batch is split into")
  add("--fp8", action="store_true", help="compute projections in fp8")
  add("--emulate", action="store_true", help="emulate fp8 on hardware without it")
  add("--fuse-qkv", action="store_true", help="one matmul for queries, keys and values")
  add("--pack", action="store_true", help="two examples per row")
  parser.set_defaults(run=_run)
