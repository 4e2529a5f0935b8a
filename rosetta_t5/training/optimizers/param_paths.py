"""Parameters and their logical axes by path; masks and learning rates for parameters by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import optax

from rosetta_t5.argument_types import NonNegativeNumber

PyTree = Any


def path_name(path: Sequence[Any]) -> str:
  """Formats a jax key path as 'encoder/mlp/wi/kernel'."""
  return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def axes_by_path(param_logical_axes: PyTree) -> dict[str, Any]:
  """Returns the axis names (a PartitionSpec, a tuple, or None) of each parameter by path."""
  leaves = jax.tree_util.tree_flatten_with_path(param_logical_axes, is_leaf=_is_axis_names)[0]
  return {path_name(path): names for path, names in leaves}


def axes_like(params: PyTree, param_logical_axes: PyTree) -> list[Any]:
  """Returns the axis names of each leaf of `params`, in order; None for a leaf without names."""
  by_path = axes_by_path(param_logical_axes)
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  return [by_path.get(path_name(path)) for path, _ in leaves]


def _is_axis_names(node: Any) -> bool:
  return node is None or isinstance(node, (tuple, jax.sharding.PartitionSpec))


def all_except(patterns: Iterable[str]) -> Callable[[PyTree], PyTree]:
  """Returns a mask for optax, such as `optax.adamw.mask`: True for parameters that no pattern matches.

  Args:
    patterns: regular expressions that match whole paths, such as `.*/(scale|bias)`.
  """
  compiled = _compile(patterns)

  def mask(params: PyTree) -> PyTree:
    return jax.tree.map(lambda index: index == len(compiled), _first_matches(params, compiled))

  return mask


def scale_by_name(factors: Mapping[str, NonNegativeNumber]) -> optax.GradientTransformation:
  """Returns a transformation that multiplies the updates of parameters by a factor.

  After an optimizer in `chain`, the factors are those of learning rates; 0 freezes a parameter.

  Args:
    factors: factors by regular expressions that match whole paths, such as
      {'encoder/layers_[0-5]/.*': 0.1}. The first match counts. Other parameters have the factor 1.
  """
  patterns, numbers = _compile(factors), [*factors.values(), 1.0]

  def update(updates: PyTree, params: PyTree | None = None) -> PyTree:
    del params
    indices = _first_matches(updates, patterns)
    return jax.tree.map(lambda value, index: value * numbers[index], updates, indices)

  return optax.stateless(update)


def _compile(patterns: Iterable[str]) -> list[re.Pattern[str]]:
  """Returns the regular expressions; raises ValueError for text that is not one."""
  compiled = []
  for pattern in patterns:
    try:
      compiled.append(re.compile(pattern))
    except re.error as error:
      raise ValueError(
        f"{pattern!r} is not a regular expression ({error}): any characters are '.*', not '*'"
      ) from error
  return compiled


def _first_matches(params: PyTree, patterns: list[re.Pattern[str]]) -> PyTree:
  """Returns a tree like `params` with the index of the first pattern that matches each whole path.

  The index is the number of patterns where none matches.

  Raises:
    ValueError: a pattern matches no parameter.
  """
  names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
  for pattern in patterns:
    if not any(map(pattern.fullmatch, names)):
      near = difflib.get_close_matches(pattern.pattern, names, n=1, cutoff=0) or names[:1]
      raise ValueError(
        f"the regular expression {pattern.pattern!r} matches no parameter: it must match the whole "
        f"path, such as {near[0]!r}"
      )

  def index_of(path: Any, _: Any) -> int:
    name = path_name(path)
    return next((i for i, one in enumerate(patterns) if one.fullmatch(name)), len(patterns))

  return jax.tree_util.tree_map_with_path(index_of, params)
