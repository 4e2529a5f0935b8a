"""Which logical axis of a parameter or activation is split over which axis of the mesh."""

from __future__ import annotations

from collections.abc import Sequence

LogicalAxisRules = Sequence[tuple[str, str | tuple[str, ...] | None]]

# The rules that hold whatever the dimensions; the axis `embed` is what they differ in.
_COMMON: LogicalAxisRules = (
  ("batch", "data"),
  ("vocab", "model"),
  ("mlp", "model"),
  ("heads", "model"),
  ("kv", None),
  ("joined_kv", "model"),
)

# (activation dims, parameter dims) → where `embed` goes, in the order tried.
_EMBED: dict[tuple[int, int], LogicalAxisRules] = {
  (1, 1): (("embed", None),),
  (2, 1): (("embed", "model"),),
  (1, 2): (("embed", "data"),),
  (2, 2): (("embed", "model"), ("embed", "data")),
}

_UNSPLIT: LogicalAxisRules = tuple(
  (name, None)
  for name in (
    "relpos_buckets",
    "abspos_buckets",
    "length",
    "layers",
    "stack",
    "mlp_activations",
  )
)


def standard_logical_axis_rules(
  activation_partitioning_dims: int = 1,
  parameter_partitioning_dims: int = 1,
  additional_rules: LogicalAxisRules | None = None,
) -> list[tuple[str, str | tuple[str, ...] | None]]:
  """Returns T5X's rules for 1- or 2-dimensional splits of activations and parameters.

  Args:
    activation_partitioning_dims: 1 splits activations over the batch, 2 also over `embed`.
    parameter_partitioning_dims: 1 splits parameters over `model`, 2 also over `data` (what others
      call ZeRO-3 or fully sharded data parallel).
    additional_rules: further (logical axis, mesh axis) pairs, tried after the standard ones.

  Raises:
    ValueError: a number of dimensions is neither 1 nor 2.
  """
  dims = (activation_partitioning_dims, parameter_partitioning_dims)
  if dims not in _EMBED:
    raise ValueError(
      "standard_logical_axis_rules takes activation_partitioning_dims and "
      f"parameter_partitioning_dims of 1 or 2, but was given {dims[0]} and {dims[1]}"
    )
  return [*_COMMON, *_EMBED[dims], *_UNSPLIT, *(additional_rules or ())]


def rules_for(
  rules: LogicalAxisRules, fsdp_axis: str | None, sequence_parallel: bool
) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
  """Returns the rules of a partitioner, made of those that it was given.

  Args:
    rules: (logical axis, mesh axis) pairs.
    fsdp_axis: a mesh axis that splits the batch beside `data`, and with it the parameters; or None.
    sequence_parallel: whether positions are split over `model` in activations that have nothing else
      to split over it.
  """
  made: list[tuple[str, str | tuple[str, ...] | None]] = [(name, axis) for name, axis in rules]
  if fsdp_axis:
    # An activation's batch has taken the axis before `embed` can; a parameter has no batch.
    over = ("data", fsdp_axis)
    made = [(n, over) if (n, axis) == ("batch", "data") else (n, axis) for n, axis in made]
    first = next((at for at, (name, _) in enumerate(made) if name == "embed"), len(made))
    made.insert(first, ("embed", fsdp_axis))
  if sequence_parallel:
    # Last, so that heads, mlp and vocab come first.
    made = [*(rule for rule in made if rule != ("length", None)), ("length", "model")]
  return tuple(made)
