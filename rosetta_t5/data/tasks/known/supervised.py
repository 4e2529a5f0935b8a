"""SQuAD (Rajpurkar et al. 2016), translation (WMT) and summaries (CNN/Daily Mail) as T5 has them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rosetta_t5.data import metrics
from rosetta_t5.data.reading import Layout
from rosetta_t5.data.reading.bad_examples import BadExample
from rosetta_t5.data.tasks import postprocessing, text_formats
from rosetta_t5.data.tasks.task_recipe import LocalFiles, Located, TaskRecipe, pick_columns

_BETWEEN_ANSWERS = "\x1f"  # ASCII's unit separator: no answer has one


def read_squad(path: str, layout: Layout) -> Iterator[Located]:
  """Yields the questions of SQuAD's own JSON, all answers of each in one text."""
  try:
    with open(path, encoding="utf-8") as file:
      articles = json.load(file)["data"]
  except (ValueError, KeyError, TypeError) as error:
    yield 1, BadExample(path, 1, f"no SQuAD file, which is JSON with 'data': {error!r}"[:200])
    return
  place = 0
  for article in articles:
    for paragraph in article["paragraphs"]:
      for question in paragraph["qas"]:
        place += 1
        answers = [answer["text"] for answer in question["answers"]]
        yield (
          place,
          {
            "id": question["id"],
            "question": question["question"],
            "context": paragraph["context"],
            "answers": _BETWEEN_ANSWERS.join(answers),
          },
        )


def _squad_example(texts: Mapping[str, Any]) -> Mapping[str, Any]:
  from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_tensorflow

  answers = import_tensorflow().strings.split(texts["answers"], _BETWEEN_ANSWERS)
  return {**texts, "answers": {"text": answers}}


SQUAD_FILES = LocalFiles(
  folder="squad",
  splits={"train": ("train*-v1.1.json",), "validation": ("dev-v1.1.json",)},
  pick=pick_columns(id="id", question="question", context="context", answers="answers"),
  names=("id", "question", "context", "answers"),
  to_example=_squad_example,
  read=read_squad,
)


def _squad(include_context: bool = True) -> TaskRecipe:
  return TaskRecipe(
    "squad/v1.1:3.0.0",
    text_formats.squad(include_context),
    SQUAD_FILES,
    postprocess=postprocessing.answers,
    metrics=(metrics.squad,),
    where="SQuAD: train-v1.1.json and dev-v1.1.json at rajpurkar.github.io/SQuAD-explorer",
  )


def _paired_files(folder: str, first: str, second: str) -> LocalFiles:
  endings = ("*.jsonl*", "*.tsv", "*.parquet")
  return LocalFiles(
    folder=folder,
    splits={s: tuple(s + e for e in endings) for s in ("train", "validation", "test")},
    pick=pick_columns(**{first: first, second: second}),
    names=(first, second),
  )


def _translation(dataset: str, pair: str, source: str, target: str) -> TaskRecipe:
  return TaskRecipe(
    f"{dataset}/{pair}:1.0.0",
    text_formats.translate(source, target),
    _paired_files(f"{dataset}/{pair}", source, target),
    metrics=(metrics.bleu,),
    where=f"WMT: tfds build {dataset}/{pair}, on a machine that reaches statmt.org",
  )


# Of T5's paper: all from English. (Its task names give source, then target.)
_WMT = {
  "wmt14_ende_v003": ("wmt14_translate", "de-en"),
  "wmt14_enfr_v003": ("wmt14_translate", "fr-en"),
  "wmt15_enfr_v003": ("wmt15_translate", "fr-en"),
  "wmt16_enro_v003": ("wmt16_translate", "ro-en"),
  "wmt19_ende_v003": ("wmt19_translate", "de-en"),
  "wmt_t2t_ende_v003": ("wmt_t2t_translate", "de-en"),
}

TASKS = {
  "squad_v010_allanswers": _squad(),
  "squad_v010_context_free": _squad(include_context=False),
  "cnn_dailymail_v002": TaskRecipe(
    "cnn_dailymail:3.4.0",
    text_formats.summarize("article", "highlights"),
    _paired_files("cnn_dailymail", "article", "highlights"),
    metrics=(metrics.rouge,),
    where="CNN/Daily Mail: tfds build cnn_dailymail",
  ),
  **{
    name: _translation(dataset, pair, "en", pair.removesuffix("-en"))
    for name, (dataset, pair) in _WMT.items()
  },
}
