"""T5's text formats: how a benchmark's example becomes inputs and targets (Raffel et al. 2020, app. D).

Each function converts one example of tensors. Every space matters, because the public checkpoints were
trained on exactly these texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_tensorflow

Example = Mapping[str, Any]

LANGUAGES = {"de": "German", "en": "English", "fr": "French", "ro": "Romanian"}
UNLABELLED = "<unk>"  # the target of test examples, which have no label


def text_as_targets(example: Example) -> Example:
  """Keeps the text alone, for objectives that make the inputs from it."""
  return {"targets": example["text"]}


def glue(example: Example, benchmark: str, labels: Sequence[str]) -> Example:
  """Returns "mnli hypothesis: … premise: …" → "entailment", with the columns in alphabetical order."""
  tf = import_tensorflow()
  columns = sorted(set(example) - {"label", "idx"})
  parts = [part for name in columns for part in (f"{name}:", example[name])]
  label = tf.cast(example["label"], tf.int64)
  return {
    "idx": example["idx"],
    "inputs": tf.strings.join([benchmark, *parts], separator=" "),
    "targets": tf.gather(tf.constant([UNLABELLED, *labels]), label + 1),
  }


def stsb(example: Example) -> Example:
  """Returns two sentences → their similarity, 0.0 to 5.0 in steps of 0.2."""
  tf = import_tensorflow()
  parts = ["stsb sentence1:", example["sentence1"], "sentence2:", example["sentence2"]]
  return {
    "inputs": tf.strings.join(parts, separator=" "),
    "targets": tf.strings.as_string(tf.round(example["label"] * 5) / 5, precision=1),
    "idx": example["idx"],
  }


def squad(example: Example, include_context: bool = True) -> Example:
  """Returns "question: … context: …" → the first answer, with spaces around punctuation."""
  answers = _space_punctuation(example["answers"]["text"])
  question = _space_punctuation(example["question"])
  context = _space_punctuation(example["context"])
  parts = ["question:", question, "context:", context]
  return {
    "inputs": _join(parts if include_context else ["squad trivia question:", question]),
    "targets": answers[0],
    "id": example["id"],
    "context": context,
    "question": question,
    "answers": answers,
  }


def translate(example: Example, source: str, target: str) -> Example:
  """Returns "translate English to German: …" → the translation."""
  prefix = f"translate {LANGUAGES[source]} to {LANGUAGES[target]}: "
  inputs = import_tensorflow().strings.join([prefix, example[source]])
  return {"inputs": inputs, "targets": example[target]}


def summarize(example: Example, article: str, summary: str) -> Example:
  """Returns "summarize: …" → the summary."""
  inputs = import_tensorflow().strings.join(["summarize:", example[article]], separator=" ")
  return {"inputs": inputs, "targets": example[summary]}


def last_word(example: Example, sentinel: str = " <extra_id_0>", before_word: str = "") -> Example:
  """Returns LAMBADA's passage with `sentinel` as its last word → `before_word` and that word."""
  tf = import_tensorflow()
  text = tf.strings.strip(example["text"])
  word = tf.strings.regex_replace(text, r"(?s)^.*\s", "")
  passage = tf.strings.regex_replace(text, r"\s\S+$", "")
  return {
    "inputs": tf.strings.join([passage, sentinel]),
    "targets": tf.strings.join([before_word, word]),
  }


def _space_punctuation(text: Any) -> Any:
  regex_replace = import_tensorflow().strings.regex_replace
  return regex_replace(regex_replace(text, r"([[:punct:]])", r" \1 "), r"\s+", " ")


def _join(parts: Sequence[Any]) -> Any:
  """Joins the parts with single spaces."""
  strings = import_tensorflow().strings
  return strings.regex_replace(strings.join(parts, separator=" "), r"\s+", " ")
