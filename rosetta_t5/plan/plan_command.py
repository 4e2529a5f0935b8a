"""`rosetta-t5 plan RECIPE --devices N`: what a training run would need on N GPUs."""

from __future__ import annotations

import argparse
import collections
import functools
from collections.abc import Callable, Sequence

from rosetta_t5.config import run_from_command_line
from rosetta_t5.config.command_line import add_trust_option
from rosetta_t5.config.configuration import ResolvedRun, Rows
from rosetta_t5.plan.configurations import USABLE, best_configurations
from rosetta_t5.plan.description import STEP_SECTIONS, Plan, flops_rows, labeled, rows_of_sections
from rosetta_t5.plan.estimate import Estimate, estimate_step
from rosetta_t5.plan.memory import StateMemory
from rosetta_t5.telemetry.gpus import GPUS, Gpu
from rosetta_t5.terminal import format_number, format_seconds, positive_integer, size_text
from rosetta_t5.user_errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 plan`."""
  add_recipe_arguments(parser)
  add = parser.add_argument
  add("--mfu", type=float, default=0.4, help="the share of its peak that one GPU reaches (0.4)")
  text = "any: also choose configurations in fp8, which changes numbers; default: %(default)s"
  add("--precision", choices=("recipe", "any"), default="recipe", help=text)
  parser.set_defaults(run=plan)


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of commands about a recipe on GPUs that need not be present."""
  add = parser.add_argument
  add("recipe", nargs="+", metavar="RECIPE", help="a gin file of a training run")
  add("--devices", type=positive_integer, required=True, help="the number of GPUs")
  add("--gpu", type=str.lower, choices=GPUS, default="h100", help="default: %(default)s")
  add_trust_option(parser)


def plan(options: argparse.Namespace) -> int:
  """Prints the memory, time and traffic of a step; nothing is compiled and no device is used."""
  if not 0 < options.mfu <= 1:
    raise ConfigError(f"--mfu must be a share of a GPU's peak such as 0.4, got {options.mfu}")
  return describe_recipe(options, functools.partial(_describe, options=options))


def describe_recipe(
  options: argparse.Namespace, describe: Callable[..., Rows], flags: Sequence[str] = ()
) -> int:
  """Prints the rows that `describe` returns for a recipe; returns the exit status.

  Args:
    options: the values of `add_recipe_arguments`.
    describe: returns rows, and adds to the problems of the run.
    flags: further flags, which come before the user's.
  """
  argv = [
    "rosetta-t5",
    *(f"--gin_file={path}" for path in options.recipe),
    "--gin.MODEL_DIR='not made'",
    *flags,
    *options.flags,
    "--dry_run",
    f"--devices={options.devices}",
  ]
  run_from_command_line(None, argv, describe)
  return 0


def _describe(resolved: ResolvedRun, options: argparse.Namespace) -> Rows:
  resolved.require_run()
  own = [functools.partial(rows, options=options) for rows in (_estimate_rows, _choice_rows)]
  return rows_of_sections((*STEP_SECTIONS, flops_rows, *own), Plan(resolved, GPUS[options.gpu]))


def _estimate_rows(plan: Plan, options: argparse.Namespace) -> Rows:
  if plan.resolved.problems.messages or not plan.is_training:
    return []
  memory = StateMemory.of(plan.state, plan.specs, plan.work)
  estimate = estimate_step(memory, plan.work, plan.flops, plan.gpu, options.mfu)
  parts = (f"{size_text(size):>8}  {name}" for name, size in estimate.memory.items())
  return [
    *labeled("memory", [fits_text(sum(estimate.memory.values()), plan.gpu), *parts]),
    *_time_rows(plan, estimate, options.mfu),
    *_traffic_rows(estimate),
  ]


def fits_text(total: float, gpu: Gpu) -> str:
  """Returns how much of a GPU's memory so many bytes need, and whether they fit."""
  fits = "fits" if total <= USABLE * gpu.memory else "DOES NOT FIT"
  return f"{size_text(total)} of {size_text(gpu.memory)} on each {gpu.name}: {fits}"


def _time_rows(plan: Plan, estimate: Estimate, mfu: float) -> Rows:
  speed = plan.dataset_cfg.batch_size / estimate.step_seconds
  parts = [f"{format_seconds(estimate.compute_seconds)} at an MFU of {mfu:g}"]
  if estimate.bubble:
    parts.append(f"{format_seconds(estimate.bubble_seconds)} in the pipeline's bubble")
  parts.append(f"{format_seconds(estimate.waiting_seconds)} waiting for links")
  step = f"{format_seconds(estimate.step_seconds)}: {', '.join(parts)}"
  per_gpu = format_number(speed / plan.devices[0])
  text = f"{format_number(speed)} sequences/s, {per_gpu} per GPU"
  return [("step", step), ("speed", text)]


def _traffic_rows(estimate: Estimate) -> Rows:
  """Returns the bytes and the time of each kind of collective."""
  sent: dict[str, float] = collections.defaultdict(float)
  seconds: dict[str, float] = collections.defaultdict(float)
  for each in estimate.traffic:
    link = "the network" if each.leaves_node else "NVLink"
    what = f"{each.kind} of {each.why} over {', '.join(each.axes)}, by {link}"
    sent[what] += each.sent
    seconds[what] += each.seconds
  lines = [f"{size_text(sent[what]):>8}  {what}: {format_seconds(seconds[what])}" for what in sent]
  return labeled("sends", lines or ["nothing"])


def _choice_rows(plan: Plan, options: argparse.Namespace) -> Rows:
  """Returns the fastest configurations that fit, with the flags that set them."""
  if plan.resolved.problems.messages or not plan.is_training or plan.activations is None:
    return []
  choices = best_configurations(plan, options.mfu, options.precision == "any")
  text = "the fastest configurations that fit, with the flags that set them:"
  if not choices:
    devices = f"{plan.devices[0]} {plan.gpu.name}"
    text = f"no configuration fits {devices}: use more GPUs, or a smaller batch"
  rows = [("", ""), ("choices", text)]
  for number, choice in enumerate(choices, start=1):
    mesh = " × ".join(f"{name} {size}" for name, size in choice.mesh.items() if size > 1)
    memory = size_text(sum(choice.estimate.memory.values()))
    seconds = choice.estimate.step_seconds
    speed = format_number(plan.dataset_cfg.batch_size / seconds)
    where = mesh or "one GPU"
    if choice.work.fp8 != plan.fp8:
      where += ", in fp8" if choice.work.fp8 else ", in bfloat16"
    text = f"{where}: {format_seconds(seconds)}, {speed} sequences/s, {memory} on each GPU"
    lines = choice.flags(is_fp8_set=plan["te_config_cls"] is not None)
    rows += labeled(f"{number}.", [text, *(f"{line} \\" for line in lines[:-1]), lines[-1]])
  return rows
