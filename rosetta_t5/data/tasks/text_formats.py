"""T5's text formats: how examples of each benchmark become inputs and targets (Raffel et al., app. D).

Every function here makes one: it returns dataset → dataset. Spaces count, for the public
checkpoints were trained on exactly these texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_tensorflow

if TYPE_CHECKING:
  import tensorflow as tf

Example = Mapping[str, Any]
Preprocess = Callable[["tf.data.Dataset"], "tf.data.Dataset"]

LANGUAGES = {"de": "German", "en": "English", "fr": "French", "ro": "Romanian"}
NO_LABEL = "<unk>"  # of test sets


def text_as_targets(column: str = "text") -> Preprocess:
  """Unlabelled text, for objectives that make their inputs from it."""
  return _each(lambda example: {"targets": example[column]})


def glue(benchmark: str, labels: Sequence[str], columns: Sequence[str] | None = None) -> Preprocess:
  """ "mnli hypothesis: … premise: …" → "entailment": columns by name, in alphabetical order."""

  def convert(example: Example) -> Example:
    tf = import_tensorflow()
    names = columns or sorted(set(example) - {"label", "idx"})
    parts = [part for name in names for part in (f"{name}:", example[name])]
    label = tf.cast(example["label"], tf.int64)
    known = tf.gather(tf.constant([NO_LABEL, *labels]), label + 1)
    return {
      "idx": example["idx"],
      "inputs": tf.strings.join([benchmark, *parts], separator=" "),
      "targets": known,
    }

  return _each(convert)


def stsb() -> Preprocess:
  """Two sentences → how like they are, 0.0 to 5.0 in steps of 0.2."""

  def convert(example: Example) -> Example:
    tf = import_tensorflow()
    parts = ["stsb sentence1:", example["sentence1"], "sentence2:", example["sentence2"]]
    return {
      "inputs": tf.strings.join(parts, separator=" "),
      "targets": tf.strings.as_string(tf.round(example["label"] * 5) / 5, precision=1),
      "idx": example["idx"],
    }

  return _each(convert)


def squad(include_context: bool = True) -> Preprocess:
  """ "question: … context: …" → the first answer, spaces around punctuation; all answers are kept."""

  def convert(example: Example) -> Example:
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

  return _each(convert)


def translate(source: str, target: str) -> Preprocess:
  """ "translate English to German: …" → the translation."""
  prefix = f"translate {LANGUAGES[source]} to {LANGUAGES[target]}: "

  def convert(example: Example) -> Example:
    inputs = import_tensorflow().strings.join([prefix, example[source]])
    return {"inputs": inputs, "targets": example[target]}

  return _each(convert)


def summarize(article: str, summary: str) -> Preprocess:
  """ "summarize: …" → the summary."""

  def convert(example: Example) -> Example:
    inputs = import_tensorflow().strings.join(["summarize:", example[article]], separator=" ")
    return {"inputs": inputs, "targets": example[summary]}

  return _each(convert)


def last_word(
  column: str = "text", sentinel: str = " <extra_id_0>", before_word: str = ""
) -> Preprocess:
  """LAMBADA: a passage whose last word is replaced by `sentinel` → that word, after `before_word`."""

  def convert(example: Example) -> Example:
    tf = import_tensorflow()
    text = tf.strings.strip(example[column])
    word = tf.strings.regex_replace(text, r"(?s)^.*\s", "")
    passage = tf.strings.regex_replace(text, r"\s\S+$", "")
    return {
      "inputs": tf.strings.join([passage, sentinel]),
      "targets": tf.strings.join([before_word, word]),
    }

  return _each(convert)


def _space_punctuation(text: Any) -> Any:
  regex_replace = import_tensorflow().strings.regex_replace
  return regex_replace(regex_replace(text, r"([[:punct:]])", r" \1 "), r"\s+", " ")


def _join(parts: Sequence[Any]) -> Any:
  """Joins by single spaces."""
  strings = import_tensorflow().strings
  return strings.regex_replace(strings.join(parts, separator=" "), r"\s+", " ")


def _each(convert: Callable[[Example], Example]) -> Preprocess:
  def preprocess(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset.map(convert, num_parallel_calls=import_tensorflow().data.AUTOTUNE)

  return preprocess
