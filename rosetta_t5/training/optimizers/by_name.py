"""Parameters chosen by name: masks of weight decay, learning rates of layers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import optax

from rosetta_t5.argument_types import NonNegativeNumber
from rosetta_t5.training.optimizers.param_paths import path_name

PyTree = Any


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
