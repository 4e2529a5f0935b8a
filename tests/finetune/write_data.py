"""Writes SQuAD, MNLI and the Pile in small, as TFDS has them, and a vocabulary for their words.

Usage: python write_data.py FOLDER
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow_datasets as tfds

from rosetta_t5.data.sentencepiece_training import train_sentencepiece

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


def main(folder: pathlib.Path) -> None:
  """Writes 64 examples of each kind; what is learnt is also what is evaluated."""
  questions, pairs, texts = [], [], []
  for n in range(64):
    name, city, thing = _NAMES[n % 8], _CITIES[n // 8], _THINGS[(n * 5 + n // 8) % 8]
    context = f"{name} of {city} has {thing}."
    answers = {"text": [thing] * 2, "answer_start": [context.index(thing)] * 2}
    question = {"id": str(n), "title": city, "context": context, "question": f"What has {name}?"}
    questions.append({**question, "answers": answers})
    pair = {"premise": context, "hypothesis": f"{name} is in {city}.", "idx": n}
    pairs.append({**pair, "label": (n * 7 + n // 8) % 3})
    texts.append({"text": context})

  squad = tfds.builder("squad/v1.1:3.0.0", data_dir=str(folder)).info
  _write(squad, {"train": questions, "validation": questions})
  mnli = tfds.builder("glue/mnli:2.0.0", data_dir=str(folder)).info
  _write(mnli, dict.fromkeys(("train", "validation_matched", "validation_mismatched"), pairs))
  _write(_pile(folder), {"train": texts * 4, "validation": texts * 4})
  words = [text["text"] for text in texts] + [question["question"] for question in questions]
  words += ["question: context: mnli premise: hypothesis: entailment neutral contradiction"] * 8
  (folder / "vocabulary.model").write_bytes(train_sentencepiece(words, 70))


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
