"""`rosetta-t5 compile RECIPE --gpu h200 --devices N`: the program that N GPUs would run."""

import argparse
import dataclasses
import functools
import importlib.resources
import json
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rosetta_t5.config.configuration import ResolvedRun, Rows
from rosetta_t5.files import write_atomically
from rosetta_t5.gpu_program import compiler
from rosetta_t5.gpu_program.hlo import parse_program
from rosetta_t5.gpu_program.kernels import KINDS
from rosetta_t5.gpu_program.roofline import Timeline, add_up, time_program
from rosetta_t5.networks.kernel_measurement import KernelChoice
from rosetta_t5.networks.other_networks import setting_of
from rosetta_t5.networks.precision import choose_fp8, describe_computation, with_fp8
from rosetta_t5.parallel.placement import use_placement
from rosetta_t5.parallel.process_settings import assemble_flags, read_flags
from rosetta_t5.plan.description import STEP_SECTIONS, Plan, flops_rows, labeled, rows_of_sections
from rosetta_t5.plan.plan_command import add_recipe_arguments, describe_recipe, fits_text
from rosetta_t5.plan.workload import fastest_kernel
from rosetta_t5.telemetry.gpus import GPUS, GPUS_PER_NODE, Gpu
from rosetta_t5.terminal import output_file, positive_integer, size_text
from rosetta_t5.traced.program import with_config
from rosetta_t5.training.trainer import lower_trainer_step


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 compile`."""
  add_recipe_arguments(parser)
  add = parser.add_argument
  add("--mesh", type=_sizes, help='the sizes of the mesh, such as \'{"fsdp": 8, "tensor": 2}\'')
  add("--step", choices=STEPS, default="train", help="default: %(default)s")
  add("--top", type=positive_integer, default=12, help="lines of the longest lists (default 12)")
  add("--json", type=output_file, metavar="FILE", help="also write everything to FILE")
  add("--hlo", type=output_file, metavar="FILE", help="also write the optimized program to FILE")
  parser.set_defaults(run=compile_recipe)


def compile_recipe(options: argparse.Namespace) -> int:
  """Compiles a step and prints its summary; no parameter is initialized and no data is read.

  XLA's flags are those of the launch scripts, and XLA_FLAGS. Times are lower bounds: each kernel at
  the peaks of the GPU's data sheet.
  """
  compiler.check_installed()
  compiler.use_compiler_without_gpu()
  describe = functools.partial(_describe, args=options)
  return describe_recipe(options, describe, _mesh_bindings(options.mesh))


def _sizes(text: str) -> dict[str, int]:
  """Returns the sizes of a mesh that an argument gives as JSON."""
  try:
    return dict(json.loads(text))
  except (ValueError, TypeError) as error:
    message = f"must be JSON such as '{{\"fsdp\": 8}}', got {text!r}"
    raise argparse.ArgumentTypeError(message) from error


def _mesh_bindings(mesh: dict[str, int] | None) -> list[str]:
  """Returns the flags that set a partitioner's mesh, in place of the recipe's."""
  partitioner = "--gin.partitioning.PjitPartitioner"
  unset = ("num_partitions", "model_parallel_submesh", "ici_mesh_shape", "dcn_mesh_shape")
  flags = [f"{partitioner}.mesh={mesh}", *(f"{partitioner}.{name}=None" for name in unset)]
  return flags if mesh else []


def _describe(resolved: ResolvedRun, args: argparse.Namespace) -> Rows:
  resolved.require_run()
  if args.mesh and any(binding.argument == "mesh" for binding in resolved.unused):
    resolved.problems.messages.append(
      "--mesh sets arguments of partitioning.PjitPartitioner, which this run does not use: add "
      "--gin.train.partitioner=@partitioning.PjitPartitioner()"
    )
  plan = Plan(resolved)
  if resolved.problems.messages:
    return rows_of_sections(STEP_SECTIONS, plan)
  gpu = GPUS[args.gpu]
  partitioner = plan["partitioner"].on_devices(compiler.gpu_devices(gpu, args.devices))
  resolved.arguments["partitioner"] = partitioner
  # The FLOPs are those of a training step. Their trace uses a mesh that cannot replace the one below.
  flops = rows_of_sections((flops_rows,) if args.step == "train" else (), plan)
  with compiler.tracing_for(gpu), use_placement(partitioner.mesh.abstract_mesh):
    rows = rows_of_sections(STEP_SECTIONS, plan) + flops
    return rows if resolved.problems.messages else rows + _program_rows(plan, args, gpu)


def _program_rows(plan: Plan, args: argparse.Namespace, gpu: Gpu) -> Rows:
  """Compiles the step, writes the files that were asked for, and returns what is printed."""
  lowered, computation = lower_step(plan, args.step, gpu)
  flags = xla_options(args.devices)
  started = time.monotonic()
  compiled = lowered.compile(compiler_options={**compiler.OPTIONS, **flags})
  compile_seconds = time.monotonic() - started
  hlo = compiled.as_text()
  # Decoding is counted as if no text ended early.
  trips = plan.lengths["decoder"] if args.step == "predict" else 1
  timeline = time_program(parse_program(hlo), gpu, plan.mesh, trips)
  sizes = compiled.memory_analysis()
  memory = {
    "arguments": sizes.argument_size_in_bytes,
    "temporaries": sizes.temp_size_in_bytes,
    # Outputs that overwrite arguments need no memory.
    "outputs": sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
  }
  used = sum(memory.values())
  peak = timeline.seconds * args.devices * gpu.bfloat16
  mfu = plan.flops / peak if args.step == "train" and plan.activations else None
  speed = plan.dataset_cfg.batch_size / timeline.seconds
  facts = {
    "jax": jax.__version__,
    "computes": computation,
    "flags": flags,
    "gpu": gpu.name,
    "mesh": dict(plan.mesh),
    "compile_seconds": compile_seconds,
    "memory": {**memory, "peak": used},
    "kernels_by_kind": add_up(timeline.kernels, "kind"),
    **dataclasses.asdict(timeline),
    "least_step_seconds": timeline.seconds,
    "seconds_by_bound": timeline.seconds_by_bound,
    "most_sequences_per_second": speed,
    "largest_mfu": mfu,
  }
  for path, text in ((args.hlo, hlo), (args.json, json.dumps(facts, indent=1))):
    if path:
      write_atomically(path, text)
  flags_text = " ".join(f"--{name}={value}" for name, value in flags.items()) or "XLA's defaults"
  compiled_text = f"the {args.step} step in {compile_seconds:.0f} s, for {args.devices} {gpu.name}"
  parts = ", ".join(f"{name} {size_text(size)}" for name, size in memory.items())
  return [
    ("computes", computation),
    ("flags", flags_text),
    ("compiled", compiled_text),
    ("memory", f"{fits_text(used, gpu)}; {parts}"),
    *_kernel_rows(timeline, args.top),
    *_collective_rows(timeline),
    *_speed_rows(timeline, speed, mfu, args.devices),
  ]


def _speed_rows(timeline: Timeline, speed: float, mfu: float | None, devices: int) -> Rows:
  bounds = timeline.seconds_by_bound.items()
  bounds_text = ", ".join(f"{seconds * 1e3:.1f} ms {bound}" for bound, seconds in bounds)
  mfu_text = "" if mfu is None else f", an MFU of {mfu:.1%}"
  return [
    ("step", f"at least {timeline.seconds * 1e3:.4g} ms, bound by: {bounds_text}"),
    (
      "speed",
      f"at most {speed:,.0f} sequences/s, {speed / devices:,.1f} per GPU{mfu_text} "
      "(upper bounds: every kernel at the GPU's data sheet)",
    ),
  ]


def xla_options(devices: int) -> dict[str, Any]:
  """Returns the flags with which the launch scripts start a run on so many GPUs, and XLA_FLAGS."""
  name = "one_node.txt" if devices <= GPUS_PER_NODE else "many_nodes.txt"
  folder = importlib.resources.files("t5x.contrib.gpu.scripts_gpu") / "xla_flags"
  with importlib.resources.as_file(folder / name) as path:
    flags, _ = assemble_flags(read_flags(path), os.environ.get("XLA_FLAGS", ""))
  pairs = (flag.removeprefix("--").partition("=") for flag in flags.split())
  booleans = {"": True, "true": True, "false": False}  # jax does not accept these as text
  return {name: booleans.get(value.lower(), value) for name, _, value in pairs}


def _kernel_rows(timeline: Timeline, top: int) -> Rows:
  sums = add_up(timeline.kernels, "kind")
  total = sum(row["count"] for row in sums.values())
  lines = [
    f"{total:.0f} in a step, with their minimum time:",
    f"{'kernels':>9} {'TFLOP':>8} {'GB':>8} {'ms':>8}",
  ]
  for kind in KINDS:
    if row := sums.get(kind):
      lines.append(
        f"{row['count']:9.0f} {row['flops'] / 1e12:8.2f} {row['bytes'] / 1e9:8.2f} "
        f"{row['seconds'] * 1e3:8.2f}  {kind}"
      )
  by_source = add_up(timeline.kernels, "kind", "source").items()
  slowest = [
    f"{row['seconds'] * 1e3:9.2f} ms  {row['count']:4.0f} × {kind}: {source[:80] or 'the step itself'}"
    for (kind, source), row in sorted(by_source, key=lambda item: -item[1]["seconds"])[:top]
  ]
  return [*labeled("kernels", lines), *labeled("longest", slowest)]


def _collective_rows(timeline: Timeline) -> Rows:
  """Returns a table of the collectives, added up by kind and axes."""
  added = ("sent", "seconds", "exposed_seconds")
  sums = add_up(timeline.collectives, "kind", "axes", "leaves_node", added=added)
  lines = [f"{'calls':>9} {'GB sent':>8} {'ms':>8} {'waits':>8}"]
  for (kind, axes, leaves_node), row in sums.items():
    link = "network" if leaves_node else "NVLink"
    lines.append(
      f"{row['count']:9.0f} {row['sent'] / 1e9:8.3f} {row['seconds'] * 1e3:8.2f} "
      f"{row['exposed_seconds'] * 1e3:8.2f}  {kind} over {', '.join(axes) or 'no mesh axis'} by {link}"
    )
  return labeled("sends", lines) if sums else []


STEPS = ("train", "eval", "predict", "score")


def lower_step(plan: Plan, step: str, gpu: Gpu) -> tuple[Any, str]:
  """Returns one step of a run, lowered, and its number formats and kernels as text.

  Args:
    plan: the run. The mesh of its partitioner is the one in use (`use_placement`).
    step: one of `STEPS`: an optimizer step, the loss of an evaluation, decoding, or scoring.

  Raises:
    ValueError: the recipe is not for training, or its arguments do not fit together.
  """
  if step == "train" and not plan.is_training:
    raise ValueError(
      "--step train needs a recipe of a training run, but this one is for "
      f"{plan.resolved.function_name}: add --step predict, score or eval"
    )
  # As in `train`: such runs use XLA's own random numbers.
  if plan["random_seed"] is None or plan["use_hardware_rng"]:
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
  partitioner, cfg = plan["partitioner"], plan.dataset_cfg
  fp8 = choose_fp8(plan["te_config_cls"], partitioner.mesh.devices.flat[0])
  model = with_fp8(plan["model"], fp8)
  # Delayed scaling adds variables to the train state.
  arguments = {**plan.resolved.arguments, "model": model}
  plan = Plan(dataclasses.replace(plan.resolved, arguments=arguments), gpu)
  batch = batch_shapes(model, cfg)
  kernel = None
  if step == "train" and setting_of(model.network_config, "attention_kernel") == "auto":
    name = fastest_kernel(model, plan.lengths, cfg, plan.mesh, gpu) or "xla"
    kernel = KernelChoice(name, "auto, as `plan` expects; a run measures")
    model = with_config(model, attention_kernel=name)
  computation = describe_computation(model, fp8, kernel) or ""
  if step in ("predict", "score"):
    return _lower_inference(plan, model, batch, step), computation
  lowered = lower_trainer_step(
    plan["trainer_cls"],
    batch,
    is_training=step == "train",
    model=model,
    train_state=plan.state,
    train_state_axes=plan.specs,
    partitioner=partitioner,
    rng=jax.random.PRNGKey(0),
  )
  return lowered, computation


def batch_shapes(model: Any, cfg: Any) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes of a global batch, as the model's feature converter makes it; reads no data.

  Raises:
    ValueError: the lengths are those of the longest example, which is unknown without the data.
  """
  if not cfg.task_feature_lengths or None in cfg.task_feature_lengths.values():
    raise ValueError(
      "the lengths of a batch are unknown without its data: set TASK_FEATURE_LENGTHS"
    )
  given, converter = cfg.task_feature_lengths, model.FEATURE_CONVERTER_CLS(pack=cfg.pack)
  # A converter that passes features through has no lengths of its own.
  lengths = converter.get_model_feature_lengths(given) or given
  shapes = {name: (cfg.batch_size, length) for name, length in lengths.items()}
  return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}


def _lower_inference(plan: Plan, model: Any, batch: Any, step: str) -> Any:
  def infer(params: Any, batch: Any, rng: jax.Array) -> Any:
    if step == "predict":
      return model.predict_batch_with_aux(params, batch, rng=rng)
    return model.score_batch(params, batch)

  partitioner = plan["partitioner"]
  resources = (plan.specs.params, partitioner.data_partition_spec, PartitionSpec())
  partitioned = partitioner.partition(infer, resources, PartitionSpec())
  key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
  return partitioned.lower(plan.state.params, batch, key)
