"""T5X's functions that flatten parameter dicts and override logical axes by name pattern."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flax import traverse_util
from flax.core import FrozenDict, freeze, unfreeze
from flax.linen.partitioning import AxisMetadata


def flatten_dict_string_keys(x: Mapping[str, Any]) -> dict[str, Any]:
  """Returns {"outer/inner": leaf} for a nested dict."""
  return traverse_util.flatten_dict(unfreeze(dict(x)), sep="/")


def override_params_axes_names(
  model_variables: Mapping[str, Any],
  params_axes_names_override: Sequence[tuple[str, tuple[str, ...]]] = (),
) -> Mapping[str, Any]:
  """Returns a module's variables, frozen if they were, with other logical axis names for some parameters.

  Args:
    model_variables: the result of `module.init`, with `params` and `params_axes`.
    params_axes_names_override: (pattern, axis names) pairs; the first pattern that matches a
      parameter's whole name, such as "encoder/layers_.*/mlp/wi/kernel", applies.

  Raises:
    ValueError: the variables have no `params_axes`, or the number of names is not the parameter's
      rank.
  """
  variables = unfreeze(dict(model_variables))
  if "params_axes" not in variables:
    raise ValueError(
      "Model variables do not contain a 'params_axes' collection to apply an override to."
    )
  axes = flatten_dict_string_keys(variables["params_axes"])
  for name, param in flatten_dict_string_keys(variables["params"]).items():
    rules = [rule for rule in params_axes_names_override if re.fullmatch(rule[0], name)]
    if not rules:
      continue
    names = tuple(rules[0][1])
    if len(names) != len(param.shape):
      raise ValueError(
        f"Provided axis name override for {name} does not match param rank ({len(param.shape)}): "
        f"{names}"
      )
    axes[f"{name}_axes"] = AxisMetadata(names=names)
  variables["params_axes"] = traverse_util.unflatten_dict(axes, sep="/")
  return freeze(variables) if isinstance(model_variables, FrozenDict) else variables
