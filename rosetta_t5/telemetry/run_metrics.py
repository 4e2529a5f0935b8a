"""Metrics of a run that its steps do not measure, such as FLOPs, and the error for numbers that are not finite."""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

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
    self, model: Any, batch: Mapping[str, Any], mesh: jax.sharding.Mesh, first_step: int = 0
  ):
    """Builds the metrics of one run.

    Args:
      model: the model; its `network_config` determines the FLOPs.
      batch: the arrays or shapes of a batch, by feature.
      mesh: the mesh of the run's devices.
      first_step: the step at which the run began, which is not 0 if it finetunes a checkpoint.
    """
    self._batch_size = int(next(iter(batch.values())).shape[0])
    self._flops = flops_of_model(model, batch)
    self._peak = peak_flops(mesh.devices.flat)
    self._first_step = first_step
    self._norm = jax.jit(global_norm)

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


def global_norm(tree: PyTree) -> Float[Array, ""]:
  """Returns the L2 norm over all leaves, computed in float32."""
  squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
  return jnp.sqrt(sum(squares, start=jnp.float32(0)))


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
  record: Any, train_state: Any, manager: Any, metrics: Mapping[str, float], step: int
) -> None:
  """Raises NonFiniteError if a step of `record` was not finite, or if a metric is not.

  It does not raise if `optax.apply_if_finite` has skipped all such steps, so that the parameters are
  still finite.

  Args:
    record: the `training.step.FirstNonFinite` of the last steps; None if there is none.
    train_state: the state after them; its parameters give the names.
    manager: the checkpoint manager, whose pending save is awaited; None if there is none.
    metrics: the values that the last steps measured, and the `RunMetrics` after them.
    step: the number of completed steps.
  """
  first_bad = None if record is None else first_bad_name(record.bad, train_state.params)
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


def training_flops_of(config: Any, encoder_length: int, decoder_length: int) -> float:
  """Returns the FLOPs of a training step for one example.

  This is T5X's formula. It counts two FLOPs per multiply-add of each matmul, and the backward pass
  as two forward passes. Causal attention is counted in full, as are the empty slots of experts, and
  recomputation (remat) is not counted. For a decoder-only model the result equals the formula of
  Narayanan et al. 2021 (arXiv:2104.04473) without recomputation.

  Args:
    config: a `T5Config`, or the `TransformerConfig` of a decoder-only model.
    encoder_length: input tokens, including padding; 0 without an encoder.
    decoder_length: target tokens, including padding.
  """
  return 3.0 * sum(forward_flops_of(config, encoder_length, decoder_length))


class ForwardFlops(NamedTuple):
  """The FLOPs of a forward pass for one example.

  Attributes:
    projections: the matmuls of layers with parameters.
    attention: those of queries with keys, and of probabilities with values.
    logits: those of the output layer.
  """

  projections: float
  attention: float
  logits: float


def forward_flops_of(config: Any, encoder_length: int, decoder_length: int) -> ForwardFlops:
  """Returns the FLOPs of a forward pass; see `training_flops_of`."""
  has_encoder = hasattr(config, "num_encoder_layers")
  num_decoder_layers = config.num_decoder_layers if has_encoder else config.num_layers
  width, attention_width = config.emb_dim, config.num_heads * config.head_dim
  projections = num_decoder_layers * decoder_length * 8 * width * attention_width
  projections += _feed_forward_flops(config, "decoder", num_decoder_layers, decoder_length)
  pairs = num_decoder_layers * decoder_length**2
  if has_encoder:
    projections += config.num_encoder_layers * encoder_length * 8 * width * attention_width
    projections += _feed_forward_flops(config, "encoder", config.num_encoder_layers, encoder_length)
    # In cross-attention, query and output are projected for the decoder's tokens, key and value for
    # the encoder's.
    lengths = decoder_length + encoder_length
    projections += num_decoder_layers * 4 * lengths * width * attention_width
    pairs += config.num_encoder_layers * encoder_length**2
    pairs += num_decoder_layers * decoder_length * encoder_length
  logits = 2 * width * config.vocab_size * decoder_length
  return ForwardFlops(projections, 4 * pairs * attention_width, logits)


def _feed_forward_flops(config: Any, side: str, layers: int, length: int) -> float:
  """Returns the FLOPs of the feed-forward blocks and routers of a stack of layers for one example."""
  tokens, router = float(layers * length), 0.0
  if getattr(config, "num_experts", 0):
    routed = len(config.layers_with_experts(side)) * length
    tokens += routed * (config.slots_per_token(length) - 1)
    router = 2 * config.emb_dim * config.num_experts * routed
  kernels = (len(config.mlp_activations) + 1) * config.emb_dim * config.mlp_dim
  return 2 * kernels * tokens + router


def flops_of_lengths(config: Any, lengths: Mapping[str, int]) -> float | None:
  """Returns the FLOPs of a training sequence; None if they are unknown.

  They are unknown for a network config with other fields, and for an encoder without input tokens.

  Args:
    config: the model's `network_config`.
    lengths: the tokens of each side, `encoder` and `decoder`, including padding.
  """
  is_known_encoder = hasattr(config, "num_encoder_layers") and "encoder" in lengths
  is_decoder_only = hasattr(config, "num_layers")
  if "decoder" not in lengths or not (is_known_encoder or is_decoder_only):
    return None
  return training_flops_of(config, lengths.get("encoder", 0), lengths["decoder"])


def flops_of_model(model: Any, batch: Mapping[str, Any]) -> float | None:
  """Returns the FLOPs of a training sequence of `batch` (arrays or shapes); None if unknown."""
  tokens = {side: batch.get(f"{side}_input_tokens") for side in ("encoder", "decoder")}
  lengths = {side: int(leaf.shape[1]) for side, leaf in tokens.items() if leaf is not None}
  return flops_of_lengths(model.network_config, lengths)


def peak_flops(devices: Iterable[jax.Device]) -> float | None:
  """Returns the sum of the devices' peaks in FLOP/s; None if the peak of one is unknown."""
  gpus = [gpu_of(device.device_kind) for device in devices]
  return sum(gpu.bfloat16 for gpu in gpus if gpu) if all(gpus) else None
