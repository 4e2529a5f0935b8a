"""BLEU by sacreBLEU and ROUGE by rouge-score, with the settings of T5's paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ROUGE_KEYS = ("rouge1", "rouge2", "rougeLsum")


def bleu(
  targets: Sequence[str] | Sequence[list[str]], predictions: Sequence[str], tokenizer: str = "intl"
) -> dict[str, float]:
  """Returns {"bleu"} of the corpus: sacreBLEU with exponential smoothing.

  Args:
    targets: one reference a prediction; or a list for each set of references, as sacreBLEU has it.
    predictions: translations.
    tokenizer: sacreBLEU's.
  """
  import sacrebleu

  references: Any = targets if targets and isinstance(targets[0], list) else [targets]
  score = sacrebleu.corpus_bleu(
    predictions,
    references,
    smooth_method="exp",
    smooth_value=0.0,
    force=False,
    lowercase=False,
    tokenize=tokenizer,
    use_effective_order=False,
  )
  return {"bleu": score.score}


def rouge(
  targets: Sequence[str],
  predictions: Sequence[str],
  score_keys: Sequence[str] = ROUGE_KEYS,
) -> dict[str, float]:
  """Returns the middle of each score's bootstrap interval, F measures in percent.

  The interval is drawn by numpy's global generator, as in T5.
  """
  from rouge_score import rouge_scorer, scoring

  scorer = rouge_scorer.RougeScorer(rouge_types=list(score_keys))
  aggregator = scoring.BootstrapAggregator()
  for target, prediction in zip(targets, predictions, strict=True):
    aggregator.add_scores(
      scorer.score(_one_sentence_a_line(target), _one_sentence_a_line(prediction))
    )
  result = aggregator.aggregate()
  return {key: 100 * result[key].mid.fmeasure for key in score_keys}


def _one_sentence_a_line(text: str) -> str:
  """rougeLsum takes lines for sentences; the data has them tokenised, " . " between them."""
  return text.replace(" . ", " .\n")
