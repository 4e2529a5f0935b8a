"""T5X's `contrib.moe.partitioning`: the partitioner and axis rules of experts."""

import dataclasses
from collections.abc import Callable

from rosetta_t5.argument_types import Positive
from rosetta_t5.parallel import PjitPartitioner, axis_rules
from rosetta_t5.parallel.axis_rules import AxisRule, LogicalAxisRules
from rosetta_t5.parallel.mesh import DATA_AXIS, EXPERT_AXIS


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
    activation_partitioning_dims, parameter_partitioning_dims, additional_rules
  )
  return [*axis_rules.extend_axis_rules(rules, (DATA_AXIS, EXPERT_AXIS), sequence_parallel=False)]


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
    partitions = num_partitions or (None if model_parallel_submesh else 1)
    rules = standard_logical_axis_rules() if logical_axis_rules is None else logical_axis_rules
    super().__init__(partitions, model_parallel_submesh, logical_axis_rules=rules)
    self.mesh_config = dataclasses.replace(self.mesh_config, max_experts=num_expert_partitions)
