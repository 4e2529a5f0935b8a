"""T5X's `contrib.moe.partitioning`: the partitioner, mesh and axis rules of experts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from rosetta_t5.argument_types import Positive
from rosetta_t5.parallel import PjitPartitioner, axis_rules
from rosetta_t5.parallel.axis_rules import AxisRule, LogicalAxisRules
from rosetta_t5.parallel.mesh import DATA_AXIS, EXPERT_AXIS, Shape, mesh_config

_BATCH = (EXPERT_AXIS, DATA_AXIS)


def default_moe_mesh(
  num_expert_partitions: int,
  num_partitions: int | None = None,
  model_parallel_submesh: Shape | None = None,
  backend: str | None = None,
) -> Mesh:
  """Returns T5X's mesh of all devices, whose axis `data` is factored into `data` and `expert`.

  Args:
    num_expert_partitions: the size of `expert` is the largest divisor that is at most this.
    num_partitions: the size of `model`; None for 1.
    model_parallel_submesh: T5X's TPU submesh; the product of its sizes is the size of `model`.
    backend: the backend whose devices are used; None for the default one.
  """
  config = mesh_config(num_partitions or 1, model_parallel_submesh)
  return dataclasses.replace(config, max_experts=num_expert_partitions).build(jax.devices(backend))


def get_cpu_mesh() -> Mesh:
  """Returns a mesh of all devices along `data`."""
  return default_moe_mesh(1)


def get_gpu_mesh() -> Mesh:
  """Returns a mesh whose axis `expert` has the devices of a process."""
  return default_moe_mesh(jax.local_device_count())


def compute_num_model_partitions(
  num_model_partitions: int | None, model_parallel_submesh: Shape | None
) -> int:
  """Returns the size of the axis `model` that T5X's two settings define.

  Raises:
    ValueError: neither is given, or they contradict each other.
  """
  submesh = math.prod(model_parallel_submesh) if model_parallel_submesh else None
  sizes = {num_model_partitions, submesh} - {None}
  if len(sizes) != 1:
    raise ValueError(
      "set num_model_partitions, or model_parallel_submesh, or both with the same product, got "
      f"{num_model_partitions} and {model_parallel_submesh}"
    )
  return next(size for size in sizes if size is not None)


def standard_logical_axis_rules(
  activation_partitioning_dims: int = 2,
  parameter_partitioning_dims: int = 1,
  additional_rules: LogicalAxisRules | None = None,
) -> list[AxisRule]:
  """Returns T5X's rules for experts: the batch is split over `expert` and `data`.

  Args:
    activation_partitioning_dims: see `axis_rules.standard_logical_axis_rules`.
    parameter_partitioning_dims: see `axis_rules.standard_logical_axis_rules`.
    additional_rules: further pairs, which are tried after the standard ones.
  """
  rules = axis_rules.standard_logical_axis_rules(
    activation_partitioning_dims, parameter_partitioning_dims
  )
  rules += [
    ("expert", EXPERT_AXIS),
    ("expert_mlp", "model"),
    ("expert_replicas", DATA_AXIS),
    ("unmodeled", None),
    *(additional_rules or ()),
  ]
  return [("batch", _BATCH) if name == "batch" else (name, axis) for name, axis in rules]


def override_partition_specs(resources: Any) -> Any:
  """Returns PartitionSpecs in which ("data",) has become (("expert", "data"),)."""
  if isinstance(resources, PartitionSpec):
    return PartitionSpec(_BATCH) if resources == PartitionSpec(DATA_AXIS) else resources
  if isinstance(resources, Sequence):
    return tuple(
      override_partition_specs(each) if isinstance(each, PartitionSpec) else each
      for each in resources
    )
  return resources


class MoePjitPartitioner(PjitPartitioner):
  """T5X's partitioner for experts.

  Experts and their optimizer state are split over `expert`, and the batch over `expert` and `data`.
  """

  def __init__(
    self,
    num_expert_partitions: Positive,
    num_partitions: Positive | None = None,
    model_parallel_submesh: tuple[Positive, ...] | None = None,
    params_on_devices: bool = True,
    logical_axis_rules: LogicalAxisRules | None = None,
    state_filter_fn: Callable[[str], bool] | None = None,
  ):
    """Builds a partitioner.

    Args:
      num_expert_partitions: the size of `expert` is the largest divisor of T5X's axis `data` that is at
        most this.
      num_partitions: the devices that share one copy of the model; None for 1.
      model_parallel_submesh: T5X's TPU submesh; only the product of its sizes is used.
      params_on_devices: exists for T5X's callers; parameters always stay on devices.
      logical_axis_rules: (logical axis, mesh axis) pairs; None for `standard_logical_axis_rules`.
      state_filter_fn: T5X's choice of optimizer state that is split over `expert`. It is not needed: all
        state of experts is.
    """
    del state_filter_fn
    if num_partitions is None and not model_parallel_submesh:
      num_partitions = 1
    rules = standard_logical_axis_rules() if logical_axis_rules is None else logical_axis_rules
    super().__init__(
      num_partitions, model_parallel_submesh, params_on_devices, logical_axis_rules=rules
    )
    self._mesh_config = dataclasses.replace(self._mesh_config, max_experts=num_expert_partitions)
