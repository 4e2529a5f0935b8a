"""Metrics of answers: SQuAD's exact match and F1 (Rajpurkar et al. 2016), LAMBADA's last word."""

from __future__ import annotations

import collections
import math
import re
import string
from collections.abc import Callable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
  """Lowercases a text and removes punctuation, articles and extra spaces, as SQuAD's script does."""
  without = text.lower().translate(_NO_PUNCTUATION)
  return " ".join(_ARTICLES.sub(" ", without).split())


def squad(targets: Sequence[Sequence[str]], predictions: Sequence[str]) -> dict[str, float]:
  """Returns {"em", "f1"} in percent. Each prediction is compared with the answer closest to it.

  Args:
    targets: all correct answers of each question.
    predictions: one answer per question.

  Raises:
    ValueError: the lengths differ, or there are no questions.
  """
  _check_lengths(targets, predictions)
  normalized = [
    ([normalize_answer(answer) for answer in answers], normalize_answer(prediction))
    for answers, prediction in zip(targets, predictions, strict=True)
  ]

  def mean_of_best(score: Callable[[str, str], float]) -> float:
    best = [max(score(a, prediction) for a in answers) for answers, prediction in normalized]
    return 100 * sum(best) / len(best)

  return {"em": mean_of_best(lambda a, b: float(a == b)), "f1": mean_of_best(_f1)}


def lambada(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
  """Returns {"accuracy"} in percent: the first predicted word is the passage's last word."""
  return _first_word_accuracy(targets, predictions, _normalized_word)


def next_word(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
  """Returns {"accuracy"} in percent: the first predicted word equals the target, case included.

  Punctuation after the word is ignored, because a prediction continues where the target ends.
  """
  return _first_word_accuracy(targets, predictions, _bare_word)


def word_perplexity(targets: Sequence[str], scores: Sequence[float]) -> dict[str, float]:
  """Returns {"perplexity"} per word: exp of the mean of −log p(target), summed over its tokens."""
  _check_lengths(targets, scores)
  return {"perplexity": math.exp(-sum(scores) / len(scores))}


def _first_word_accuracy(
  targets: Sequence[str], predictions: Sequence[str], first_word: Callable[[str], str]
) -> dict[str, float]:
  _check_lengths(targets, predictions)
  equal = [first_word(p) == first_word(t) for t, p in zip(targets, predictions, strict=True)]
  return {"accuracy": 100 * sum(equal) / len(equal)}


def _bare_word(text: str) -> str:
  """Returns the first word without trailing punctuation, or the whole word if it has no letters."""
  word = (text.split() or [""])[0]
  # Characters inside a word, such as an apostrophe, have letters on both sides.
  return re.sub(r"\W+$|(?<=\w)[^\w\s'’-].*$", "", word) or word


def _normalized_word(text: str) -> str:
  words = normalize_answer(text).split() or text.lower().split()
  return words[0] if words else ""


def _f1(target: str, prediction: str) -> float:
  """Returns the harmonic mean of precision and recall over words, counted with repetitions."""
  predicted, wanted = prediction.split(), target.split()
  shared = sum((collections.Counter(predicted) & collections.Counter(wanted)).values())
  if not shared:
    return 0.0
  precision, recall = shared / len(predicted), shared / len(wanted)
  return 2 * precision * recall / (precision + recall)


def _check_lengths(targets: Sequence[object], predictions: Sequence[object]) -> None:
  if len(targets) != len(predictions) or not len(targets):
    raise ValueError(
      "a metric needs one prediction for each target, and at least one, got "
      f"{len(targets)} targets and {len(predictions)} predictions"
    )
