"""The metrics of T5's tasks: functions of targets and predictions that return {name: number}.

Accuracy, F1 and correlations of classes and scores (GLUE), exact match and F1 of answers (SQuAD, Rajpurkar et
al. 2016), the last word of a passage (LAMBADA), BLEU and ROUGE. Rates and coefficients are in percent.
"""

import collections
import inspect
import math
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def accuracy(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
  """Returns {"accuracy"}: the percentage of predictions that equal their targets."""
  _check_lengths(targets, predictions)
  equal = [bool(t == p) for t, p in zip(targets, predictions, strict=True)]
  return {"accuracy": 100 * sum(equal) / len(equal)}


def f1_score_with_invalid(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
  """Returns {"f1"} of class 1. A prediction other than 0 and 1 counts as the wrong class."""
  wanted, given = np.asarray(targets), np.array(predictions)
  invalid = (given != 0) & (given != 1)
  given[invalid] = 1 - wanted[invalid]
  true_positives = np.sum((given == 1) & (wanted == 1))
  positives = np.sum(given == 1) + np.sum(wanted == 1)
  return {"f1": 100 * float(2 * true_positives / positives) if positives else 0.0}


def macro_f1(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
  """Returns {"macro_f1"}: the mean of the F1 of each class of the targets; any other prediction is wrong."""
  _check_lengths(targets, predictions)
  hits = collections.Counter(t for t, p in zip(targets, predictions, strict=True) if t == p)
  wanted, given = collections.Counter(targets), collections.Counter(predictions)
  scores = [2 * hits[label] / (count + given[label]) for label, count in wanted.items()]
  return {"macro_f1": 100 * sum(scores) / len(scores)}


def matthews_corrcoef(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
  """Returns {"matthews_corrcoef"} for any number of classes (Gorodkin 2004), or 0 if undefined."""
  wanted, given = np.asarray(targets), np.asarray(predictions)
  classes = np.union1d(wanted, given)
  truth = np.array([np.sum(wanted == c) for c in classes], np.float64)
  guess = np.array([np.sum(given == c) for c in classes], np.float64)
  total, correct = float(len(wanted)), float(np.sum(wanted == given))
  scale = np.sqrt((total**2 - guess @ guess) * (total**2 - truth @ truth))
  coefficient = (correct * total - truth @ guess) / scale if scale else 0.0
  return {"matthews_corrcoef": float(100 * coefficient)}


def pearson_corrcoef(targets: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
  """Returns {"pearson_corrcoef"}, or NaN if either side is constant."""
  return {"pearson_corrcoef": _correlation(targets, predictions)}


def spearman_corrcoef(targets: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
  """Returns {"spearman_corrcoef"}, the correlation of the ranks, or NaN if either side is constant."""
  from scipy import stats

  return {"spearman_corrcoef": _correlation(stats.rankdata(targets), stats.rankdata(predictions))}


def _normalize_answer(text: str) -> str:
  """Lowercases a text and removes punctuation, articles and extra spaces, as SQuAD's script does."""
  words = _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
  return " ".join(words)


def squad(
  targets: Sequence[str] | Sequence[Sequence[str]], predictions: Sequence[str]
) -> dict[str, float]:
  """Returns exact match and F1, {"em", "f1"}, in percent; the best-scoring answer counts.

  Args:
    targets: all correct answers of each question, or the only one as a text.
    predictions: one answer per question.

  Raises:
    ValueError: the lengths differ, or there are no questions.
  """
  _check_lengths(targets, predictions)
  references = [[answers] if isinstance(answers, str) else answers for answers in targets]

  def mean_of_best(score: Callable[[str, str], float]) -> float:
    best = [
      max(score(_normalize_answer(answer), _normalize_answer(prediction)) for answer in answers)
      for answers, prediction in zip(references, predictions, strict=True)
    ]
    return 100 * sum(best) / len(best)

  return {"em": mean_of_best(lambda a, b: float(a == b)), "f1": mean_of_best(_f1)}


def lambada(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
  """Returns {"accuracy"}: the percentage of predictions whose first word is the passage's last word.

  Case, punctuation and articles are ignored.
  """
  return accuracy([*map(_normalized_word, targets)], [*map(_normalized_word, predictions)])


def next_word(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
  """Returns {"accuracy"}: the percentage of predictions whose first word equals the target.

  Case matters. Punctuation after the word is ignored, because a prediction continues after it.
  """
  return accuracy([*map(_bare_word, targets)], [*map(_bare_word, predictions)])


def word_perplexity(targets: Sequence[str], scores: Sequence[float]) -> dict[str, float]:
  """Returns {"perplexity"}: exp of the mean of −log p(target); each target counts as one word.

  Args:
    targets: the target words, which are only counted.
    scores: log p(target) of each target, summed over its tokens.
  """
  _check_lengths(targets, scores)
  return {"perplexity": math.exp(-sum(scores) / len(scores))}


def bleu(
  targets: Sequence[str] | Sequence[list[str]], predictions: Sequence[str], tokenizer: str = "intl"
) -> dict[str, float]:
  """Returns {"bleu"} of the corpus, as sacreBLEU computes it with its default (exponential) smoothing.

  Args:
    targets: one reference per prediction, or sacreBLEU's list of reference sets.
    predictions: translations.
    tokenizer: sacreBLEU's tokenizer.
  """
  import sacrebleu

  references: Any = targets if targets and isinstance(targets[0], list) else [targets]
  return {"bleu": sacrebleu.corpus_bleu(predictions, references, tokenize=tokenizer).score}


def chrf(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
  """Returns {"chrf"} of the corpus, as sacreBLEU computes it (Popović 2015)."""
  import sacrebleu

  return {"chrf": sacrebleu.corpus_chrf(predictions, [targets]).score}


def rouge(
  targets: Sequence[str],
  predictions: Sequence[str],
  score_keys: Sequence[str] = ("rouge1", "rouge2", "rougeLsum"),
) -> dict[str, float]:
  """Returns the F measure of each key in percent: the median of its bootstrap samples.

  The bootstrap uses numpy's global random generator, as in T5.
  """
  from rouge_score import rouge_scorer, scoring

  scorer = rouge_scorer.RougeScorer(rouge_types=list(score_keys))
  aggregator = scoring.BootstrapAggregator()
  for target, prediction in zip(targets, predictions, strict=True):
    aggregator.add_scores(scorer.score(_split_sentences(target), _split_sentences(prediction)))
  result = aggregator.aggregate()
  return {key: 100 * result[key].mid.fmeasure for key in score_keys}


def _correlation(targets: Any, predictions: Any) -> float:
  """Returns Pearson's coefficient in percent. SciPy's function would warn about constant values."""
  a, b = np.asarray(targets, np.float64), np.asarray(predictions, np.float64)
  a, b = a - a.mean(), b - b.mean()
  scale = np.sqrt((a @ a) * (b @ b))
  return float(100 * (a @ b) / scale) if scale else float("nan")


def _bare_word(text: str) -> str:
  """Returns the first word without the punctuation after it, or the whole word if it has no letters."""
  word = (text.split() or [""])[0]
  # Apostrophes and hyphens may be inside a word; any other punctuation ends it.
  return re.sub(r"\W+$|(?<=\w)[^\w\s'’-].*$", "", word) or word


def _normalized_word(text: str) -> str:
  """Returns the first normalized word, or the first word as it is if normalizing leaves nothing."""
  words = _normalize_answer(text).split() or text.lower().split()
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


def _split_sentences(text: str) -> str:
  """Puts each sentence on a line, as rougeLsum needs. In tokenized data, " . " ends a sentence."""
  return text.replace(" . ", " .\n")


# The names of the metrics that tasks on files may use: the public functions of this module.
METRICS = sorted(
  name for name, value in globals().items() if inspect.isfunction(value) and name[0] != "_"
)
