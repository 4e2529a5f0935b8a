"""SQuAD (Rajpurkar et al. 2016), translation (WMT) and summaries (CNN/Daily Mail) in T5's formats."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from rosetta_t5.data import task_metrics
from rosetta_t5.data.reading import BadExample, ReadOptions
from rosetta_t5.data.tasks import text_formats
from rosetta_t5.data.tasks.task_spec import LocalFiles, TaskSpec
from rosetta_t5.data.tensorflow_import import tf

_SEPARATOR = "\x1f"  # ASCII's unit separator, which no answer contains


def read_squad(path: str, options: ReadOptions) -> Iterator[tuple[int, Any]]:
  """Yields (number, question) of SQuAD's JSON, with the answers of a question joined to one text."""
  try:
    with open(path, encoding="utf-8") as file:
      articles = json.load(file)["data"]
  except (ValueError, KeyError, TypeError) as error:
    yield 1, BadExample(path, 1, f"not SQuAD's JSON with the key 'data': {error!r}"[:200])
    return
  paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
  questions = [(question, text["context"]) for text in paragraphs for question in text["qas"]]
  for number, (question, context) in enumerate(questions, 1):
    answers = _SEPARATOR.join(answer["text"] for answer in question["answers"])
    texts = {"id": question["id"], "question": question["question"]}
    yield number, {**texts, "context": context, "answers": answers}


def _squad_example(texts: Mapping[str, Any]) -> Mapping[str, Any]:
  answers = tf.strings.split(texts["answers"], _SEPARATOR)
  return {**texts, "answers": {"text": answers}}


_SQUAD = TaskSpec(
  "squad/v1.1:3.0.0",
  text_formats.squad,
  LocalFiles(
    folder="squad",
    splits={"train": ("train*-v1.1.json",), "validation": ("dev-v1.1.json",)},
    names=("id", "question", "context", "answers"),
    to_example=_squad_example,
    read=read_squad,
  ),
  postprocess=text_formats.squad_answers,
  metrics=(task_metrics.squad,),
  source_hint="SQuAD: train-v1.1.json and dev-v1.1.json at rajpurkar.github.io/SQuAD-explorer",
)


def _paired_files(folder: str, first: str, second: str) -> LocalFiles:
  splits = {
    split: (f"{split}*.jsonl*", f"{split}*.tsv", f"{split}*.parquet")
    for split in ("train", "validation", "test")
  }
  return LocalFiles(folder, splits, names=(first, second))


def _translation(dataset: str, pair: str) -> TaskSpec:
  """Returns a task that translates from English; `pair` is TFDS's name, such as "de-en"."""
  target = pair.removesuffix("-en")
  return TaskSpec(
    f"{dataset}/{pair}:1.0.0",
    functools.partial(text_formats.translate, source="en", target=target),
    _paired_files(f"{dataset}/{pair}", "en", target),
    metrics=(task_metrics.bleu,),
    source_hint=f"WMT: tfds build {dataset}/{pair}, on a machine that reaches statmt.org",
  )


TASKS = {
  "squad_v010_allanswers": _SQUAD,
  "squad_v010_context_free": dataclasses.replace(
    _SQUAD, text_format=functools.partial(text_formats.squad, include_context=False)
  ),
  "cnn_dailymail_v002": TaskSpec(
    "cnn_dailymail:3.4.0",
    functools.partial(text_formats.summarize, article="article", summary="highlights"),
    _paired_files("cnn_dailymail", "article", "highlights"),
    metrics=(task_metrics.rouge,),
    source_hint="CNN/Daily Mail: tfds build cnn_dailymail",
  ),
  # T5 translates from English. Its task names have the source language first, TFDS has it last.
  "wmt14_ende_v003": _translation("wmt14_translate", "de-en"),
  "wmt14_enfr_v003": _translation("wmt14_translate", "fr-en"),
  "wmt15_enfr_v003": _translation("wmt15_translate", "fr-en"),
  "wmt16_enro_v003": _translation("wmt16_translate", "ro-en"),
  "wmt19_ende_v003": _translation("wmt19_translate", "de-en"),
  "wmt_t2t_ende_v003": _translation("wmt_t2t_translate", "de-en"),
}
