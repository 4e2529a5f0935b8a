"""Functions of T5X that copies of its scripts train.py and infer.py call; ours do not need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental.multihost_utils import sync_global_devices

__all__ = ["sync_global_devices"]

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

  def is_leaf(value: Any) -> bool:
    return isinstance(value, (list, np.ndarray))

  return in_order([output for _, output in pairs]), jax.tree.map(in_order, aux, is_leaf=is_leaf)


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
