"""The schedule of a pipeline: microbatches pass through the stages once per round."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from rosetta_t5.parallel.mesh import BATCH_AXES, PIPELINE_AXIS

_SETTING = "partitioning.PjitPartitioner"
# By default, a pipeline of S stages has at most this times S microbatches.
_MICROBATCHES_PER_STAGE = 4


@dataclasses.dataclass(frozen=True)
class PipelineSettings:
  """What a user can set about pipelines.

  Attributes:
    microbatches: the number of microbatches of a pipeline, a multiple of its stages; None for the
      largest number that divides the batch, up to four times the number of stages.
    rounds: how often a microbatch passes through all stages (interleaving). With more rounds, stages
      have fewer layers at a time, and the bubble is shorter.
  """

  microbatches: int | None = None
  rounds: int = 1


class Work(NamedTuple):
  """What a stage computes in one tick. Each field is an integer or an integer array.

  Attributes:
    group: the number of the group of microbatches.
    position: the number of the microbatch in its group.
    round: how often the microbatch has passed through all stages before.
    is_computed: whether the stage has a microbatch; in the bubble it computes zeros or old numbers.
  """

  group: Any
  position: Any
  round: Any
  is_computed: Any


@dataclasses.dataclass(frozen=True)
class PipelineSchedule:
  """How microbatches pass through the stages of one stack of layers.

  Microbatches enter in groups of as many as there are stages. A group passes through all rounds before
  the next one enters, so the first stage is never idle while there is work, and no stage stores
  microbatches that wait. A tick is the time in which a stage computes one microbatch in one round.

  Attributes:
    stages: the number of stages, S.
    microbatches: the number of microbatches, M, a multiple of S.
    rounds: the number of rounds, R.
  """

  stages: int
  microbatches: int
  rounds: int = 1

  @property
  def groups(self) -> int:
    """The number of groups of microbatches."""
    return self.microbatches // self.stages

  @property
  def ticks(self) -> int:
    """The number of ticks: M·R, and S − 1 more until the last stage has worked too."""
    return self.microbatches * self.rounds + self.stages - 1

  @property
  def bubble(self) -> float:
    """The share of the ticks in which a stage has no microbatch: (S − 1) / (M·R + S − 1)."""
    return (self.stages - 1) / self.ticks

  def work_at(self, tick: Any, stage: Any) -> Work:
    """Returns what a stage computes in a tick; both may be arrays.

    A stage begins one tick after the stage before it. It computes the microbatches of a group one after
    another, in one round after another.
    """
    done = tick - stage
    passes = done // self.stages
    return Work(
      group=jnp.clip(passes // self.rounds, 0, self.groups - 1),
      position=done % self.stages,
      round=passes % self.rounds,
      is_computed=(done >= 0) & (done < self.microbatches * self.rounds),
    )

  def __str__(self) -> str:
    """Returns the schedule as text for a run's header."""
    rounds = f" in {self.rounds} rounds" if self.rounds > 1 else ""
    return (
      f"{self.stages} stages, {self.microbatches} microbatches{rounds}: a stage is idle for "
      f"{self.bubble:.1%} of the time (the bubble)"
    )

  def chunk_permutations(self) -> list[list[tuple[int, int]]]:
    """Returns how chunks of layers move from where they are stored to the stages that compute them.

    The layers are S·R chunks. Each stage stores R chunks that follow each other; but chunk c is computed
    by stage c mod S, in round c // S. In each of the R permutations, every stage sends one chunk and
    receives one. They are lists of (chunk, …), one chunk for each sending stage, in their order.
    """
    stages, rounds = self.stages, self.rounds
    cycle = math.lcm(stages, rounds)
    steps: list[list[tuple[int, int]]] = [[] for _ in range(rounds)]
    for chunk in range(stages * rounds):
      # In a block of `rounds` chunks these numbers differ, and so they do among chunks of one stage.
      steps[(chunk + chunk // cycle) % rounds].append((chunk, chunk % stages))
    return steps


_DEFAULT = PipelineSettings()
_current: contextvars.ContextVar[PipelineSettings] = contextvars.ContextVar("pipeline_settings")


@contextlib.contextmanager
def pipeline_settings(settings: PipelineSettings) -> Iterator[None]:
  """Inside the `with`, pipelines are traced with these settings."""
  token = _current.set(settings)
  try:
    yield
  finally:
    _current.reset(token)


def choose_schedule(
  mesh_shape: Mapping[str, int],
  batch_size: int,
  num_layers: int,
  settings: PipelineSettings | None = None,
) -> PipelineSchedule:
  """Returns the schedule of one stack of layers.

  Args:
    mesh_shape: the size of each mesh axis.
    batch_size: the examples in one pass, on all devices together.
    num_layers: the layers of the stack.
    settings: the user's; None for those of the partitioner whose program is traced.

  Raises:
    ValueError: the layers or the batch cannot be divided as the settings require.
  """
  settings = settings or _current.get(_DEFAULT)
  stages = mesh_shape.get(PIPELINE_AXIS, 1)
  replicas = math.prod(mesh_shape.get(axis, 1) for axis in BATCH_AXES) // stages
  _check_layers(num_layers, stages, settings.rounds)
  if batch_size % (stages * replicas):
    raise ValueError(
      f"a pipeline of {stages} stages and {replicas} replicas needs a multiple of {stages * replicas} "
      f"examples in each pass, got {batch_size}: change BATCH_SIZE, or trainer.Trainer.num_microbatches, "
      f"or {_SETTING}.mesh"
    )
  rows = batch_size // replicas
  microbatches = settings.microbatches
  if microbatches is None:
    microbatches = max(
      number
      for number in range(stages, _MICROBATCHES_PER_STAGE * stages + 1, stages)
      if rows % number == 0
    )
  if microbatches < 1 or microbatches % stages or rows % microbatches:
    possible = [n for n in range(stages, rows + 1, stages) if rows % n == 0]
    raise ValueError(
      f"{_SETTING}.pipeline_microbatches must be a multiple of the {stages} stages that divides the "
      f"{rows} examples of a replica, got {microbatches}: set it to one of {possible}, or None"
    )
  return PipelineSchedule(stages, microbatches, settings.rounds)


def _check_layers(num_layers: int, stages: int, rounds: int) -> None:
  if num_layers % stages:
    possible = [n for n in range(1, num_layers + 1) if num_layers % n == 0]
    raise ValueError(
      f"{num_layers} layers cannot be split into the {stages} stages of {_SETTING}.mesh's 'pipeline': "
      f"set it to one of {possible}"
    )
  layers = num_layers // stages
  if rounds < 1 or layers % rounds:
    possible = [n for n in range(1, layers + 1) if layers % n == 0]
    raise ValueError(
      f"{_SETTING}.pipeline_rounds must divide the {layers} layers of each device ({num_layers} layers "
      f"in {stages} stages), got {rounds}: set it to one of {possible}"
    )
