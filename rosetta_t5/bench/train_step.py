"""Times the training step of T5 1.1 on this machine's devices.

  rosetta-t5 bench --size base --batch 128
  rosetta-t5 bench --size large --batch 96 --fp8 --kernel cudnn --json out.json

A step is the forward pass, the backward pass and an AdamW step on all parameters, with a donated state and
without dropout. The batch is random tokens without padding (with --pack, two examples per row). The
benchmark needs neither TensorFlow nor seqio nor gin. The time is the median over groups of steps, without
compilation and warmup; a group ends when the parameters of its last step are computed.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rosetta_t5.bench import harness
from rosetta_t5.gpu_program.hlo import parse_program
from rosetta_t5.gpu_program.roofline import time_program
from rosetta_t5.models import EncoderDecoderModel
from rosetta_t5.networks.computation_summary import describe_computation
from rosetta_t5.networks.layers.layer_stack import REMAT_POLICIES
from rosetta_t5.networks.precision import TransformerEngineConfig, choose_fp8, with_fp8
from rosetta_t5.networks.t5 import Transformer
from rosetta_t5.networks.t5_config import ATTENTION_KERNELS
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.plan.memory import step_memory
from rosetta_t5.plan.workload import batch_workload
from rosetta_t5.telemetry.gpus import gpu_of
from rosetta_t5.terminal import positive_integer
from rosetta_t5.training import TrainState, train_step
from rosetta_t5.training.optimizers.optax_wrapper import OptaxWrapper
from rosetta_t5.training.optimizers.optimizer_def import OptimizerDef

# What is counted in the compiled program → how the compiler writes it.
HLO_FACTS = {
  "fp8 matmuls": '"__cublas$lt$matmul$f8"',
  "cuDNN attentions": '"__cudnn$fmha',
  "Triton calls": '"__gpu$xla.gpu.triton"',
  "e4m3 arrays": "f8e4m3fn[",
  "e5m2 arrays": "f8e5m2[",
}


class CompiledStep(NamedTuple):
  """A compiled step and its first arguments.

  Attributes:
    step: the compiled program: (state, batch, rng) → (state, metrics).
    state: the initial state, on the devices.
    batch: a batch, on the devices.
    computation: a description of the kernels and precisions.
    planned: bytes per device by category, as `rosetta-t5 plan` estimates them.
  """

  step: Any
  state: TrainState
  batch: Any
  computation: str
  planned: dict[str, float]


def compile_step(args: argparse.Namespace, optimizer: OptimizerDef | None = None) -> CompiledStep:
  """Returns the compiled training step and its first arguments.

  Args:
    args: the arguments of `add_workload` and `add_switches`, and `fp8`.
    optimizer: the optimizer; AdamW by default.
  """
  config = harness.model_config(
    args.size,
    dtype=args.dtype,
    fuse_qkv_params=args.fuse_qkv,
    transpose_batch_sequence=args.transpose,
    attention_kernel=args.kernel,
    remat_policy=args.remat,
  )
  optimizer = optimizer or OptaxWrapper(optax.adamw(1e-4, weight_decay=0.01))
  model = EncoderDecoderModel(
    Transformer(config), None, None, optimizer, z_loss=1e-4, loss_chunk_length=args.loss_chunk
  )
  te_config = TransformerEngineConfig(
    enabled=args.fp8, recipe=args.recipe, backend=args.fp8_backend, emulate=args.emulate
  )
  fp8 = choose_fp8(te_config)
  model = with_fp8(model, fp8)
  batch = harness.make_batch(args.batch, tuple(args.lengths), config.vocab_size, args.pack)
  shapes = {name: value.shape for name, value in batch.items()}

  def init(rng: jax.Array) -> TrainState:
    return TrainState.create(optimizer, model.get_initial_variables(rng, shapes))

  partitioner = PjitPartitioner(num_partitions=1)
  shards = partitioner.mesh.shape["data"]
  if args.batch % shards:
    raise ValueError(
      f"--batch must be a multiple of {shards}, the number of devices, got {args.batch}"
    )
  axes = partitioner.get_mesh_axes(jax.eval_shape(init, jax.random.PRNGKey(0)))
  state = partitioner.partition(init, None, axes)(jax.random.PRNGKey(0))
  step = partitioner.partition(
    functools.partial(
      train_step,
      loss_fn=model.loss_fn,
      learning_rate_fn=lambda _: jnp.float32(1e-4),
      num_microbatches=args.microbatches,
      optimizer_uses_loss=optimizer.uses_loss,
    ),
    (axes, partitioner.data_partition_spec, None),
    (axes, None),
    donate_argnums=(0,),
  )
  sharding = jax.sharding.NamedSharding(partitioner.mesh, partitioner.data_partition_spec)
  batch_on_devices = jax.device_put(batch, sharding)
  compiled = step.lower(state, batch_on_devices, jax.random.PRNGKey(1)).compile()
  mesh = dict(partitioner.mesh.shape)
  work = batch_workload(model, partitioner, shapes, mesh, args.microbatches)
  planned = step_memory(state, axes, work)
  return CompiledStep(
    compiled, state, batch_on_devices, describe_computation(model, fp8) or "", planned
  )


def measure(args: argparse.Namespace) -> dict[str, Any]:
  """Times the step and returns the result (`harness.make_row`)."""
  started = time.perf_counter()
  compiled, state, batch, computation, planned = compile_step(args)
  compile_seconds = time.perf_counter() - started
  rng = jax.random.PRNGKey(1)
  metrics: Any = None

  def step() -> None:
    nonlocal state, metrics
    state, metrics = compiled(state, batch, rng)

  seconds = harness.time_steps(step, lambda: jax.block_until_ready((state.params, metrics)), args)
  devices, hlo = jax.devices(), compiled.as_text()
  return harness.make_row(
    args,
    seconds,
    device=devices[0].device_kind,
    devices=len(devices),
    versions=f"jax {jax.__version__}",
    computation=computation,
    switches=switches(args),
    peak_memory=(devices[0].memory_stats() or {}).get("peak_bytes_in_use"),
    compile_s=compile_seconds,
    loss_per_token=float(metrics["loss_per_nonpadding_target_token"].compute()),
    hlo={name: count for name, mark in HLO_FACTS.items() if (count := hlo.count(mark))},
    temporaries_gb=compiled.memory_analysis().temp_size_in_bytes / 1e9,
    planned_temporaries_gb=(planned["gradients"] + planned["activations"]) / 1e9,
    least_ms=_least_milliseconds(hlo, devices),
  )


def _least_milliseconds(hlo: str, devices: Sequence[Any]) -> float | None:
  """Returns a step's milliseconds if each kernel reached the rates of the GPU's data sheet, else None."""
  gpu = gpu_of(devices[0].device_kind)
  if gpu is None:
    return None
  return 1e3 * time_program(parse_program(hlo), gpu, {"data": len(devices)}).seconds


def switches(args: argparse.Namespace) -> str:
  """Returns the switches as text."""
  words = {
    args.dtype: True,
    f"kernel={args.kernel}": True,
    f"fp8 {args.recipe}/{args.fp8_backend}": args.fp8,
    "fuse_qkv": args.fuse_qkv,
    "transpose": args.transpose,
    "pack": args.pack,
    f"remat={args.remat}": args.remat != "none",
    f"loss_chunk={args.loss_chunk}": args.loss_chunk,
    f"microbatches={args.microbatches}": args.microbatches,
  }
  return " ".join(word for word, is_set in words.items() if is_set)


def add_switches(parser: argparse.ArgumentParser) -> None:
  """Adds the switches of our training step."""
  add = parser.add_argument
  add("--kernel", choices=ATTENTION_KERNELS, default="auto", help="the attention kernel")
  add("--remat", choices=REMAT_POLICIES, default="none", help="T5Config.remat_policy")
  add(
    "--loss-chunk",
    type=positive_integer,
    metavar="POSITIONS",
    help="target positions whose logits exist at a time",
  )
  add("--microbatches", type=positive_integer, help="parts that the batch is split into")
  add("--recipe", choices=("current", "delayed"), default="current", help="the scaling of fp8")
  add(
    "--fp8-backend",
    choices=("auto", "native", "te"),
    default="auto",
    help="XLA's fp8 matmuls, or Transformer Engine's (te)",
  )
  add("--fuse-qkv", action="store_true", help="one matmul for queries, keys and values")
  add("--transpose", action="store_true", help="keep activations as [length, batch, ...]")
  add("--pack", action="store_true", help="two examples per row")
  add("--emulate", action="store_true", help="emulate fp8 on hardware without it")


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 bench`."""
  harness.add_timed_workload(parser)
  add_switches(parser)
  parser.add_argument("--fp8", action="store_true", help="compute projections in fp8")
  parser.set_defaults(run=functools.partial(harness.run, measure))
