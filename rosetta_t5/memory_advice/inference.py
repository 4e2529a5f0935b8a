"""Answers predictions or scores that do not fit into memory with what would save most of it."""

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

from rosetta_t5.memory_advice.training import answered, first_that_fits, told, work_of
from rosetta_t5.parallel.mesh import batch_shards
from rosetta_t5.parallel.mesh_axes import FSDP_AXIS, MODEL_AXIS
from rosetta_t5.plan.collectives import Work
from rosetta_t5.plan.memory import inference_bytes, state_bytes

_LOSS_CHUNK = 16
_Change = tuple[float, str, str]


@dataclasses.dataclass(frozen=True)
class Inference:
  """What a run predicts or scores with.

  Attributes:
    model: the model.
    partitioner: the partitioner.
    initializer: knows the state's shapes, and how they are split.
    shapes: of the global batch's features, with their batch.
    is_scoring: whether targets are scored, or measured the loss of, and nothing is predicted.
    dtype: what parameters are restored in; None for what they are trained in.
    scope: the gin scope of the data's config, such as "infer_eval/".
  """

  model: Any
  partitioner: Any
  initializer: Any
  shapes: Mapping[str, tuple[int, ...]]
  is_scoring: bool = False
  dtype: Any = None
  scope: str = ""

  def answered_when_out_of_memory(self, is_restoring: bool = False) -> AbstractContextManager[None]:
    """Inside a `with`, turns XLA's error of exhausted memory into one that says what to change.

    Args:
      is_restoring: whether parameters are read, which a smaller batch would not help.

    Raises:
      OutOfMemoryError: in place of XLA's.
    """
    return answered(functools.partial(self._advice, is_restoring))

  def _advice(self, is_restoring: bool) -> list[str]:
    try:
      return _advice(self, is_restoring)
    except (KeyError, AttributeError):  # A model of the user's own, with inputs of its own.
      return ["A smaller batch_size, shorter lengths or more devices would help."]


def answered_when_evaluating(
  model: Any, partitioner: Any, initializer: Any, feed: Any, cfg: Any, is_scoring: bool, scope: str
) -> AbstractContextManager[None]:
  """Inside a `with` a training run evaluates; see `Inference`.

  Args:
    model: the model.
    partitioner: the partitioner.
    initializer: knows the train state's shapes, and how they are split.
    feed: the training data, whose lengths evaluations mostly have.
    cfg: the evaluation's data; None where there is none.
    is_scoring: see `Inference`.
    scope: see `Inference`.
  """
  batch = getattr(cfg, "batch_size", 0)
  shapes = {name: (batch, *x.shape[1:]) for name, x in feed.element_spec.items()}
  run = Inference(model, partitioner, initializer, shapes, is_scoring, None, scope)
  return run.answered_when_out_of_memory()


@dataclasses.dataclass(frozen=True)
class _Setting:
  """What may be changed.

  Attributes:
    work: lengths, examples on each device and loss_chunk_length.
    model_shards: devices that a copy of the model is split over.
    decodes: beams or samples of each example; None while targets are scored.
  """

  work: Work
  model_shards: int
  decodes: int | None


def _advice(run: Inference, is_restoring: bool) -> list[str]:
  mesh = dict(run.partitioner.mesh.shape)
  batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in run.shapes.items()}
  work = work_of(run.model, run.partitioner, batch, None, mesh)
  state, splits = run.initializer.global_train_state_shape, run.initializer.train_state_axes
  held = {name: float(size) for name, size in state_bytes(state, splits, mesh).items()}
  if run.dtype is not None:
    held["params"] *= jnp.dtype(run.dtype).itemsize / jnp.dtype(jnp.float32).itemsize
  in_all = sum(held.values())
  of_params = list(_of_dtype(run, held["params"], jnp.dtype(work.config.dtype)))
  if is_restoring:
    setting = _Setting(dataclasses.replace(work, examples=0), mesh.get(MODEL_AXIS, 1), None)
    return told(held, [*of_params, *_of_tensor(run, setting, in_all, mesh)])
  decodes = None if run.is_scoring else _decodes(run.model, state.params, batch)
  setting = _Setting(work, mesh.get(MODEL_AXIS, 1), decodes)
  of_rest = (*_of_batch(run, setting, in_all, mesh), *_of_work(run, setting, in_all))
  now = held | _needed_beside(setting)
  return told(now, [*of_params, *of_rest, *_of_tensor(run, setting, in_all, mesh)])


def _of_dtype(run: Inference, params: float, computes_in: Any) -> Iterator[_Change]:
  """Yields parameters in what they are computed in; a CPU, which has no such products, widens them again."""
  kept = computes_in.itemsize / jnp.dtype(run.dtype or computes_in).itemsize
  if kept < 1 and jax.local_devices()[0].platform != "cpu":
    line = f"utils.RestoreCheckpointConfig.dtype = '{computes_in.name}'"
    yield params * (1 - kept), line, ""


def _needed_beside(setting: _Setting) -> dict[str, float]:
  work = setting.work
  return inference_bytes(
    work.config,
    work.lengths,
    work.examples,
    setting.model_shards,
    setting.decodes,
    work.loss_chunk_length,
    work.over_model,
  )


def _total(setting: _Setting) -> float:
  return sum(_needed_beside(setting).values())


def _of_batch(
  run: Inference, setting: _Setting, held: float, mesh: Mapping[str, int]
) -> Iterator[_Change]:
  """Yields the largest batch that fits, else an example on each device."""
  examples = int(setting.work.examples)
  fewer = [n for n in range(examples - 1, 0, -1) if examples % n == 0]
  if not fewer:
    return

  def with_examples(n: int) -> _Setting:
    return dataclasses.replace(setting, work=dataclasses.replace(setting.work, examples=n))

  best = first_that_fits(fewer, lambda n: held + _total(with_examples(n)))
  line = f"{run.scope}utils.DatasetConfig.batch_size = {best * batch_shards(mesh)}"
  yield _total(setting) - _total(with_examples(best)), line, ""


def _of_work(run: Inference, setting: _Setting, held: float) -> Iterator[_Change]:
  """Yields fewer decodes, shorter texts, and logits in parts."""
  work, now = setting.work, _total(setting)
  if setting.decodes is not None and setting.decodes > 1:
    fewer = [setting.decodes // 2**n for n in range(1, setting.decodes.bit_length())]
    best = first_that_fits(fewer, lambda n: held + _total(dataclasses.replace(setting, decodes=n)))
    line = f"models.{type(run.model).__name__}.predict_batch_with_aux.num_decodes = {best}"
    yield now - _total(dataclasses.replace(setting, decodes=best)), line, ""
  if "encoder" in work.lengths:  # Else inputs and targets share one length.
    halves = {side: max(length // 2, 1) for side, length in work.lengths.items()}
    side = min(halves, key=lambda s: _total(_with_lengths(setting, {**work.lengths, s: halves[s]})))
    shorter = dict(work.lengths) | {side: halves[side]}
    names = {"inputs": shorter["encoder"], "targets": shorter["decoder"]}
    saved = now - _total(_with_lengths(setting, shorter))
    yield saved, f"TASK_FEATURE_LENGTHS = {json.dumps(names)}", "cuts longer ones off: "
  if setting.decodes is None and not work.loss_chunk_length:
    chunked = dataclasses.replace(work, loss_chunk_length=_LOSS_CHUNK)
    saved = now - _total(dataclasses.replace(setting, work=chunked))
    yield saved, f"models.{type(run.model).__name__}.loss_chunk_length = {_LOSS_CHUNK}", ""


def _with_lengths(setting: _Setting, lengths: Mapping[str, int]) -> _Setting:
  return dataclasses.replace(setting, work=dataclasses.replace(setting.work, lengths=lengths))


def _of_tensor(
  run: Inference, setting: _Setting, held: float, mesh: Mapping[str, int]
) -> Iterator[_Change]:
  """Yields a model that more devices share; `fsdp` saves nothing, as every step needs all parameters."""
  config, devices, now = setting.work.config, math.prod(mesh.values()), setting.model_shards
  here = [n for n in range(now + 1, devices + 1) if devices % n == 0]
  more = list(itertools.takewhile(lambda n: n <= config.num_heads, _doubled(devices)))
  where = "" if any(_can_share(config, n, now) for n in here) else "on {} devices: "
  options = [n for n in (more if where else here) if _can_share(config, n, now)]
  if not options:
    return

  def with_shards(n: int) -> tuple[float, _Setting]:
    # A batch is split over fewer copies, but where there are more devices.
    examples = setting.work.examples * (1 if where else n / now)
    work = dataclasses.replace(setting.work, examples=examples)
    return held * now / n, dataclasses.replace(setting, work=work, model_shards=n)

  def needed(n: int) -> float:
    of_state, changed = with_shards(n)
    return of_state + _total(changed)

  best = first_that_fits(options, needed)
  line = f"partitioning.PjitPartitioner.num_partitions = {best}"
  if mesh.get(FSDP_AXIS, 1) > 1:
    split = {"data": max(devices // best, 1), "tensor": best}
    line = f"partitioning.PjitPartitioner.mesh = {json.dumps(split)}"
  yield held + _total(setting) - needed(best), line, where.format(best)


def _doubled(devices: int) -> Iterator[int]:
  return (devices * 2**n for n in itertools.count(1))


def _can_share(config: Any, devices: int, now: int) -> bool:
  sizes = (config.num_heads, config.mlp_dim, config.vocab_size)
  return devices % now == 0 and all(size % devices == 0 for size in sizes)


def _decodes(model: Any, params: Any, batch: Mapping[str, Any]) -> int:
  """Returns how many decodes the model makes of each example, as it and gin have it."""

  def predict(params: Any, batch: Any) -> Any:
    key = jax.random.PRNGKey(0)
    return model.predict_batch_with_aux(params, batch, rng=key, return_all_decodes=True)[0]

  return int(jax.eval_shape(predict, params, dict(batch)).shape[1])
