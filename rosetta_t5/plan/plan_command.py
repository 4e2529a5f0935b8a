"""`rosetta-t5 plan RECIPE --devices N`: what a training run needs on GPUs that are not here."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

from rosetta_t5 import config
from rosetta_t5.config import ResolvedRun
from rosetta_t5.config.errors import exit_on_user_error
from rosetta_t5.plan.describe import Plan, Rows, describe_costs, told
from rosetta_t5.plan.estimate import Estimate, estimate_step
from rosetta_t5.plan.hardware import GPUS, Gpu, find_gpu
from rosetta_t5.plan.memory import size_text

_USAGE = """\
Compiles nothing and touches no device. RECIPE is a gin file of a training run, such as
gin/examples/large_pile_pretrain.gin; --gin.NAME=VALUE changes it, as in a run:
  rosetta-t5 plan gin/examples/xl_pile_pretrain.gin --devices=64 \\
    --gin.partitioning.PjitPartitioner.mesh='{"fsdp": 8}'
"""


def main(arguments: Sequence[str]) -> int:
  """Prints memory, time and traffic of a step of a recipe; the arguments are those of `plan --help`."""
  parser = argparse.ArgumentParser(
    "rosetta-t5 plan", epilog=_USAGE, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("recipe", nargs="+", metavar="RECIPE")
  parser.add_argument("--devices", type=int, required=True, help="how many GPUs")
  parser.add_argument("--gpu", default="h100", help=f"{', '.join(GPUS)} (default: %(default)s)")
  parser.add_argument(
    "--mfu", type=float, default=0.4, help="share of its peak that one GPU reaches (default 0.4)"
  )
  args, gin = parser.parse_known_args(arguments)
  with exit_on_user_error():
    if not 0 < args.mfu <= 1:
      raise ValueError(f"--mfu={args.mfu} is no share of a GPU's peak: give 0.4, say")
    if args.devices < 1:
      raise ValueError(f"--devices={args.devices}: give a number from 1 on")
    gpu = find_gpu(args.gpu)
  argv = [
    "rosetta-t5 plan",
    *(f"--gin_file={path}" for path in args.recipe),
    "--gin.MODEL_DIR='not made'",
    *gin,
    "--dry_run",
    f"--devices={args.devices}",
  ]
  config.run_from_command_line(None, argv, functools.partial(_describe, gpu=gpu, mfu=args.mfu))
  return 0


def _describe(resolved: ResolvedRun, gpu: Gpu, mfu: float) -> Rows:
  plan = Plan(resolved)
  rows = [row for part in describe_costs() for row in told(part, plan)]
  return [*rows, *told(functools.partial(_estimated, gpu=gpu, mfu=mfu), plan)]


def _estimated(plan: Plan, gpu: Gpu, mfu: float) -> Rows:
  if plan.resolved.problems.messages or not plan.is_training:
    return []
  estimate = estimate_step(plan.state, plan.splits, plan.mesh, plan.work, plan.flops, gpu, mfu)
  return [*memory_rows(estimate, gpu), *_time_rows(plan, estimate, gpu, mfu)]


def memory_rows(estimate: Estimate, gpu: Gpu) -> Rows:
  """Returns a table of what each GPU holds."""
  total = sum(estimate.memory.values())
  fits = "fits" if total < 0.92 * gpu.memory else "DOES NOT FIT"
  rows = [("memory", f"{size_text(total)} of {size_text(gpu.memory)} on each {gpu.name}: {fits}")]
  return [*rows, *(("", f"{size_text(size):>8}  {name}") for name, size in estimate.memory.items())]


def _time_rows(plan: Plan, estimate: Estimate, gpu: Gpu, mfu: float) -> Rows:
  speed = plan.dataset_cfg.batch_size / estimate.step_seconds
  devices = plan.devices[0]
  rows = [
    (
      "step",
      f"{estimate.step_seconds:.3g} s: {estimate.compute_seconds:.3g} s at an MFU of {mfu:g}, "
      f"{estimate.waiting_seconds:.3g} s waiting for links",
    ),
    ("speed", f"{speed:,.4g} sequences/s, {speed / devices:,.4g} a GPU"),
    ("", f"{estimate.efficiency:.0%} of the time is computing"),
  ]
  return [*rows, *_traffic_rows(estimate)]


def _traffic_rows(estimate: Estimate) -> Rows:
  if not estimate.traffic:
    return [("sends", "nothing")]
  sent: dict[str, float] = {}
  seconds: dict[str, float] = {}
  for each in estimate.traffic:
    way = "the network" if each.leaves_node else "NVLink"
    axes = ", ".join(each.collective.axes)
    what = f"{each.collective.kind} of {each.collective.why} over {axes}, by {way}"
    sent[what] = sent.get(what, 0) + each.sent
    seconds[what] = seconds.get(what, 0) + each.seconds
  heads = ["sends", *[""] * len(sent)]
  return [
    (head, f"{size_text(sent[what]):>8}  {what}: {seconds[what] * 1e3:.3g} ms")
    for head, what in zip(heads, sent, strict=False)
  ]
