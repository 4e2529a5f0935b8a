"""Logical axes: the rules that map them to mesh axes, and what follows from these.

These are the PartitionSpecs of a train state, checked against the shapes of its arrays, and the shardings of
activations inside a program.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from flax.linen import partitioning as flax_partitioning
from jax.sharding import PartitionSpec

from rosetta_t5.parallel import mesh

AxisRule = tuple[str, str | tuple[str, ...] | None]
LogicalAxisRules = Sequence[AxisRule]

# These rules are the same for all dimensions; only the axis `embed` differs.
_COMMON_RULES: LogicalAxisRules = (
  ("batch", "data"),
  ("vocab", "model"),
  ("mlp", "model"),
  ("heads", "model"),
  ("kv", None),
  ("joined_kv", "model"),
)

_REPLICATED_AXES = (
  "relpos_buckets abspos_buckets length layers stack mlp_activations prompt prompt_embed"
)

# The setting of `PjitPartitioner` that determines the size of a mesh axis, if it is not `mesh`.
_SETTINGS: dict[tuple[str, ...], str] = {
  (mesh.MODEL_AXIS,): "num_partitions (or mesh's 'tensor')",
  (mesh.PIPELINE_AXIS,): "mesh's 'pipeline'",
  (mesh.EXPERT_AXIS,): "mesh's 'expert' (NUM_EXPERT_PARTITIONS in T5X's runs)",
}


def standard_logical_axis_rules(
  activation_partitioning_dims: int = 1,
  parameter_partitioning_dims: int = 1,
  additional_rules: LogicalAxisRules | None = None,
) -> list[AxisRule]:
  """Returns T5X's rules for 1- or 2-dimensional partitioning of activations and parameters.

  Args:
    activation_partitioning_dims: 1 splits activations over the batch, 2 also over `embed`.
    parameter_partitioning_dims: 1 splits parameters over `model`, 2 also over `data` (also known as
      ZeRO-3 or fully sharded data parallelism).
    additional_rules: further (logical axis, mesh axis) pairs, which are tried after the standard ones.

  Raises:
    ValueError: a number of dimensions is neither 1 nor 2.
  """
  dims = (activation_partitioning_dims, parameter_partitioning_dims)
  if not {*dims} <= {1, 2}:
    raise ValueError(
      "standard_logical_axis_rules: activation_partitioning_dims and parameter_partitioning_dims must "
      f"be 1 or 2, got {dims[0]} and {dims[1]}"
    )
  pairs = zip((mesh.MODEL_AXIS, mesh.DATA_AXIS), dims, strict=True)
  embed_axes = [axis for axis, n in pairs if n == 2]
  embed: LogicalAxisRules = [("embed", axis) for axis in embed_axes] or [("embed", None)]
  replicated: LogicalAxisRules = [(name, None) for name in _REPLICATED_AXES.split()]
  return [*_COMMON_RULES, *embed, *replicated, *(additional_rules or ())]


def extend_axis_rules(
  rules: LogicalAxisRules, mesh_axes: Collection[str], sequence_parallel: bool
) -> tuple[AxisRule, ...]:
  """Returns the rules with those of pipelines, experts, FSDP, context and sequence parallelism added.

  Args:
    rules: (logical axis, mesh axis) pairs.
    mesh_axes: the axes of the mesh. `pipeline`, `expert` and `fsdp` split the batch in addition to
      `data`; `pipeline` also splits the stacked layers, `expert` the experts, and `fsdp` all parameters.
      `context` splits positions, and the parameters together with `fsdp`.
    sequence_parallel: whether positions are split over `model` in activations that have no other axis
      split over it.
  """

  def present(*axes: str) -> str | tuple[str, ...] | None:
    found = tuple(axis for axis in axes if axis in (*mesh_axes, mesh.MODEL_AXIS))
    return found if len(found) > 1 else next(iter(found), None)

  # In an activation, the batch takes the mesh axes before `embed` can; a parameter has no batch.
  replaced: dict[AxisRule, Any] = {
    ("batch", mesh.DATA_AXIS): present(*mesh.BATCH_AXES),
    ("layers", None): present(mesh.PIPELINE_AXIS),
  }
  extended: list[AxisRule] = [(name, replaced.get((name, axis), axis)) for name, axis in rules]
  names = [name for name, _ in rules]
  if mesh.FSDP_AXIS in mesh_axes:
    first = names.index("embed") if "embed" in names else len(names)
    extended.insert(first, ("embed", present(mesh.FSDP_AXIS, mesh.CONTEXT_AXIS)))
  # The rules of `length` come last, so that heads, mlp and vocab take the axis `model` first.
  lengths: list[AxisRule] = [("length", present(mesh.CONTEXT_AXIS))]
  if sequence_parallel:
    lengths.insert(0, ("length", present(mesh.CONTEXT_AXIS, mesh.MODEL_AXIS)))
  extended = [*(rule for rule in extended if rule != ("length", None)), *lengths]
  # The rules of experts come first, so that the groups of an activation take `fsdp` before `embed` can.
  experts: tuple[AxisRule, ...] = (
    ("expert", present(mesh.EXPERT_AXIS)),
    ("expert_replicas", present(*(axis for axis in mesh.BATCH_AXES if axis != mesh.EXPERT_AXIS))),
    ("expert_mlp", mesh.MODEL_AXIS),
    ("unmodeled", None),
  )
  return (*(rule for rule in experts if rule[0] not in names), *extended)


def to_partition_spec(rules: LogicalAxisRules, axes: PartitionSpec | None) -> PartitionSpec:
  """Returns the PartitionSpec of an array with these logical axes."""
  if axes is None:
    return PartitionSpec()
  known = {name for name, _ in rules}
  if unknown := [axis for axis in axes if axis is not None and axis not in known]:
    raise ValueError(
      f"logical axis {unknown[0]!r} has no rule: add ({unknown[0]!r}, None) or "
      f"({unknown[0]!r}, 'model') to PjitPartitioner.logical_axis_rules. Axes with a rule: "
      f"{', '.join(sorted(known))}"
    )
  return flax_partitioning.logical_to_mesh_axes(tuple(axes), rules) or PartitionSpec()


def partition_specs_of(
  partitioner: Any, train_state: Any, axis_sizes: Mapping[str, int] | None = None
) -> Any:
  """Returns the train state with a valid PartitionSpec in place of each array.

  Args:
    partitioner: a `BasePartitioner`.
    train_state: the state, or its shapes.
    axis_sizes: the size of each mesh axis; None for those of the partitioner's mesh.

  Raises:
    ValueError: an array cannot be split like this.
  """
  specs = complete_specs(partitioner, train_state)
  check_partition_specs(train_state, specs, axis_sizes or partitioner.mesh.shape)
  return specs


def complete_specs(partitioner: Any, train_state: Any) -> Any:
  """Returns the train state with a PartitionSpec in place of each array.

  A partitioner may return None for a replicated array or for parts without arrays, as T5X's did.
  """
  given = dict(jax.tree.leaves_with_path(partitioner.get_mesh_axes(train_state)))
  return jax.tree_util.tree_map_with_path(
    lambda path, _: given.get(path) or PartitionSpec(), train_state
  )


def check_partition_specs(train_state: Any, specs: Any, axis_sizes: Mapping[str, int]) -> None:
  """Raises ValueError unless the mesh axes divide every dimension that is split over them.

  It also raises if the mesh has a pipeline and no array has the layers that its stages would share.

  Args:
    train_state: the shapes of the state.
    specs: the same tree with a PartitionSpec for each array.
    axis_sizes: the size of each mesh axis.
  """

  def check(path: Any, array: Any, spec: PartitionSpec) -> None:
    for size, axes in zip(array.shape, spec, strict=False):
      parts = count_parts(axes, axis_sizes)
      if size % parts:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        divisors = ", ".join(str(n) for n in range(1, min(size, 4096) + 1) if size % n == 0)
        setting = _SETTINGS.get(mesh.axis_names(axes), "mesh")
        raise ValueError(
          f"{name} of shape {tuple(array.shape)} cannot be split over {' and '.join(mesh.axis_names(axes))} "
          f"into {parts} parts, because {size} is not a multiple of {parts}. Set "
          f"partitioning.PjitPartitioner.{setting} so that the number of parts is one of {divisors}."
        )

  jax.tree_util.tree_map_with_path(check, train_state, specs)
  stages = axis_sizes.get(mesh.PIPELINE_AXIS)
  all_specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
  is_split = any(mesh.PIPELINE_AXIS in mesh.axis_names(axes) for spec in all_specs for axes in spec)
  if isinstance(stages, int) and stages > 1 and not is_split:
    raise ValueError(
      f"partitioning.PjitPartitioner.mesh has a pipeline of {stages} stages, but the layers are not "
      "stacked: set network.TransformerConfig.scan_layers = True, or for T5 import "
      "t5x.examples.scalable_t5.network in place of t5x.examples.t5.network, or set 'pipeline' to 1"
    )


def count_parts(axes: Any, axis_sizes: Mapping[str, int]) -> int:
  """Returns into how many parts a dimension is split over `axes`, an element of a PartitionSpec."""
  return math.prod(axis_sizes[name] for name in mesh.axis_names(axes))
