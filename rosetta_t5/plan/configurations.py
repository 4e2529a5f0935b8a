"""Chooses mesh, microbatches, rematerialization, attention kernel and precision such that a step fits and is fast."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from rosetta_t5.networks.expert_settings import has_experts
from rosetta_t5.networks.layers.stack import pipeline_obstacle
from rosetta_t5.networks.other_networks import setting_of
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.parallel.axis_rules import check_partition_specs, complete_specs
from rosetta_t5.parallel.mesh import (
  CONTEXT_AXIS,
  DATA_AXIS,
  EXPERT_AXIS,
  FSDP_AXIS,
  OPTIONAL_AXES,
  PIPELINE_AXIS,
  count_batch_shards,
)
from rosetta_t5.parallel.placement import PipelineSettings
from rosetta_t5.plan.estimate import Estimate, estimate_step
from rosetta_t5.plan.memory import StateMemory
from rosetta_t5.plan.workload import Workload, fastest_kernel, workload_of
from rosetta_t5.telemetry.gpus import GPUS, GPUS_PER_NODE

# The axes that split parameters, as a user names them.
_SHARDING_AXES = (PIPELINE_AXIS, FSDP_AXIS, CONTEXT_AXIS, "tensor")
# Microbatches of a pipeline per stage that are tried besides the default.
_MICROBATCHES_PER_STAGE = (8, 16)
# A device that computes fewer positions of a row than this waits for keys and values for too long.
_FEWEST_POSITIONS = 1024
_NUM_CHOICES = 3
# What T5X's runs for experts replace, although the axis `expert` does not need it.
_STANDARD_CLASSES = (
  "train.partitioner=@partitioning.PjitPartitioner()",
  "train.trainer_cls=@trainer.Trainer",
)


@dataclasses.dataclass(frozen=True)
class Configuration:
  """A way to run a training step.

  Attributes:
    mesh: the partitioner's mesh, {"data": …, "fsdp": …, "tensor": …}, and those of `OPTIONAL_AXES` that
      are larger than 1.
    work: what the step computes.
    estimate: what that needs.
  """

  mesh: Mapping[str, int]
  work: Workload
  estimate: Estimate

  def flags(self, is_fp8_set: bool) -> list[str]:
    """Returns the command-line flags that set this configuration.

    Args:
      is_fp8_set: whether the recipe turns fp8 on.
    """
    config, fp8 = f"network.{type(self.work.config).__name__}", "te_helper.TransformerEngineConfig"
    lines = [
      f"partitioning.PjitPartitioner.mesh='{json.dumps(dict(self.mesh))}'",
      "partitioning.PjitPartitioner.num_partitions=1",
      *(_STANDARD_CLASSES if has_experts(self.work.config) else ()),
      f"trainer.Trainer.num_microbatches={self.work.microbatches}",
      f"{config}.remat_policy=\"'{self.work.remat_policy}'\"",
    ]
    if self.work.config.attention_kernel != "auto":  # a run measures the kernels for 'auto'
      lines.append(f"{config}.attention_kernel=\"'{self.work.kernel}'\"")
    if PIPELINE_AXIS in self.mesh:
      microbatches = self.work.schedule.microbatches
      lines.insert(1, f"partitioning.PjitPartitioner.pipeline_microbatches={microbatches}")
    if self.work.fp8:
      lines += [f"train.te_config_cls=@{fp8}", f"{fp8}.enabled=1"]
    elif is_fp8_set:
      lines += ["train.te_config_cls=None"]
    return [f"--gin.{line}" for line in lines]


def best_configurations(plan: Any, mfu: float, any_precision: bool) -> list[Configuration]:
  """Returns the fastest configurations that fit, the fastest first, each on another mesh.

  Of equal times, as they are printed, the one that shards the parameters least comes first.

  Args:
    any_precision: whether to try bfloat16 and fp8; otherwise the recipe's precision is kept.
  """
  found = _configurations_by_mesh(plan, mfu, any_precision)
  fastest = [min(choices, key=_seconds) for choices in found if choices]

  def rank(choice: Configuration) -> tuple[float, int]:
    shards = math.prod(choice.mesh.get(axis, 1) for axis in _SHARDING_AXES)
    return float(f"{_seconds(choice):.3g}"), shards

  return sorted(fastest, key=rank)[:_NUM_CHOICES]


def _seconds(configuration: Configuration) -> float:
  return configuration.estimate.step_seconds


def _configurations_by_mesh(
  plan: Any, mfu: float, any_precision: bool
) -> Iterator[list[Configuration]]:
  """Yields, for each mesh, its configurations that fit."""
  gpu, model, batch_size = plan.gpu, plan["model"], plan.dataset_cfg.batch_size
  config = model.network_config
  partitioner = plan["partitioner"].with_mesh({PIPELINE_AXIS: 1, DATA_AXIS: -1, CONTEXT_AXIS: 1})
  if has_experts(config):
    partitioner = PjitPartitioner(mesh={DATA_AXIS: -1, EXPERT_AXIS: 1, CONTEXT_AXIS: 1})
  specs, flops = complete_specs(partitioner, plan.state), plan.flops
  is_bfloat16 = jnp.dtype(setting_of(config, "dtype")) == jnp.bfloat16
  can_use_fp8 = gpu.fp8 is not None and hasattr(config, "matmul") and is_bfloat16
  precisions = {False, can_use_fp8} if any_precision else {plan.fp8}
  for mesh in _possible_meshes(config, plan.devices[0], plan.lengths):
    sizes = partitioner.with_mesh(mesh).mesh_config.axis_sizes(plan.devices[0])
    try:
      check_partition_specs(plan.state, specs, sizes)
    except ValueError:
      continue  # a parameter cannot be split like this
    if batch_size % count_batch_shards(sizes):
      continue
    kernel = fastest_kernel(model, plan.lengths, plan.dataset_cfg, sizes, gpu)
    work = workload_of(model, partitioner, batch_size, sizes, plan.activations, kernel)
    memory = StateMemory.of(plan.state, specs, work)
    named = {x: n for x, n in mesh.items() if n > 1 or x not in OPTIONAL_AXES}
    found = []
    policies = POLICIES if hasattr(work.config, "remat_policy") else (work.remat_policy,)
    for policy, fp8, schedule in itertools.product(policies, precisions, _schedules(work)):
      changed = work.replace(remat_policy=policy, fp8=fp8, pipeline=schedule)
      option = fewest_microbatches(changed, memory, USABLE * gpu.memory)
      if option:
        estimate = estimate_step(memory, option, flops, gpu, mfu)
        found.append(Configuration(named, option, estimate))
    yield found


def _possible_meshes(
  config: Any, devices: int, lengths: Mapping[str, int]
) -> Iterator[dict[str, int]]:
  """Yields meshes whose tensor axis is within a node and divides heads, feed-forward and vocabulary.

  The axis `context` is within a node too, and only splits long rows. Only stacks of scanned layers can
  be a pipeline.
  """
  divisors, on_node = _divisors(devices), _divisors(devices, GPUS_PER_NODE)
  widths = math.gcd(devices, config.num_heads, config.mlp_dim, config.vocab_size)
  num_experts = setting_of(config, "num_experts") or 1
  is_pipelinable = setting_of(config, "scan_layers") and not pipeline_obstacle(config, ())
  choices = (
    _divisors(widths, GPUS_PER_NODE),
    [n for n in on_node if n == 1 or _can_split(lengths, n)],
    divisors,
    _divisors(math.gcd(devices, num_experts)),
    divisors if is_pipelinable else [1],
  )
  for tensor, context, fsdp, expert, pipeline in itertools.product(*choices):
    split = tensor * context * fsdp * expert * pipeline
    if devices % split == 0 and context * tensor <= GPUS_PER_NODE:
      outer = {PIPELINE_AXIS: pipeline, DATA_AXIS: devices // split, EXPERT_AXIS: expert}
      yield {**outer, FSDP_AXIS: fsdp, CONTEXT_AXIS: context, "tensor": tensor}


def _divisors(number: int, largest: int | None = None) -> list[int]:
  return [n for n in range(1, min(number, largest or number) + 1) if number % n == 0]


def _can_split(lengths: Mapping[str, int], context: int) -> bool:
  return all(n % context == 0 and n // context >= _FEWEST_POSITIONS for n in lengths.values())


def _schedules(work: Workload) -> Iterator[PipelineSettings]:
  """Yields settings with the default number of microbatches, and with more, which shorten the bubble."""
  stages = work.mesh.get(PIPELINE_AXIS, 1)
  more = (factor * stages for factor in _MICROBATCHES_PER_STAGE if stages > 1)
  for microbatches in (None, *more):
    yield dataclasses.replace(work.pipeline, microbatches=microbatches)


GPU = GPUS["h100"]
# The share of a device's memory that arrays can use. XLA and NCCL need the rest.
USABLE = 0.9
# In order of cost: `full` computes the forward pass twice.
POLICIES = ("none", "minimal", "full")


def fewest_microbatches(work: Workload, memory: StateMemory, limit: float) -> Workload | None:
  """Returns the step in as few microbatches as fit into `limit` bytes; None if it does not fit."""
  options = (work.replace(microbatches=number) for number in possible_microbatches(work))
  return next((each for each in options if sum(memory.step(each).values()) <= limit), None)


def possible_microbatches(work: Workload) -> Iterator[int]:
  """Returns the divisors of the examples of a device that are at least the number of microbatches.

  Numbers that leave a pipeline too few examples for its settings are excluded.
  """
  numbers = range(work.microbatches, int(work.examples) + 1)
  divisors = (number for number in numbers if work.examples % number == 0)
  return (number for number in divisors if _has_schedule(work.replace(microbatches=number)))


def _has_schedule(work: Workload) -> bool:
  """Returns whether the batch can be divided into the microbatches of the pipeline."""
  try:
    return work.schedule.stages > 0
  except ValueError:
    return False
