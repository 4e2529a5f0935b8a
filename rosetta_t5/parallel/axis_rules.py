"""The rules that map logical axes of parameters and activations to mesh axes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rosetta_t5.parallel.mesh_axes import (
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
  extended: list[AxisRule] = [(name, axis) for name, axis in rules]
  batch_axes = tuple(axis for axis in BATCH_AXES if axis in mesh_axes)
  if batch_axes not in ((), (DATA_AXIS,)):
    # In an activation, the batch takes the mesh axes before `embed` can; a parameter has no batch.
    batch: AxisRule = ("batch", batch_axes)
    extended = [batch if rule == ("batch", DATA_AXIS) else rule for rule in extended]
  names = [name for name, _ in extended]
  if FSDP_AXIS in mesh_axes:
    first = names.index("embed") if "embed" in names else len(names)
    over_context = CONTEXT_AXIS in mesh_axes
    extended.insert(first, ("embed", (FSDP_AXIS, CONTEXT_AXIS) if over_context else FSDP_AXIS))
  if PIPELINE_AXIS in mesh_axes:
    extended = [
      ("layers", PIPELINE_AXIS) if name == "layers" else (name, axis) for name, axis in extended
    ]
  replicas = tuple(axis for axis in batch_axes if axis != EXPERT_AXIS) or DATA_AXIS
  expert_rules: LogicalAxisRules = (
    ("expert", EXPERT_AXIS if EXPERT_AXIS in mesh_axes else None),
    ("expert_replicas", replicas),
    ("expert_mlp", "model"),
    ("unmodeled", None),
  )
  # They come first, so that the groups of an activation take `fsdp` before `embed` can.
  extended = [*(rule for rule in expert_rules if rule[0] not in names), *extended]
  if CONTEXT_AXIS not in mesh_axes and not sequence_parallel:
    return tuple(extended)
  # The rules of `length` come last, so that heads, mlp and vocab take the axis `model` first.
  extended = [rule for rule in extended if rule != ("length", None)]
  if CONTEXT_AXIS not in mesh_axes:
    return (*extended, ("length", MODEL_AXIS))
  both: LogicalAxisRules = [("length", (CONTEXT_AXIS, MODEL_AXIS))] if sequence_parallel else []
  return (*extended, *both, ("length", CONTEXT_AXIS))
