"""Metrics: hand-made cases of the official rules, and comparisons with the package t5 if it is installed."""

from __future__ import annotations

import json
import pathlib
import re
import string
from typing import Any

import numpy as np
import pytest

from rosetta_t5.data import task_metrics


@pytest.fixture(scope="module")
def theirs() -> Any:
  return pytest.importorskip("t5.evaluation.metrics", reason="the package t5 is not installed")


def test_squad_ignores_case_articles_punctuation_and_spaces() -> None:
  scores = task_metrics.squad([["The  U.S. Army!"]], ["us army"])
  assert scores == {"em": 100.0, "f1": 100.0}


def test_squad_takes_the_best_answer_and_counts_shared_words() -> None:
  # "a red big dog" and "the dog" without articles share 1 word: precision 1/3, recall 1.
  scores = task_metrics.squad([["cat", "the dog"], ["x"]], ["a red big dog", "x"])
  assert scores["em"] == 50.0
  assert scores["f1"] == pytest.approx((100 * 2 * (1 / 3) / (4 / 3) + 100) / 2)


def test_squad_takes_a_text_as_the_only_answer() -> None:
  assert task_metrics.squad(["the dog", "a cat"], ["dog", "x"]) == {"em": 50.0, "f1": 50.0}


def test_macro_f1_is_scikit_learns_mean_over_the_classes_of_the_targets() -> None:
  sklearn = pytest.importorskip("sklearn.metrics")
  random = np.random.default_rng(0)
  targets, predictions = random.choice([*"abcd"], (2, 50))
  expected = sklearn.f1_score(targets, predictions, labels=np.unique(targets), average="macro")
  found = task_metrics.macro_f1(targets.tolist(), predictions.tolist())["macro_f1"]
  assert found == pytest.approx(100 * expected)
  # "no label" is a wrong prediction and no class: F1 of a is 2/3, of b 0.
  assert task_metrics.macro_f1(["a", "a", "b"], ["a", "no label", "no label"]) == {
    "macro_f1": pytest.approx(100 / 3)
  }


def test_squads_annotators_agree_as_much_as_t5_reports(shared: pathlib.Path) -> None:
  """Compares each question's last answer with the others. An exact copy must have a perfect score."""
  articles = json.loads((shared / "data/squad/dev-v1.1.json").read_text())["data"]
  answers = [
    [a["text"] for a in qa["answers"]]
    for ar in articles
    for p in ar["paragraphs"]
    for qa in p["qas"]
  ][::5]
  assert task_metrics.squad(answers, [a[0] for a in answers]) == {"em": 100.0, "f1": 100.0}
  several = [a for a in answers if len(a) > 1]
  human = task_metrics.squad([a[:-1] for a in several], [a[-1] for a in several])
  official = pytest.importorskip("t5.evaluation.metrics").squad(
    [a[:-1] for a in several], [a[-1] for a in several]
  )
  assert human == pytest.approx(official)
  assert 75 < human["em"] < 90 < human["f1"] + 5


def _official_words(text: str) -> list[str]:
  """Returns the words of an answer that SQuAD's definition compares."""
  lower = "".join(letter for letter in text.lower() if letter not in set(string.punctuation))
  # An article has no letter, digit or underscore next to it.
  return re.sub(r"(?<!\w)(?:an?|the)(?!\w)", " ", lower).split()


def _official_scores(answers: list[list[str]], predictions: list[str]) -> dict[str, float]:
  """Computes SQuAD 1.1's EM and F1 from their definition: the mean over questions of the best answer."""
  exact, overlap = [], []
  for texts, prediction in zip(answers, predictions, strict=True):
    predicted = _official_words(prediction)
    of_answers = []
    for wanted in map(_official_words, texts):
      left = list(wanted)
      hits = sum(word in left and not left.remove(word) for word in predicted)
      of_answers.append(
        (float(predicted == wanted), 2 * hits / (len(predicted) + len(wanted)) if hits else 0.0)
      )
    exact.append(max(em for em, _ in of_answers))
    overlap.append(max(f1 for _, f1 in of_answers))
  return {"em": 100 * sum(exact) / len(exact), "f1": 100 * sum(overlap) / len(overlap)}


@pytest.mark.slow
def test_squads_scores_match_its_definition_on_real_answers(shared: pathlib.Path) -> None:
  """Predictions are correct, taken from the passage, longer, shorter, in capitals, wrong or empty."""
  articles = json.loads((shared / "data/squad/dev-v1.1.json").read_text())["data"]
  answers, predictions = [], []
  for paragraph in (p for article in articles for p in article["paragraphs"]):
    words = paragraph["context"].split()
    for n, question in enumerate(paragraph["qas"]):
      text = question["answers"][-1]["text"]
      start = n % max(1, len(words) - 4)
      distorted = (text, "The " + text.upper() + ".", text + " " + words[0], text[: len(text) // 2])
      distorted += (" ".join(words[start : start + 4]), f"“{text}”, an – a_n – A-n the", "", "the")
      answers.append([answer["text"] for answer in question["answers"]])
      predictions.append(distorted[len(answers) % len(distorted)])
  scores = task_metrics.squad(answers, predictions)
  assert len(answers) == 10570
  assert scores == pytest.approx(_official_scores(answers, predictions), rel=1e-12)
  assert 10 < scores["em"] < scores["f1"] < 90


def test_classification_metrics_are_t5s(theirs: Any) -> None:
  random = np.random.default_rng(0)
  targets, predictions = random.integers(0, 2, 50).tolist(), random.integers(-1, 2, 50).tolist()
  assert task_metrics.accuracy(targets, predictions) == pytest.approx(
    theirs.accuracy(targets, predictions)
  )
  ours = task_metrics.f1_score_with_invalid(targets, list(predictions))
  assert ours == pytest.approx(theirs.f1_score_with_invalid(targets, list(predictions)))
  matthews = theirs.sklearn_metrics_wrapper(
    "matthews_corrcoef", metric_post_process_fn=lambda x: 100 * x
  )
  ours = task_metrics.matthews_corrcoef(targets, predictions)
  assert ours == pytest.approx(matthews(targets, predictions))


def test_correlations_are_t5s_with_ties(theirs: Any) -> None:
  random = np.random.default_rng(1)
  targets, predictions = (np.round(random.uniform(0, 5, 60) * 5) / 5 for _ in range(2))
  for name in ("pearson_corrcoef", "spearman_corrcoef"):
    ours = getattr(task_metrics, name)(targets, predictions)
    assert ours == pytest.approx(getattr(theirs, name)(targets, predictions))


def test_chrf_is_the_mean_of_the_f_scores_of_character_n_grams() -> None:
  pytest.importorskip("sacrebleu")
  # Of "abc" and "abd", 2 of 3 characters, 1 of 2 pairs and 0 of 1 triples agree.
  assert task_metrics.chrf(["abc"], ["abd"]) == {"chrf": pytest.approx(100 * (2 / 3 + 1 / 2) / 3)}


def test_bleu_and_rouge_are_t5s(theirs: Any) -> None:
  targets = ["The dog bit the man .", "It was not unexpected . He ran ."]
  predictions = ["The dog bit a man .", "It was unexpected . He ran away ."]
  assert task_metrics.bleu(targets, predictions) == theirs.bleu(targets, predictions)
  np.random.seed(0)
  expected = theirs.rouge(targets, predictions)
  np.random.seed(0)
  assert task_metrics.rouge(targets, predictions) == expected


def test_a_constant_prediction_has_no_correlation_and_no_f1() -> None:
  assert task_metrics.matthews_corrcoef([0, 1], [0, 0]) == {"matthews_corrcoef": 0.0}
  assert task_metrics.f1_score_with_invalid([0, 0], [0, 0]) == {"f1": 0.0}
  assert np.isnan(task_metrics.pearson_corrcoef([1.0, 2.0], [3.0, 3.0])["pearson_corrcoef"])


def test_lambada_compares_the_first_word() -> None:
  assert task_metrics.lambada(["Bob", "home"], ['bob," he said', "house"]) == {"accuracy": 50.0}


@pytest.mark.parametrize(
  "metric", [task_metrics.squad, task_metrics.accuracy, task_metrics.lambada]
)
def test_a_metric_without_predictions_is_refused(metric: Any) -> None:
  with pytest.raises(ValueError, match="got 0 targets and 0 predictions"):
    metric([], [])


def test_the_next_word_is_compared_exactly_but_without_following_punctuation() -> None:
  targets = ["Bob", "home", "don't", '"army', "Bob", "win"]
  predictions = ["Bob,” he said", " home.", "don't you", '"army"', "bob", "winning"]
  assert task_metrics.next_word(targets, predictions) == {"accuracy": pytest.approx(100 * 4 / 6)}


def test_word_perplexity_counts_each_target_as_one_word() -> None:
  scores = [np.log(0.5), np.log(0.125)]
  assert task_metrics.word_perplexity(["a", "b"], scores) == {"perplexity": pytest.approx(4.0)}
