"""Writes SQuAD, MNLI and the Pile in small, as TFDS has them, and a vocabulary for their words.

Usage: python write_data.py FOLDER PIECES [FOLDER_OF_REAL_DATA]
"""

from __future__ import annotations

import csv
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow_datasets as tfds

from rosetta_t5.data.vocabularies.sentencepiece_models import train_sentencepiece

_NAMES = ["Ada", "Bo", "Cy", "Di", "Eli", "Fay", "Gus", "Hal"]
_CITIES = ["Oslo", "Rome", "Lima", "Cairo", "Kyoto", "Quito", "Paris", "Delhi"]
_THINGS = ["a cat", "a dog", "a boat", "a red car", "a harp", "two hens", "a kite", "an old map"]

Splits = Mapping[str, Sequence[Mapping[str, Any]]]


def _write(info: tfds.core.DatasetInfo, splits: Splits) -> None:
  pathlib.Path(info.data_dir).mkdir(parents=True)
  # 64 examples in three shards, as large datasets have several.
  writer = tfds.core.SequentialWriter(ds_info=info, max_examples_per_shard=25)
  writer.initialize_splits(list(splits))
  writer.add_examples({split: list(examples) for split, examples in splits.items()})
  writer.close_all()


def _pile(folder: pathlib.Path) -> tfds.core.DatasetInfo:
  # TFDS has no code for the Pile: its folder says all.
  identity = tfds.core.dataset_info.DatasetIdentity(
    name="the_pile",
    version=tfds.core.Version("1.0.0"),
    data_dir=str(folder / "the_pile/1.0.0"),
    module_name="the_pile",
  )
  return tfds.core.DatasetInfo(
    builder=identity, features=tfds.features.FeaturesDict({"text": tfds.features.Text()})
  )


def _made_up() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """Returns 64 rows of SQuAD and 64 of MNLI, of a few words each."""
  questions, pairs = [], []
  for n in range(64):
    name, city, thing = _NAMES[n % 8], _CITIES[n // 8], _THINGS[(n * 5 + n // 8) % 8]
    context = f"{name} of {city} has {thing}."
    answers = {"text": [thing] * 2, "answer_start": [context.index(thing)] * 2}
    question = {"id": str(n), "title": city, "context": context, "question": f"What has {name}?"}
    questions.append({**question, "answers": answers})
    pair = {"premise": context, "hypothesis": f"{name} is in {city}.", "idx": n}
    pairs.append({**pair, "label": (n * 7 + n // 8) % 3})
  return questions, pairs


def _real(folder: pathlib.Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """Returns the first questions of SQuAD's first 64 short passages, and MNLI's first 64 rows."""
  questions, pairs = [], []
  articles = json.loads((folder / "squad/train_subset-v1.1.json").read_text())["data"]
  for paragraph in (paragraph for article in articles for paragraph in article["paragraphs"]):
    for row in paragraph["qas"][:1] if len(paragraph["context"]) < 460 else []:
      answers = {key: [it[key] for it in row["answers"]] for key in ("text", "answer_start")}
      question = {"id": row["id"], "title": "", "context": paragraph["context"]}
      questions.append({**question, "question": row["question"], "answers": answers})
  labels = ["entailment", "neutral", "contradiction"]
  with (folder / "mnli/mnli_dev_matched_gold.tsv").open() as file:
    rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    for n, row in zip(range(64), rows, strict=False):
      pair = {"premise": row["premise"], "hypothesis": row["hypothesis"], "idx": n}
      pairs.append({**pair, "label": labels.index(row["gold_label"])})
  return questions[:64], pairs


def main(folder: pathlib.Path, pieces: int, real: pathlib.Path | None = None) -> None:
  """Writes 64 examples of each kind; what is learnt is also what is evaluated."""
  questions, pairs = _real(real) if real else _made_up()
  texts = [{"text": question["context"]} for question in questions]

  squad = tfds.builder("squad/v1.1:3.0.0", data_dir=str(folder)).info
  _write(squad, {"train": questions, "validation": questions})
  mnli = tfds.builder("glue/mnli:2.0.0", data_dir=str(folder)).info
  _write(mnli, dict.fromkeys(("train", "validation_matched", "validation_mismatched"), pairs))
  _write(_pile(folder), {"train": texts * 4, "validation": texts * 4})
  words = [question[key] for question in questions for key in ("context", "question")]
  words += [pair[key] for pair in pairs for key in ("premise", "hypothesis")]
  words += ["question: context: mnli premise: hypothesis: entailment neutral contradiction"] * 8
  (folder / "vocabulary.model").write_bytes(train_sentencepiece(words, pieces))


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), *map(pathlib.Path, sys.argv[3:]))
