"""The rules that map logical axes of parameters and activations to mesh axes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rosetta_t5.parallel.mesh import (
  BATCH_AXES,
  CONTEXT_AXIS,
  DATA_AXIS,
  EXPERT_AXIS,
  FSDP_AXIS,
  MODEL_AXIS,
  PIPELINE_AXIS,
)

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

# (activation dims, parameter dims) → rules of `embed`, in the order in which they are tried.
_EMBED_RULES: dict[tuple[int, int], LogicalAxisRules] = {
  (1, 1): (("embed", None),),
  (2, 1): (("embed", "model"),),
  (1, 2): (("embed", "data"),),
  (2, 2): (("embed", "model"), ("embed", "data")),
}

_REPLICATED_AXES = (
  "relpos_buckets",
  "abspos_buckets",
  "length",
  "layers",
  "stack",
  "mlp_activations",
)


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
  if dims not in _EMBED_RULES:
    raise ValueError(
      "standard_logical_axis_rules: activation_partitioning_dims and parameter_partitioning_dims must "
      f"be 1 or 2, got {dims[0]} and {dims[1]}"
    )
  replicated: LogicalAxisRules = [(name, None) for name in _REPLICATED_AXES]
  return [*_COMMON_RULES, *_EMBED_RULES[dims], *replicated, *(additional_rules or ())]


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
  given = [(name, axis) for name, axis in rules]
  extended = _with_split_parameters(_with_batch_axes(given, mesh_axes), mesh_axes)
  # The rules of experts come first, so that the groups of an activation take `fsdp` before `embed` can.
  names = {name for name, _ in given}
  of_experts = [rule for rule in _expert_rules(mesh_axes) if rule[0] not in names]
  return tuple(_with_split_positions([*of_experts, *extended], mesh_axes, sequence_parallel))


def _batch_axes(mesh_axes: Collection[str]) -> tuple[str, ...]:
  return tuple(axis for axis in BATCH_AXES if axis in mesh_axes)


def _with_batch_axes(rules: list[AxisRule], mesh_axes: Collection[str]) -> list[AxisRule]:
  """In an activation, the batch takes the mesh axes before `embed` can; a parameter has no batch."""
  axes = _batch_axes(mesh_axes)
  if axes in ((), (DATA_AXIS,)):
    return rules
  return [("batch", axes) if rule == ("batch", DATA_AXIS) else rule for rule in rules]


def _with_split_parameters(rules: list[AxisRule], mesh_axes: Collection[str]) -> list[AxisRule]:
  if FSDP_AXIS in mesh_axes:
    names = [name for name, _ in rules]
    first = names.index("embed") if "embed" in names else len(names)
    over_context = CONTEXT_AXIS in mesh_axes
    embed: AxisRule = ("embed", (FSDP_AXIS, CONTEXT_AXIS) if over_context else FSDP_AXIS)
    rules = [*rules[:first], embed, *rules[first:]]
  if PIPELINE_AXIS not in mesh_axes:
    return rules
  return [(name, PIPELINE_AXIS if name == "layers" else axis) for name, axis in rules]


def _expert_rules(mesh_axes: Collection[str]) -> list[AxisRule]:
  replicas = tuple(axis for axis in _batch_axes(mesh_axes) if axis != EXPERT_AXIS)
  return [
    ("expert", EXPERT_AXIS if EXPERT_AXIS in mesh_axes else None),
    ("expert_replicas", replicas or DATA_AXIS),
    ("expert_mlp", MODEL_AXIS),
    ("unmodeled", None),
  ]


def _with_split_positions(
  rules: list[AxisRule], mesh_axes: Collection[str], sequence_parallel: bool
) -> list[AxisRule]:
  """The rules of `length` come last, so that heads, mlp and vocab take the axis `model` first."""
  if CONTEXT_AXIS in mesh_axes:
    both: list[AxisRule] = [("length", (CONTEXT_AXIS, MODEL_AXIS))] if sequence_parallel else []
    lengths = [*both, ("length", CONTEXT_AXIS)]
  elif sequence_parallel:
    lengths = [("length", MODEL_AXIS)]
  else:
    return rules
  return [*(rule for rule in rules if rule != ("length", None)), *lengths]
