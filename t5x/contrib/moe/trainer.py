"""T5X's `contrib.moe.trainer`."""

from collections.abc import Callable
from typing import Any

from rosetta_t5.argument_types import Positive
from rosetta_t5.training import Trainer


class MoeTrainer(Trainer):
  """T5X's trainer for experts.

  T5X multiplies the gradients of experts by `num_expert_partitions`, because its compiler averaged them
  over the devices. Here the gradients on any mesh are those of one device, so nothing is multiplied.
  """

  def __init__(
    self,
    *arguments: Any,
    num_expert_partitions: Positive,
    sharded_match_fn: Callable[[str], bool] | None = None,
    **options: Any,
  ):
    """Builds a `Trainer` with its arguments; `num_expert_partitions` and `sharded_match_fn` have no effect."""
    super().__init__(*arguments, **options)
