"""T5's text formats: a benchmark's example as inputs and targets (Raffel et al. 2020, app. D), and back.

The functions of an example receive and return tensors. Every space matters, because the public checkpoints
were trained on exactly these texts. The postprocessors at the end convert a model's text to what the metrics
compare: SeqIO calls each with the decoded text, and passes the example and `is_target` by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rosetta_t5.data.tensorflow_import import tf

Example = Mapping[str, Any]

LANGUAGES = {"de": "German", "en": "English", "fr": "French", "ro": "Romanian"}
UNLABELLED = "<unk>"  # the target of test examples, which have no label


def text_as_targets(example: Example) -> Example:
  """Returns the text as targets, for objectives that make the inputs from them."""
  return {"targets": example["text"]}


def glue(example: Example, benchmark: str, labels: Sequence[str]) -> Example:
  """Converts a classified text to "mnli hypothesis: … premise: …" and "entailment".

  The columns are in alphabetical order.
  """
  columns = sorted(set(example) - {"label", "idx"})
  parts = [part for name in columns for part in (f"{name}:", example[name])]
  label = tf.cast(example["label"], tf.int64)
  return {
    "idx": example["idx"],
    "inputs": tf.strings.join([benchmark, *parts], separator=" "),
    "targets": tf.gather(tf.constant([UNLABELLED, *labels]), label + 1),
  }


def stsb(example: Example) -> Example:
  """Converts two sentences to "stsb sentence1: … sentence2: …" and their similarity, such as "3.8".

  The similarity is between 0.0 and 5.0, in steps of 0.2.
  """
  parts = ["stsb sentence1:", example["sentence1"], "sentence2:", example["sentence2"]]
  return {
    "inputs": tf.strings.join(parts, separator=" "),
    "targets": tf.strings.as_string(tf.round(example["label"] * 5) / 5, precision=1),
    "idx": example["idx"],
  }


def squad(example: Example, include_context: bool = True) -> Example:
  """Converts a question to "question: … context: …" and the first answer.

  Punctuation is surrounded by spaces.
  """
  answers = _space_punctuation(example["answers"]["text"])
  question = _space_punctuation(example["question"])
  context = _space_punctuation(example["context"])
  parts = ["squad trivia question:", question]
  if include_context:
    parts = ["question:", question, "context:", context]
  text = tf.strings.join(parts, separator=" ")
  return {
    "inputs": tf.strings.regex_replace(text, r"\s+", " "),
    "targets": answers[0],
    "id": example["id"],
    "context": context,
    "question": question,
    "answers": answers,
  }


def translate(example: Example, source: str, target: str) -> Example:
  """Converts a pair of sentences to "translate English to German: …" and the translation."""
  prefix = f"translate {LANGUAGES[source]} to {LANGUAGES[target]}: "
  inputs = tf.strings.join([prefix, example[source]])
  return {"inputs": inputs, "targets": example[target]}


def summarize(example: Example, article: str, summary: str) -> Example:
  """Converts an article to "summarize: …" and its summary."""
  inputs = tf.strings.join(["summarize:", example[article]], separator=" ")
  return {"inputs": inputs, "targets": example[summary]}


def last_word(example: Example, sentinel: str = " <extra_id_0>", before_word: str = "") -> Example:
  """Splits a passage of LAMBADA into the text before its last word and the word.

  Args:
    example: the passage as "text".
    sentinel: appended to the text before the word.
    before_word: put before the word.
  """
  text = tf.strings.strip(example["text"])
  word = tf.strings.regex_replace(text, r"(?s)^.*\s", "")
  passage = tf.strings.regex_replace(text, r"\s\S+$", "")
  inputs, targets = tf.strings.join([passage, sentinel]), tf.strings.join([before_word, word])
  return {"inputs": inputs, "targets": targets}


def string_to_float(text: str, default: float = -1.0, **_: Any) -> float:
  """Returns the text as a number, or `default` if it is not one."""
  try:
    return float(text)
  except ValueError:
    return default


def label_to_class(text: str, label_classes: Sequence[str], **_: Any) -> int:
  """Returns the index of a label, or -1 for any other text."""
  return label_classes.index(text) if text in label_classes else -1


def squad_answers(
  text: str, example: Mapping[str, Any] | None = None, is_target: bool = False, **_: Any
) -> str | list[str]:
  """Returns a prediction unchanged, and all answers of the example for a target."""
  if not is_target or example is None:
    return text
  return [a.decode() if isinstance(a, bytes) else str(a) for a in example["answers"]]


def _space_punctuation(text: Any) -> Any:
  """Puts spaces around punctuation, and replaces runs of white space by one space."""
  regex_replace = tf.strings.regex_replace
  return regex_replace(regex_replace(text, r"([[:punct:]])", r" \1 "), r"\s+", " ")
