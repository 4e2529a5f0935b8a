"""What a step computes: the network's sizes, lengths, batch, sharding, and the shapes of the state."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import unfreeze
from jax.sharding import AbstractDevice

from rosetta_t5.networks.config import NetworkConfig
from rosetta_t5.networks.kernel_measurement import attention_cases, usable_kernels
from rosetta_t5.networks.layer_kinds import has_extra_keys
from rosetta_t5.networks.layers.stack import pipeline_obstacle
from rosetta_t5.networks.other_networks import setting_of
from rosetta_t5.parallel.mesh import PIPELINE_AXIS, count_batch_shards
from rosetta_t5.parallel.pipeline import PipelineSchedule, choose_schedule
from rosetta_t5.parallel.placement import PipelineSettings
from rosetta_t5.plan.activations import TRACED_EXAMPLES, Activations, Layout
from rosetta_t5.telemetry.gpus import Gpu
from rosetta_t5.traced.program import are_trained, read_program, trace_loss, with_config
from rosetta_t5.training import InferenceState, TrainState

# Stands for an unknown length. The shapes of the parameters do not depend on it.
_ANY_LENGTH = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """What one training step computes, and how it is split over devices.

  Attributes:
    config: the network's sizes, a `T5Config` or `TransformerConfig`.
    examples: the examples per device in a step, all microbatches together.
    mesh: the size of each mesh axis, outermost first.
    layout: how arrays are split over the mesh.
    microbatches: the number of microbatches of a step.
    zero1: whether the optimizer's state is sharded over `data` and the parameters are not.
    loss_chunk_length: the number of target positions whose logits exist at the same time; None for all.
    remat_policy: what layers keep for the backward pass (see `stack.rematerialize`).
    fp8: whether the matmuls of attention and feed-forward blocks are computed in fp8.
    kernel: the attention kernel of all layers: xla, cudnn or flash.
    pipeline: the settings of pipelines.
    activations: what the traced loss keeps; None if it cannot be traced.
  """

  config: Any
  examples: float
  mesh: Mapping[str, int]
  layout: Layout
  microbatches: int = 1
  zero1: bool = False
  loss_chunk_length: int | None = None
  remat_policy: str = "none"
  fp8: bool = False
  kernel: str = "xla"
  pipeline: PipelineSettings = dataclasses.field(default_factory=PipelineSettings)
  activations: Activations | None = None

  @property
  def is_attention_fused(self) -> bool:
    """Whether one kernel computes attention, and stores neither logits nor probabilities."""
    return self.kernel != "xla"

  def shards(self, axes: Iterable[str]) -> int:
    """Returns the number of devices along these mesh axes."""
    return math.prod(self.mesh.get(axis, 1) for axis in axes)

  def present(self, axes: Iterable[str]) -> tuple[str, ...]:
    """Returns those of these mesh axes that have more than one device, in the order of the mesh."""
    wanted = set(axes)
    return tuple(axis for axis, size in self.mesh.items() if size > 1 and axis in wanted)

  @functools.cached_property
  def schedule(self) -> PipelineSchedule:
    """The schedule of the pipeline; one stage and one microbatch if there is none.

    Raises:
      ValueError: the layers or the batch cannot be divided into stages and microbatches, or the network
        cannot be a pipeline.
    """
    if self.mesh.get(PIPELINE_AXIS, 1) == 1:
      return PipelineSchedule(1, 1)
    if reason := pipeline_obstacle(self.config, ()):
      raise ValueError(reason)
    batch = round(self.examples / self.microbatches * count_batch_shards(self.mesh))
    names = ("num_encoder_layers", "num_decoder_layers", "num_layers")
    # All stacks have the same schedule, but each must be divisible.
    stacks = [n for name in names if (n := getattr(self.config, name, 0))]
    return [choose_schedule(self.mesh, batch, layers, self.pipeline) for layers in stacks][-1]

  @property
  def stage_examples(self) -> float:
    """The number of examples that a device computes at a time in its layers."""
    schedule = self.schedule
    return self.examples / self.microbatches * schedule.stages / schedule.microbatches

  @property
  def itemsize(self) -> int:
    """The bytes of a number in the compute dtype."""
    return jnp.dtype(setting_of(self.config, "dtype")).itemsize

  def replace(self, **changes: Any) -> Workload:
    """Returns a copy with other values."""
    return dataclasses.replace(self, **changes)


def workload_of(
  model: Any,
  partitioner: Any,
  batch_size: int,
  mesh: Mapping[str, int],
  activations: Activations | None = None,
  kernel: str | None = None,
) -> Workload:
  """Returns what a step of a run computes in one microbatch; with the config's attention kernel if `kernel` is None."""
  config = model.network_config
  kernel = kernel or setting_of(config, "attention_kernel")
  # As on a CPU, and for all layers if some have no other kernel.
  is_xla = kernel == "auto" or (isinstance(config, NetworkConfig) and has_extra_keys(config))
  return Workload(
    config=config,
    examples=batch_size / count_batch_shards(mesh),
    mesh=mesh,
    zero1=getattr(partitioner, "zero1", False),
    loss_chunk_length=model.loss_chunk_length,
    remat_policy=setting_of(config, "remat_policy"),
    fp8=setting_of(config, "matmul") is not None,
    kernel="xla" if is_xla else kernel,
    pipeline=partitioner.pipeline,
    activations=activations,
    layout=Layout(getattr(partitioner, "logical_axis_rules", ()), mesh),
  )


def fastest_kernel(
  model: Any, lengths: Mapping[str, int], cfg: Any, mesh: Mapping[str, int], gpu: Gpu
) -> str | None:
  """Returns the attention kernel that `attention_kernel = 'auto'` is expected to measure as the fastest.

  It is the first of cuDNN's, flash and XLA's that can compute the model; None if the network has no choice
  of kernels.

  Args:
    lengths: see `input_lengths`.
    cfg: the dataset, which may be packed, by SeqIO or by its task.
    mesh: the size of each mesh axis.
  """
  if not isinstance(model.network_config, NetworkConfig):
    return None
  batch = batch_shapes(lengths)
  if cfg.pack or "decoder_segment_ids" in (cfg.task_feature_lengths or {}):
    batch["decoder_segment_ids"] = batch["decoder_target_tokens"]
  has_prefix = getattr(model, "is_prefix_lm", False)
  cases = attention_cases(model.network_config, batch, mesh, has_prefix)
  usable = usable_kernels(cases, AbstractDevice(gpu.kind, None, "gpu"))
  return next(name for name in ("cudnn", "flash", "xla") if name in usable)


def input_lengths(model: Any, task_lengths: Mapping[str, int] | None) -> dict[str, int]:
  """Returns the lengths of a model's inputs: {"encoder": S, "decoder": T}, or {"decoder": T}.

  If the model has no encoder, T5X's feature converters concatenate inputs and targets.
  """
  lengths = dict(task_lengths or {})
  # Rows that a task has prepared for the model have the length of each of their features.
  prepared = lengths.get("decoder_target_tokens")
  if _has_encoder(model):
    return {
      "encoder": lengths.get("encoder_input_tokens") or lengths.get("inputs", _ANY_LENGTH),
      "decoder": prepared or lengths.get("targets", _ANY_LENGTH),
    }
  return {"decoder": prepared or sum(lengths.values()) or _ANY_LENGTH}


def batch_shapes(lengths: Mapping[str, int], examples: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shape of each feature of a training batch; `lengths`: see `input_lengths`."""
  kinds = ("input_tokens", "target_tokens", "loss_weights", "causal_attention")
  names = {f"decoder_{kind}": lengths["decoder"] for kind in kinds}
  if "encoder" in lengths:
    names["encoder_input_tokens"] = lengths["encoder"]
  return {n: jax.ShapeDtypeStruct((examples, length), jnp.int32) for n, length in names.items()}


def traced_activations(
  model: Any, partitioner: Any, state: Any, lengths: Mapping[str, int]
) -> Activations | None:
  """Returns the activations of a model's traced loss; None if it cannot be traced.

  Args:
    state: the shapes of the train state.
    lengths: see `input_lengths`.
  """
  rules = getattr(partitioner, "logical_axis_rules", ())
  batch = batch_shapes(lengths, TRACED_EXAMPLES)
  names = jax.tree.leaves(
    partitioner.get_logical_axes(state).params,
    is_leaf=lambda x: x is None or isinstance(x, jax.sharding.PartitionSpec),
  )
  try:
    traced = trace_loss(model, state.params, batch, [name for name, _ in rules])
  except Exception:  # a model of the user's, with other features or another loss
    return None
  axes = [tuple(each or ()) for each in names]
  trained = are_trained(state.params, getattr(state, "optimizer_def", None))
  return Activations(read_program(traced, trained, axes))


def state_shapes(model: Any, batch_size: int, lengths: Mapping[str, int], trained: bool) -> Any:
  """Returns the train state with a ShapeDtypeStruct for each array.

  Args:
    lengths: see `input_lengths`.
    trained: whether the state includes the optimizer's.
  """
  # A user's network may read inputs without an `encode` that `_has_encoder` sees.
  batch = batch_shapes({"encoder": lengths["decoder"], **lengths}, batch_size)
  shapes = {name: x.shape for name, x in batch.items()}
  types = {name: x.dtype for name, x in batch.items()}
  # The parameters are the same with every kernel, and this machine may lack the GPU that one needs.
  model = with_config(model, attention_kernel="xla")

  def make(key: jax.Array) -> Any:
    variables = model.get_initial_variables(rng=key, input_shapes=shapes, input_types=types)
    variables = unfreeze(variables)
    if not trained:
      return InferenceState.create(variables)
    return TrainState.create(model.optimizer_def, variables)

  # Only the shape of a key: a real key would initialize a device.
  return jax.eval_shape(make, jax.eval_shape(lambda: jax.random.PRNGKey(0)))


def _has_encoder(model: Any) -> bool:
  config = model.network_config
  if hasattr(config, "num_layers") or hasattr(config, "num_encoder_layers"):
    return hasattr(config, "num_encoder_layers")
  return hasattr(model.module, "encode")
