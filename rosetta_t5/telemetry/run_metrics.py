"""Metrics of a run that its steps do not measure, such as FLOPs, and the error for numbers that are not finite."""

import math
import os
import resource
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rosetta_t5.telemetry.gpus import gpu_of

PyTree = Any

SAMPLES = "data/consumed_samples"
UTILIZATION = "timing/model_flops_utilization"
GRADIENT_NORM = "weight_gradient_norm"
WEIGHT_NORM = "weight_norm"
SKIPPED_STEPS = "skipped_steps"
FEED_WAIT = "timing/feed_wait_seconds"  # the mean wait for a batch; measured by the loop
DEVICE_MEMORY = "memory/device_peak_gib"
HOST_MEMORY = "memory/host_peak_gib"
SEQUENCES_PER_SECOND = "timing/seqs_per_second"  # measured by the steps
_BYTES_PER_RSS = 1 if sys.platform == "darwin" else 1024  # the unit of ru_maxrss


class RunMetrics:
  """Computes metrics outside the step, once per report, so that the step is no slower."""

  def __init__(
    self, flops: float | None, batch: Mapping[str, Any], mesh: jax.sharding.Mesh, first_step: int
  ):
    """Builds the metrics of one run.

    Args:
      flops: the FLOPs of a training sequence; None if they are unknown.
      batch: the arrays or shapes of a batch, by feature.
      mesh: the mesh of the run's devices.
      first_step: the step at which the run began, which is not 0 if it finetunes a checkpoint.
    """
    self._batch_size = int(next(iter(batch.values())).shape[0])
    self._flops = flops
    self._peak = peak_flops(mesh.devices.flat)
    self._first_step = first_step
    self._norm = jax.jit(lambda params: optax.tree.norm(optax.tree.cast(params, jnp.float32)))

  def __call__(self, step: int, values: Mapping[str, float], train_state: Any) -> dict[str, float]:
    """Returns the metrics by name.

    Args:
      step: the number of completed steps.
      values: the metrics that the last steps measured.
      train_state: the state after them.
    """
    metrics = {
      SAMPLES: float((step - self._first_step) * self._batch_size),
      WEIGHT_NORM: float(self._norm(train_state.params)),
      **peak_memory(),
    }
    speed = values.get(SEQUENCES_PER_SECOND)
    if self._flops and self._peak and speed:
      metrics[UTILIZATION] = self._flops * speed / self._peak
    if (skipped := skipped_steps(train_state.param_states)) is not None:
      metrics[SKIPPED_STEPS] = float(skipped)
    return metrics


def peak_memory() -> dict[str, float]:
  """Returns the peaks since the start in GiB: of this process, and of its fullest device if known."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_PER_RSS
  statistics = [device.memory_stats() or {} for device in jax.local_devices()]
  in_use = [one["peak_bytes_in_use"] for one in statistics if "peak_bytes_in_use" in one]
  return {HOST_MEMORY: peak / 2**30} | ({DEVICE_MEMORY: max(in_use) / 2**30} if in_use else {})


def skipped_steps(param_states: PyTree) -> int | None:
  """Returns how many steps the optimizer has skipped; None if it skips none.

  `optax.apply_if_finite` and `SpikeGuard` count them.
  """
  return max(_skip_counts(param_states, "total_notfinite"), default=None)


def skips_in_a_row(param_states: PyTree) -> int:
  """Returns how many steps the optimizer has skipped since the last one that it did not skip."""
  return max(_skip_counts(param_states, "notfinite_count"), default=0)


def _skip_counts(param_states: PyTree, name: str) -> list[int]:
  return [int(n) for _, n in optax.tree_utils.tree_get_all_with_path(param_states, name)]


def with_skipped_steps(param_states: PyTree, counted: PyTree) -> PyTree:
  """Returns an optimizer's state with the number of skipped steps that another one has counted."""
  name = jax.tree_util.GetAttrKey("total_notfinite")
  return jax.tree_util.tree_map_with_path(
    lambda path, own, other: other if name in path else own, param_states, counted
  )


class NonFiniteError(ArithmeticError):
  """A loss, gradient or metric is NaN or infinite; the run stops before it saves a bad checkpoint.

  Attributes:
    step: the step in which it was found.
    first_bad: "loss", the first parameter whose gradient was not finite, or a metric.
  """

  def __init__(self, step: int, first_bad: str, last_good: Any = None):
    """Builds the error.

    Args:
      step: the step in which it was found.
      first_bad: "loss", or "gradients " and the name of a parameter, or "metric " and its name.
      last_good: the path of the last checkpoint before it; None if there is none.
    """
    self.step = step
    self.first_bad = first_bad
    checkpoint = (
      f"The last good checkpoint is {os.fspath(last_good)}; a run with other settings in the same "
      "MODEL_DIR continues from there"
      if last_good
      else "There is no checkpoint from before it"
    )
    super().__init__(
      f"training is not finite (NaN or infinity) at step {step}: first in {first_bad}. "
      f"{checkpoint}. To try: a lower learning rate or more warm-up steps; clip the gradients "
      "(optax.clip_by_global_norm in optimizers.chain); network.T5Config.dtype = 'float32' if it "
      "is bfloat16; z_loss = 0.0001."
    )


def raise_if_nonfinite(
  record: Any, params: PyTree, manager: Any, metrics: Mapping[str, float], step: int
) -> None:
  """Raises NonFiniteError if a step of `record` was not finite, or if a metric is not.

  It does not raise if `optax.apply_if_finite` has skipped all such steps, so that the parameters are
  still finite.

  Args:
    record: the `training.step.FirstNonFinite` of the last steps; None if there is none.
    params: the trained parameters, which give the names.
    manager: the checkpoint manager, whose pending save is awaited; None if there is none.
    metrics: the values that the last steps measured, and the `RunMetrics` after them.
    step: the number of completed steps.
  """
  first_bad = None if record is None else first_bad_name(record.bad, params)
  if first_bad is not None:
    step = int(record.step) + 1
  else:  # Durations and speeds may be infinite.
    measured = (name for name in metrics if not name.startswith("timing/"))
    bad = (f"metric {name}" for name in measured if not math.isfinite(metrics[name]))
    first_bad = next(bad, None)
  were_skipped = SKIPPED_STEPS in metrics and math.isfinite(metrics[WEIGHT_NORM])
  if first_bad is None or were_skipped:
    return
  last_good = None
  if manager is not None:
    manager.wait_until_finished()
    steps = [saved for saved in manager.all_steps() if saved < step]
    last_good = manager.directory / f"checkpoint_{steps[-1]}" if steps else None
  raise NonFiniteError(step, first_bad, last_good)


def first_bad_name(bad: Any, params: PyTree) -> str | None:
  """Returns "loss" or "gradients PARAMETER" for the first True in `bad`; None if all are False.

  Args:
    bad: [1 + number of parameters] booleans, for the loss and the gradient of each parameter.
    params: the parameters, which give the names.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params)
  names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
  names = ["loss", *(f"gradients {name}" for name in names)]
  return next((name for name, is_bad in zip(names, np.asarray(bad), strict=True) if is_bad), None)


def peak_flops(devices: Iterable[jax.Device]) -> float | None:
  """Returns the sum of the devices' peaks in FLOP/s; None if the peak of one is unknown."""
  gpus = [gpu_of(device.device_kind) for device in devices]
  return sum(gpu.bfloat16 for gpu in gpus if gpu) if all(gpus) else None
