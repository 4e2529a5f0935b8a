"""T5X's `utils`: dataset and checkpoint configurations, schedules, the train-state initializer."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from flax.core import FrozenDict, freeze, unfreeze
from flax.linen.partitioning import AxisMetadata
from jax.experimental import multihost_utils
from jax.experimental.multihost_utils import sync_global_devices

from rosetta_t5.checkpoints import *
from rosetta_t5.checkpoints.saved_items import get_local_data
from rosetta_t5.checkpoints.train_state_initializer import restore
from rosetta_t5.config.command_line import run_main
from rosetta_t5.data import *
from rosetta_t5.inference.infer_fn import get_infer_fn
from rosetta_t5.telemetry.console import log_model_info
from rosetta_t5.training.schedules import create_learning_rate_scheduler
from t5x.checkpoints import LegacyCheckpointManager


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


# Outputs in the order of their examples, and auxiliary values by name.
Inferences = tuple[Sequence[Any], Mapping[str, Any]]


def multihost_assert_equal(input_tree: Any, fail_message: str = "") -> None:
  """Raises AssertionError unless all processes have the same values."""
  multihost_utils.assert_equal(input_tree, fail_message)


def set_hardware_rng_ops() -> None:
  """Sets jax's PRNG to the devices' own generator, which is faster but gives other numbers."""
  jax.config.update("jax_default_prng_impl", "unsafe_rbg")


def extract_tokens_and_aux_values(inference_fn_outputs: Any) -> Inferences:
  """Returns the outputs of an inference function in the order of their examples.

  Args:
    inference_fn_outputs: (index, output) pairs, or these pairs and auxiliary values, whose leaves are
      lists or arrays with one entry for each pair.
  """
  has_aux = isinstance(inference_fn_outputs, tuple)
  pairs, aux = inference_fn_outputs if has_aux else (inference_fn_outputs, {})
  order = np.argsort([index for index, _ in pairs])

  def in_order(values: Sequence[Any]) -> list[Any]:
    return [values[position] for position in order]

  aux = jax.tree.map(in_order, aux, is_leaf=lambda x: isinstance(x, list | np.ndarray))
  return in_order([output for _, output in pairs]), aux


def find_first_checkpoint_step(
  checkpoint_steps_index: int, checkpoint_steps: Sequence[int], first_step: int, host_step: int
) -> int:
  """Returns the index of the first of `checkpoint_steps` at or after the current step.

  Args:
    checkpoint_steps_index: the index at which the search starts.
    checkpoint_steps: the steps at which checkpoints are saved, in ascending order.
    first_step: the first step of the run, at which no checkpoint is due.
    host_step: the current step.
  """
  for index, step in list(enumerate(checkpoint_steps))[checkpoint_steps_index:]:
    if step >= host_step and step != first_step:
      return index
  return max(checkpoint_steps_index, len(checkpoint_steps) - 1)


def find_next_checkpoint_step(
  checkpoint_steps_index: int,
  inner_num_steps: int,
  is_checkpoint_step: bool,
  host_step: int,
  checkpoint_steps: Sequence[int],
  epoch_end_step: int,
  checkpoint_period: int | None,
  first_step: int,
) -> tuple[int, bool]:
  """Returns the number of steps until the next of `checkpoint_steps`, and whether one is so near.

  Args:
    checkpoint_steps_index: the index at which the search starts.
    inner_num_steps: the number of steps, which is returned if none is so near.
    is_checkpoint_step: what is returned in that case.
    host_step: the current step.
    checkpoint_steps: the steps at which checkpoints are saved, in ascending order.
    epoch_end_step: the last step of the epoch.
    checkpoint_period: steps at multiples of it after `first_step` do not count, because a checkpoint
      is saved there anyway; None for no period.
    first_step: the first step of the run.
  """
  for step in checkpoint_steps[checkpoint_steps_index:]:
    is_periodic = checkpoint_period and (step - first_step) % checkpoint_period == 0
    is_near = step <= host_step + inner_num_steps
    if is_near and max(first_step, host_step) < step <= epoch_end_step and not is_periodic:
      return step - host_step, True
  return inner_num_steps, is_checkpoint_step
