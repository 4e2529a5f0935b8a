"""Inference with experts, which may have no slot for some tokens: results say for how many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rosetta_t5.models.expert_losses import LEFT_BEHIND, fraction_left_behind


def inference_step(model: Any, method: str) -> Callable[..., Any]:
  """Returns a model's method; with experts, one that also returns {LEFT_BEHIND: fraction by example}.

  Args:
    model: the model.
    method: `predict_batch`, `predict_batch_with_aux` (which returns it in any case) or `score_batch`.
  """
  if not model.has_experts:
    return getattr(model, method)

  def predict(params: Any, batch: Any, rng: Any = None) -> Any:
    predictions, aux = model.predict_batch_with_aux(params, batch, rng=rng)
    return predictions, {name: x for name, x in aux.items() if name == LEFT_BEHIND}

  def score(params: Any, batch: Any, return_intermediates: bool = False) -> Any:
    scores, intermediates = model.score_batch(params, batch, return_intermediates=True)
    return scores, intermediates if return_intermediates else fraction_left_behind(intermediates)

  return {"predict_batch": predict, "score_batch": score}.get(method) or getattr(model, method)


def notes_on_tokens_left_behind(aux: Mapping[str, Any]) -> Iterable[str]:
  """Yields a note if experts had no slot for some tokens of these examples.

  Args:
    aux: the auxiliary values of the examples, {name: list}.
  """
  fractions = aux.get(LEFT_BEHIND, ())
  if any(fractions):
    mean = sum(fractions) / len(fractions)
    yield (
      f"no expert computed {mean:.2%} of the tokens, because its slots were taken: set a higher "
      "eval_capacity_factor in the network's config"
    )
