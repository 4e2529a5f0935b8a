"""Rules for the dimensions over which Adafactor averages the second moment of a parameter.

The second moment of a matrix is stored as one value per row and one per column. For parameters of
higher rank or stacked over layers, rules by logical axis name define which dimensions are rows,
columns, or a stack of independent parameters (as in T5X).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from rosetta_t5.argument_types import near_hint
from rosetta_t5.training.optimizers.optimizer_def import axes_by_path, path_name

PyTree = Any


class FactorDim(enum.Enum):
  """The role of one dimension of a parameter in its factored second moment."""

  NONE = None  # a dimension of a parameter that is not factored
  BATCH = 1  # a stack of parameters, over which nothing is averaged
  ROW = 2
  COLUMN = 3


class HeuristicRule(enum.Enum):
  """The rule to factor the two largest dimensions if both are large enough."""

  token = 1


HEURISTIC_RULE = HeuristicRule.token
FactorRule = HeuristicRule | tuple[FactorDim, ...] | None

_SYNONYMS = {"col": FactorDim.COLUMN, "unfactorized": FactorDim.NONE}
_DIM_NAMES = {role.name.lower(): role for role in FactorDim} | _SYNONYMS


def standard_logical_factor_rules() -> dict[str, FactorDim]:
  """Returns the role of each logical axis of T5's parameters (T5X's rules)."""
  columns = (
    "vocab mlp heads kv joined_kv q_wi_fused o_wo_fused multiquery_heads kv_fused mlp_activations"
  )
  return {
    "embed": FactorDim.ROW,
    **dict.fromkeys(columns.split(), FactorDim.COLUMN),
    "relpos_buckets": FactorDim.NONE,
    "abspos_buckets": FactorDim.COLUMN,  # learned positions of a decoder; not in T5X
    "layer_norm_scale": FactorDim.NONE,
    "expert": FactorDim.BATCH,  # this axis and the next two are not in T5X's standard rules
    "expert_mlp": FactorDim.COLUMN,
    "unmodeled": FactorDim.NONE,
    "layers": FactorDim.BATCH,  # layers stacked by nn.scan
    "stack": FactorDim.BATCH,  # parameters stacked by the user
    "prompt": FactorDim.NONE,  # this axis and the next are those of T5X's prompt tuning
    "prompt_embed": FactorDim.NONE,
  }


def factor_name_to_factordim(name: str | FactorDim | None) -> FactorDim:
  """Returns the role called `name` ('row', 'column', 'batch', 'none'); roles are returned unchanged.

  Raises:
    ValueError: no role has this name.
  """
  if isinstance(name, FactorDim):
    return name
  if str(name).lower() not in _DIM_NAMES:
    raise ValueError(f"unknown factor role {name!r}: it must be one of {', '.join(_DIM_NAMES)}")
  return _DIM_NAMES[str(name).lower()]


class HParamMap:
  """Hyperparameters by parameter path: the first regular expression found in the path applies.

  Args:
    rules: pairs of a regular expression and the value for the paths ("encoder/mlp/wi/kernel") in
      which it is found.
  """

  def __init__(self, rules: Iterable[tuple[str, Any]]):
    self._rules = [(re.compile(pattern), value) for pattern, value in rules]

  def __getitem__(self, path: str) -> Any:
    for pattern, value in self._rules:
      if pattern.search(path):
        return value
    raise KeyError(f"no rule of the HParamMap matches parameter {path!r}: add a final rule '.*'")

  def __call__(self, params: PyTree) -> PyTree:
    """Returns a tree like `params` with the value for each leaf."""
    return jax.tree_util.tree_map_with_path(lambda path, _: self[path_name(path)], params)


class FactorDims(NamedTuple):
  """The dimensions of one parameter by role.

  Attributes:
    averaged: the dimensions over which scale and clipping are averaged: all except BATCH.
    row: the dimensions that `v_row` keeps and `v_col` averages over; empty if not factored.
    col: the dimensions that `v_col` keeps and `v_row` averages over; empty if not factored.
  """

  averaged: tuple[int, ...]
  row: tuple[int, ...] = ()
  col: tuple[int, ...] = ()

  @property
  def factored(self) -> bool:
    """Whether the second moment is stored as rows and columns."""
    return bool(self.row)


def rules_from_axes(
  param_logical_axes: PyTree, axis_roles: Mapping[str, FactorDim | str]
) -> dict[str, FactorRule]:
  """Returns the rules of all parameters by path, derived from their logical axes.

  Args:
    param_logical_axes: a tree like the parameters' with a PartitionSpec of axis names at each leaf.
    axis_roles: the role of each axis name (see `standard_logical_factor_rules`).

  Raises:
    ValueError: an axis has no role, or a parameter has a row, a column and an axis with role none.
  """
  named = axes_by_path(param_logical_axes)
  return {path: _rule_from_names(path, names or (), axis_roles) for path, names in named.items()}


def resolve(rule: FactorRule, shape: Sequence[int], path: str, min_dim_size: int) -> FactorDims:
  """Returns the dimensions by role for a parameter of this shape.

  As in T5X, the heuristic rule always applies to rank ≤ 2 without a BATCH dimension.

  Args:
    rule: one role per dimension, HEURISTIC_RULE, or None for a parameter that is not factored.
    shape: the parameter's shape.
    path: the parameter's name, for errors.
    min_dim_size: the minimum size of the dimensions that the heuristic rule factors.

  Raises:
    ValueError: the rule does not fit the shape, or the heuristic rule is used for rank > 2.
  """
  if rule is None:
    return FactorDims(averaged=tuple(range(len(shape))))
  if isinstance(rule, HeuristicRule):
    return _by_size(shape, path, min_dim_size)
  roles = tuple(factor_name_to_factordim(role) for role in rule)
  if len(roles) != len(shape):
    raise ValueError(
      f"the factorization rule {rule} has {len(roles)} dimensions, but parameter {path!r} has shape "
      f"{tuple(shape)}"
    )
  if len(shape) <= 2 and FactorDim.BATCH not in roles:
    return _by_size(shape, path, min_dim_size)

  def with_role(*wanted: FactorDim) -> tuple[int, ...]:
    return tuple(dim for dim, role in enumerate(roles) if role in wanted)

  row, col = with_role(FactorDim.ROW), with_role(FactorDim.COLUMN)
  averaged = with_role(FactorDim.NONE, FactorDim.ROW, FactorDim.COLUMN)
  return FactorDims(averaged, row, col) if row and col else FactorDims(averaged)


def _by_size(shape: Sequence[int], path: str, min_dim_size: int) -> FactorDims:
  """Returns the two largest dimensions as row and col; they are not factored if one is too small."""
  if len(shape) > 2:
    raise ValueError(
      f"Adafactor needs a factorization rule for parameter {path!r} of shape {tuple(shape)}: the "
      "heuristic by size is for rank 1 and 2. Set Adafactor.logical_factor_rules = "
      "@adafactor.standard_logical_factor_rules(), or add the parameter to Adafactor.factor_map"
    )
  if len(shape) < 2 or min(shape) < min_dim_size:
    return FactorDims(averaged=tuple(range(len(shape))))
  row = int(shape[1] < shape[0])
  return FactorDims((0, 1), (row,), (1 - row,))


def _rule_from_names(
  path: str, axes: Sequence[str | None], axis_roles: Mapping[str, FactorDim | str]
) -> FactorRule:
  for axis in axes:
    if axis is not None and axis not in axis_roles:
      raise ValueError(
        f"Adafactor.logical_factor_rules has no role for axis {axis!r} of parameter {path!r}"
        f"{near_hint(axis, axis_roles)}: add {axis!r}: 'row', 'column', 'batch' or 'none' to the rules"
      )
  roles = tuple(factor_name_to_factordim(axis and axis_roles[axis]) for axis in axes)
  if not {FactorDim.ROW, FactorDim.COLUMN} <= set(roles):
    # Without a row or without a column the parameter is not factored; only BATCH has an effect.
    return tuple(role if role is FactorDim.BATCH else FactorDim.NONE for role in roles)
  if FactorDim.NONE in roles:
    raise ValueError(
      f"parameter {path!r} with axes {tuple(axes)} has a row, a column and an axis with the role none: no "
      "axis of a factored parameter can have it. Change its role in Adafactor.logical_factor_rules"
    )
  return roles
