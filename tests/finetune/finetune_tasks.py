"""SQuAD and MNLI in small: files in their formats, written here, and T5's tasks on them."""

from __future__ import annotations

import functools
import json
import os
import pathlib

import seqio
import tensorflow as tf
from t5.data import postprocessors, preprocessors
from t5.evaluation import metrics

from rosetta_t5.data.span_corruption import span_corruption

FOLDER = pathlib.Path(os.environ["FINETUNE_DATA"])
LABELS = ["entailment", "neutral", "contradiction"]
_NAMES = ["Ada", "Bo", "Cy", "Di", "Eli", "Fay", "Gus", "Hal"]
_CITIES = ["Oslo", "Rome", "Lima", "Cairo", "Kyoto", "Quito", "Paris", "Delhi"]
_THINGS = ["a cat", "a dog", "a boat", "a red car", "a harp", "two hens", "a kite", "an old map"]


def write() -> None:
  """Writes 64 examples of each kind: SQuAD's JSON, MNLI's tab-separated lines, plain text."""
  FOLDER.mkdir(parents=True, exist_ok=True)
  articles, pairs, text = [], ["pairID\tgold_label\tsentence1\tsentence2"], []
  for n in range(64):
    name, city, thing = _NAMES[n % 8], _CITIES[n // 8], _THINGS[(n * 5 + n // 8) % 8]
    context = f"{name} of {city} has {thing}."
    question = {"id": str(n), "question": f"What has {name}?", "answers": [{"text": thing}] * 2}
    articles.append({"paragraphs": [{"context": context, "qas": [question]}]})
    pairs.append(f"{n}\t{LABELS[(n * 7 + n // 8) % 3]}\t{context}\t{name} is in {city}.")
    text.append(context)
  (FOLDER / "train-v1.1.json").write_text(json.dumps({"data": articles}))
  (FOLDER / "train.tsv").write_text("\n".join(pairs) + "\n")
  (FOLDER / "text.txt").write_text("\n".join(text) + "\n")


def _squad(split: str, shuffle_files: bool = False, seed: int | None = None) -> tf.data.Dataset:
  articles = json.loads((FOLDER / "train-v1.1.json").read_text())["data"]
  rows = [(p, qa) for article in articles for p in article["paragraphs"] for qa in p["qas"]]
  return tf.data.Dataset.from_tensor_slices(
    {
      "id": [qa["id"] for _, qa in rows],
      "context": [paragraph["context"] for paragraph, _ in rows],
      "question": [qa["question"] for _, qa in rows],
      "answers": {"text": [[answer["text"] for answer in qa["answers"]] for _, qa in rows]},
    }
  )


def _mnli(split: str, shuffle_files: bool = False, seed: int | None = None) -> tf.data.Dataset:
  _, *lines = (FOLDER / "train.tsv").read_text().splitlines()
  numbers, labels, premises, hypotheses = zip(*(line.split("\t") for line in lines), strict=True)
  return tf.data.Dataset.from_tensor_slices(
    {
      "idx": [int(number) for number in numbers],
      "label": [LABELS.index(label) for label in labels],
      "premise": list(premises),
      "hypothesis": list(hypotheses),
    }
  )


_FEATURE = seqio.Feature(seqio.ByteVocabulary(), add_eos=True)
_ADD = functools.partial(
  seqio.TaskRegistry.add, output_features={"inputs": _FEATURE, "targets": _FEATURE}
)
_TOKENS = [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos]
_SPLITS = ["train", "validation", "test"]
_ADD(
  "small_text",
  source=seqio.TextLineDataSource(dict.fromkeys(_SPLITS, str(FOLDER / "text.txt"))),
  preprocessors=[
    lambda lines: lines.map(lambda line: {"targets": line}),
    seqio.preprocessors.tokenize,
    span_corruption,
    seqio.preprocessors.append_eos,
  ],
)
_ADD(
  "small_squad",
  source=seqio.FunctionDataSource(_squad, splits=_SPLITS),
  preprocessors=[preprocessors.squad, *_TOKENS],
  postprocess_fn=postprocessors.qa,
  metric_fns=[metrics.squad],
)
_ADD(
  "small_mnli",
  source=seqio.FunctionDataSource(_mnli, splits=_SPLITS),
  preprocessors=[
    functools.partial(
      preprocessors.glue,
      benchmark_name="mnli",
      label_names=LABELS,
      feature_names=("hypothesis", "premise"),
    ),
    *_TOKENS,
  ],
  postprocess_fn=functools.partial(postprocessors.string_label_to_class_id, label_classes=LABELS),
  metric_fns=[metrics.accuracy],
)
