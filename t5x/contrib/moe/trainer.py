"""T5X's `contrib.moe.trainer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from rosetta_t5.argument_types import NonNegative, Positive
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.training import Trainer, TrainState


class MoeTrainer(Trainer):
  """T5X's trainer for experts.

  T5X multiplies the gradients of experts by `num_expert_partitions`, because its compiler averaged them
  over the devices. Here the gradients on any mesh are those of one device, so nothing is multiplied.
  """

  def __init__(
    self,
    model: Any,
    train_state: TrainState,
    partitioner: BasePartitioner,
    eval_names: Sequence[str],
    summary_dir: str | None,
    train_state_axes: Any,
    rng: jax.Array,
    learning_rate_fn: Callable[[jax.Array], jax.Array],
    num_microbatches: NonNegative | None,
    num_expert_partitions: Positive,
    sharded_match_fn: Callable[[str], bool] | None = None,
    weight_metrics_computer: Any = None,
    extra_writers: Sequence[Any] = (),
  ):
    """Builds a `Trainer`, which describes the other arguments.

    Args:
      num_expert_partitions: exists for T5X's callers.
      sharded_match_fn: exists for T5X's callers.
    """
    del num_expert_partitions, sharded_match_fn
    super().__init__(
      model,
      train_state,
      partitioner,
      eval_names,
      summary_dir,
      train_state_axes,
      rng,
      learning_rate_fn,
      num_microbatches,
      weight_metrics_computer,
      extra_writers,
    )
