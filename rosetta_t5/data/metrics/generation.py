"""BLEU by sacreBLEU and ROUGE by rouge-score, with the settings of T5's paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def bleu(
  targets: Sequence[str] | Sequence[list[str]], predictions: Sequence[str], tokenizer: str = "intl"
) -> dict[str, float]:
  """Returns {"bleu"} of the corpus: sacreBLEU with its default, exponential smoothing.

  Args:
    targets: one reference per prediction, or sacreBLEU's list of reference sets.
    predictions: translations.
    tokenizer: sacreBLEU's tokenizer.
  """
  import sacrebleu

  references: Any = targets if targets and isinstance(targets[0], list) else [targets]
  return {"bleu": sacrebleu.corpus_bleu(predictions, references, tokenize=tokenizer).score}


def rouge(
  targets: Sequence[str],
  predictions: Sequence[str],
  score_keys: Sequence[str] = ("rouge1", "rouge2", "rougeLsum"),
) -> dict[str, float]:
  """Returns the F measures in percent, each the middle of its bootstrap interval.

  The bootstrap uses numpy's global random generator, as in T5.
  """
  from rouge_score import rouge_scorer, scoring

  scorer = rouge_scorer.RougeScorer(rouge_types=list(score_keys))
  aggregator = scoring.BootstrapAggregator()
  for target, prediction in zip(targets, predictions, strict=True):
    aggregator.add_scores(scorer.score(_split_sentences(target), _split_sentences(prediction)))
  result = aggregator.aggregate()
  return {key: 100 * result[key].mid.fmeasure for key in score_keys}


def _split_sentences(text: str) -> str:
  """Puts each sentence on its own line for rougeLsum. The data is tokenized: " . " ends a sentence."""
  return text.replace(" . ", " .\n")
