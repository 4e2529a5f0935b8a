"""Suggests what to change if predicting or scoring does not fit into a device's memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp

from rosetta_t5.memory_advice.suggestions import (
  LOSS_CHUNK,
  Change,
  advice_lines,
  explain_with,
  first_that_fits,
)
from rosetta_t5.parallel.mesh_axes import FSDP_AXIS, MODEL_AXIS, count_batch_shards
from rosetta_t5.plan.memory import inference_bytes, state_bytes
from rosetta_t5.plan.workload import Workload, batch_workload


@dataclasses.dataclass(frozen=True)
class InferenceMemoryAdvisor:
  """Explains the out-of-memory errors of a run that predicts or scores.

  Attributes:
    model: the model.
    partitioner: the partitioner.
    initializer: provides the state's shapes and PartitionSpecs.
    shapes: the shapes of the global batch's features.
    is_scoring: whether the run only scores targets or computes the loss, without predicting.
    dtype: the dtype that parameters are restored in; None for their dtype during training.
    scope: the gin scope of the dataset's config, such as "infer_eval/".
  """

  model: Any
  partitioner: Any
  initializer: Any
  shapes: Mapping[str, tuple[int, ...]]
  is_scoring: bool = False
  dtype: Any = None
  scope: str = ""

  def explain_out_of_memory(self, is_restoring: bool = False) -> AbstractContextManager[None]:
    """Adds advice to XLA's out-of-memory errors inside the `with`.

    Args:
      is_restoring: whether parameters are being restored, so that a smaller batch would not help.

    Raises:
      OutOfMemoryError: instead of XLA's error.
    """
    general_advice = "A smaller batch_size, shorter lengths or more devices would help."
    return explain_with(functools.partial(self._advice, is_restoring), general_advice)

  def _advice(self, is_restoring: bool) -> list[str]:
    mesh = dict(self.partitioner.mesh.shape)
    work = batch_workload(self.model, self.partitioner, self.shapes, mesh)
    state, specs = self.initializer.global_train_state_shape, self.initializer.train_state_axes
    held = state_bytes(state, specs, mesh)
    if self.dtype is not None:
      held["params"] *= jnp.dtype(self.dtype).itemsize / jnp.dtype(jnp.float32).itemsize
    changes = [*self._dtype_change(held["params"], work.itemsize)]
    if is_restoring:
      work, now = work.replace(examples=0), held
    else:
      work = work.replace(decodes=None if self.is_scoring else self._num_decodes(state.params))
      now = held | inference_bytes(work)
      changes += self._batch_change(work, sum(held.values()))
      changes += self._work_changes(work, sum(held.values()))
    changes += _sharding_change(work, sum(held.values()))
    return advice_lines(now, changes)

  def _dtype_change(self, params: float, compute_itemsize: int) -> Iterator[Change]:
    """Yields the change to parameters in the compute dtype, if that is smaller.

    CPUs are excluded: they convert parameters to float32 for matmuls, which saves nothing.
    """
    dtype = self.model.network_config.dtype
    kept = compute_itemsize / jnp.dtype(self.dtype or dtype).itemsize
    if kept < 1 and jax.local_devices()[0].platform != "cpu":
      line = f"utils.RestoreCheckpointConfig.dtype = '{jnp.dtype(dtype).name}'"
      yield Change(params * (1 - kept), line)

  def _batch_change(self, work: Workload, held: float) -> Iterator[Change]:
    """Yields the change to the largest batch size that fits, else to one example per device."""
    examples = int(work.examples)
    fewer = [work.replace(examples=n) for n in range(examples - 1, 0, -1) if examples % n == 0]
    if fewer:
      best = first_that_fits(fewer, lambda changed: held + _needed(changed))
      size = int(best.examples) * count_batch_shards(work.mesh)
      line = f"{self.scope}utils.DatasetConfig.batch_size = {size}"
      yield Change(_needed(work) - _needed(best), line)

  def _work_changes(self, work: Workload, held: float) -> Iterator[Change]:
    """Yields the changes to fewer decodes, to shorter texts, and to a loss computed in chunks."""
    model, now = f"models.{type(self.model).__name__}", _needed(work)
    if work.decodes is not None and work.decodes > 1:
      halvings = range(1, work.decodes.bit_length())
      fewer = [work.replace(decodes=work.decodes // 2**n) for n in halvings]
      best = first_that_fits(fewer, lambda changed: held + _needed(changed))
      line = f"{model}.predict_batch_with_aux.num_decodes = {best.decodes}"
      yield Change(now - _needed(best), line)
    if "encoder" in work.lengths:  # Without an encoder, inputs and targets share one length.
      halves = ({side: max(length // 2, 1)} for side, length in work.lengths.items())
      options = [work.replace(lengths={**work.lengths, **half}) for half in halves]
      shorter = min(options, key=_needed)
      lengths = {"inputs": shorter.lengths["encoder"], "targets": shorter.lengths["decoder"]}
      line = f"TASK_FEATURE_LENGTHS = {json.dumps(lengths)}"
      yield Change(now - _needed(shorter), line, "truncates longer texts: ")
    if work.decodes is None and not work.loss_chunk_length:
      chunked = work.replace(loss_chunk_length=LOSS_CHUNK)
      yield Change(now - _needed(chunked), f"{model}.loss_chunk_length = {LOSS_CHUNK}")

  def _num_decodes(self, params: Any) -> int:
    """Returns the number of decodes of each example, which gin may have bound."""
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in self.shapes.items()}

    def predict(params: Any, batch: Any) -> Any:
      key = jax.random.PRNGKey(0)
      return self.model.predict_batch_with_aux(params, batch, rng=key, return_all_decodes=True)[0]

    return int(jax.eval_shape(predict, params, batch).shape[1])


def explain_out_of_memory_in_evaluation(
  model: Any, partitioner: Any, initializer: Any, feed: Any, cfg: Any, is_scoring: bool, scope: str
) -> AbstractContextManager[None]:
  """Adds advice to XLA's out-of-memory errors inside the `with`, for an evaluation during training.

  Args:
    initializer: provides the train state's shapes and PartitionSpecs.
    feed: the training data. Its lengths are assumed for the evaluation.

  Raises:
    OutOfMemoryError: instead of XLA's error.
  """
  batch_size = getattr(cfg, "batch_size", 0)
  shapes = {name: (batch_size, *spec.shape[1:]) for name, spec in feed.element_spec.items()}
  advisor = InferenceMemoryAdvisor(
    model, partitioner, initializer, shapes, is_scoring=is_scoring, scope=scope
  )
  return advisor.explain_out_of_memory()


def _needed(work: Workload) -> float:
  """Returns the bytes that a device needs besides the parameters."""
  return sum(inference_bytes(work).values())


def _sharding_change(work: Workload, held: float) -> Iterator[Change]:
  """Yields the change to a model that is sharded over more devices of this or of a larger mesh.

  `fsdp` would save nothing, because each step needs all parameters.
  """
  devices, now = math.prod(work.mesh.values()), work.model_shards
  available = [n for n in range(now + 1, devices + 1) if devices % n == 0 and _can_share(work, n)]
  doublings = (devices * 2**n for n in itertools.count(1))
  more = itertools.takewhile(lambda n: n <= work.config.num_heads, doublings)
  options = available or [n for n in more if _can_share(work, n)]
  if not options:
    return

  def needed(shards: int) -> float:
    # On the same devices there are fewer copies of the model, and each gets more of the batch.
    examples = work.examples * shards / now if available else work.examples
    changed = work.replace(examples=examples, mesh={**work.mesh, MODEL_AXIS: shards})
    return held * now / shards + _needed(changed)

  best = first_that_fits(options, needed)
  line = f"partitioning.PjitPartitioner.num_partitions = {best}"
  if FSDP_AXIS in work.mesh:
    mesh = {"data": max(devices // best, 1), "tensor": best}
    line = f"partitioning.PjitPartitioner.mesh = {json.dumps(mesh)}"
  saved = held + _needed(work) - needed(best)
  yield Change(saved, line, "" if available else f"on {best} devices: ")


def _can_share(work: Workload, devices: int) -> bool:
  """Returns whether heads, feed-forward units and vocabulary can be split over this number of devices."""
  sizes = (work.config.num_heads, work.config.mlp_dim, work.config.vocab_size)
  return devices % work.model_shards == 0 and all(size % devices == 0 for size in sizes)
