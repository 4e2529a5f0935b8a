"""Answers to questions: SQuAD's exact match and F1 (Rajpurkar et al. 2016), LAMBADA's last word."""

from __future__ import annotations

import collections
import math
import re
import string
from collections.abc import Callable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
  """Lower case, no punctuation, no articles, single spaces: the rules of the official script."""
  without = text.lower().translate(_NO_PUNCTUATION)
  return " ".join(_ARTICLES.sub(" ", without).split())


def squad(targets: Sequence[Sequence[str]], predictions: Sequence[str]) -> dict[str, float]:
  """Returns {"em", "f1"} in percent; each prediction counts by the answer that suits it best.

  Args:
    targets: for each question, all answers that are right.
    predictions: one answer each.

  Raises:
    ValueError: the two have different lengths, or there is no question.
  """
  _check_lengths(targets, predictions)
  normalized = [
    ([normalize_answer(answer) for answer in answers], normalize_answer(prediction))
    for answers, prediction in zip(targets, predictions, strict=True)
  ]

  def mean_of_best(score: Callable[[str, str], float]) -> float:
    best = [max(score(a, prediction) for a in answers) for answers, prediction in normalized]
    return 100 * sum(best) / len(best)

  return {"em": mean_of_best(_exact_match), "f1": mean_of_best(_f1)}


def lambada(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
  """Returns {"accuracy"} in percent: the first word predicted is the passage's last word."""
  _check_lengths(targets, predictions)
  right = [_first_word(p) == _first_word(t) for t, p in zip(targets, predictions, strict=True)]
  return {"accuracy": 100 * sum(right) / len(right)}


def next_word(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
  """Returns {"accuracy"} in percent: the first word predicted is the target, letter by letter.

  Punctuation after a word is no part of it: a prediction goes on, where the target is a word alone.
  """
  _check_lengths(targets, predictions)
  right = [_bare_word(p) == _bare_word(t) for t, p in zip(targets, predictions, strict=True)]
  return {"accuracy": 100 * sum(right) / len(right)}


def word_perplexity(targets: Sequence[str], scores: Sequence[float]) -> dict[str, float]:
  """Returns {"perplexity"}: exp of the mean of −log p(target), a target of several tokens being one."""
  _check_lengths(targets, scores)
  return {"perplexity": math.exp(-sum(scores) / len(scores))}


def _bare_word(text: str) -> str:
  """Returns the first word without punctuation at its end; of punctuation alone, all of it."""
  word = (text.split() or [""])[0]
  # What stands within a word, as the apostrophe, has letters on both sides.
  return re.sub(r"\W+$|(?<=\w)[^\w\s'’-].*$", "", word) or word


def _first_word(text: str) -> str:
  words = normalize_answer(text).split() or text.lower().split()
  return words[0] if words else ""


def _exact_match(target: str, prediction: str) -> float:
  return float(target == prediction)


def _f1(target: str, prediction: str) -> float:
  """Harmonic mean of precision and recall over words, counted with their repetitions."""
  predicted, wanted = prediction.split(), target.split()
  shared = sum((collections.Counter(predicted) & collections.Counter(wanted)).values())
  if not shared:
    return 0.0
  precision, recall = shared / len(predicted), shared / len(wanted)
  return 2 * precision * recall / (precision + recall)


def _check_lengths(targets: Sequence[object], predictions: Sequence[object]) -> None:
  if len(targets) != len(predictions) or not len(targets):
    raise ValueError(
      f"There are {len(targets)} targets and {len(predictions)} predictions: a metric needs one "
      "prediction for each target, and at least one."
    )
