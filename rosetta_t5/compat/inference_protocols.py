"""The signatures that users' own inference functions have (T5X's protocols)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax

PyTree = Any


class InferStepWithRngCallable(Protocol):
  """Predicts for a batch, with a random key."""

  def __call__(
    self, params: PyTree, batch: Mapping[str, jax.Array], rng: jax.Array | None = None
  ) -> PyTree:
    """Returns predictions or scores."""


class InferStepWithoutRngCallable(Protocol):
  """Predicts or scores for a batch."""

  def __call__(self, params: PyTree, batch: Mapping[str, jax.Array]) -> PyTree:
    """Returns predictions or scores."""


class InferFnCallable(Protocol):
  """Predicts or scores for a whole dataset; `get_infer_fn` makes one."""

  def __call__(self, ds: Any, train_state: Any, rng: jax.Array | None = None) -> Any:
    """Returns (index, output) pairs, and with auxiliary values (those pairs, the values)."""


class EvaluatorConstructor(Protocol):
  """Makes what judges predictions; `seqio.Evaluator` is one."""

  def __call__(
    self,
    mixture_or_task_name: str,
    feature_converter: Any,
    eval_split: str,
    use_cached: bool,
    seed: int | None,
    sequence_length: Mapping[str, int] | None,
    log_dir: str | None,
    use_memory_cache: bool,
  ) -> Any:
    """Returns an evaluator of one task or mixture."""
