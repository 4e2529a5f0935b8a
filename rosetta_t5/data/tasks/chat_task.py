"""Tasks on conversations, of which only the assistant's turns are trained."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from rosetta_t5.argument_types import Percentage, one_of
from rosetta_t5.data import reading
from rosetta_t5.data.reading.examples import POLICIES
from rosetta_t5.data.tasks.file_task import digest_of_arguments, file_source, is_registered
from rosetta_t5.data.tensorflow_import import seqio, tf

OBJECTIVES = ("causal_lm", "seq2seq")
# The feature with 1 for each token of the targets that is trained, else 0.
WEIGHTS = "loss_weights"


def chat_task(
  files: str | Sequence[str],
  *,
  vocabulary: seqio.Vocabulary,
  objective: Annotated[str, one_of(OBJECTIVES)] | None = None,
  validation_files: str | Sequence[str] | None = None,
  validation_percent: Percentage = 1.0,
  on_bad_example: Annotated[str, one_of(POLICIES)] = "skip",
  name: str | None = None,
) -> str:
  """Registers a SeqIO task that reads conversations, and returns its name.

  A row has {"messages": [{"role": "user", "content": "…"}, …]}, or ShareGPT's {"conversations": [{"from":
  "human", "value": "…"}, …]}, and is rendered by the chat template of the vocabulary's folder. Files and
  splits are those of `data.file_task`.

  For decoder-only models, a conversation is one example, and its loss is that of the assistant's tokens. For
  encoder-decoders, each turn of the assistant is one: the inputs are the conversation before it, of which
  the end is kept if it is too long, and the targets are the turn.

  Args:
    files: patterns of jsonl, json, parquet or arrow files.
    vocabulary: a `data.tokenizer_vocabulary` of a folder with a chat template. In a gin file: %VOCABULARY.
    objective: "causal_lm" for decoder-only models, "seq2seq" for encoder-decoders; None for what the
      folder's config.json has.
    validation_files: see `file_task`.
    validation_percent: see `file_task`.
    on_bad_example: "skip" counts and logs rows that the template refuses; "refuse" stops at the first.
    name: the task's name; None derives one from the arguments.

  Raises:
    ValueError: no file matches, the folder has no chat template, or `name` belongs to another task.
  """
  digest = digest_of_arguments(locals())  # the first statement, because later ones add variables
  from rosetta_t5.data.reading.file_source import CountedTask
  from rosetta_t5.data.vocabularies.chat_template import ChatTemplate

  template = ChatTemplate(vocabulary)
  name = name or f"chat_{digest}"
  if is_registered(name, digest, "chat_task"):
    return name
  is_seq2seq = objective == "seq2seq" if objective else bool(vocabulary.folder.is_encoder_decoder)
  convert = functools.partial(_render, template=template, is_seq2seq=is_seq2seq)
  bad_examples = reading.BadExamples(on_bad_example)
  source = file_source(files, validation_files, validation_percent, ["rows"], convert, bad_examples)
  weights = seqio.Feature(seqio.PassThroughVocabulary(2), add_eos=False)
  features = {"targets": seqio.Feature(vocabulary, add_eos=False), WEIGHTS: weights}
  if is_seq2seq:
    # The template decides how inputs begin and end.
    features = {"inputs": features["targets"], "targets": seqio.Feature(vocabulary, add_eos=True)}
  tokenize = _tokenize_turns if is_seq2seq else _tokenize_conversations
  seqio.TaskRegistry.add(
    name,
    source=source,
    preprocessors=[tokenize, seqio.preprocessors.append_eos_after_trim],
    output_features=features,
    task_cls=CountedTask,
  ).digest = digest
  return name


def _render(record: Mapping[str, Any], template: Any, is_seq2seq: bool) -> Mapping[str, str] | str:
  """Returns a conversation's examples as JSON (texts with spans, or prompts with answers), or why it has none."""
  from rosetta_t5.data.vocabularies.chat_template import conversation_of

  messages = conversation_of(record)
  if isinstance(messages, str):
    return messages
  try:
    rows = list(template.answers(messages) if is_seq2seq else template.rows(messages))
  except ValueError as error:
    return str(error)
  return {"rows": json.dumps(rows)} if rows else "no turn of the assistant"


def _tokenize_conversations(
  dataset: tf.data.Dataset, sequence_length: Any, output_features: Mapping[str, Any]
) -> tf.data.Dataset:
  """Makes targets and weights from texts with spans.

  SeqIO starts a decoder's row with the start token, so a text's own begin token is dropped."""
  vocabulary = output_features["targets"].vocabulary
  length = (sequence_length or {}).get("targets")

  def tokens_of(text: str, spans: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    ids, weights = vocabulary.encode_spans(text, spans)
    first = int(vocabulary.starts_rows and ids[:1] == [vocabulary.bos_id])
    return ids[first:], weights[first:]

  dataset = _tokenize(dataset, ("targets", WEIGHTS), tokens_of)
  # Nothing would be learned from a conversation that is cut before the assistant's first turn.
  return dataset.filter(lambda example: tf.reduce_any(example[WEIGHTS][:length] > 0))


def _tokenize_turns(
  dataset: tf.data.Dataset, sequence_length: Any, output_features: Mapping[str, Any]
) -> tf.data.Dataset:
  """Makes inputs from the ends of prompts, and targets from answers."""
  vocabulary = output_features["targets"].vocabulary
  length = (sequence_length or {}).get("inputs", 0)

  def tokens_of(prompt: str, answer: str, rest: str) -> tuple[list[int], list[int]]:
    del rest
    ids = vocabulary.encode(answer)
    return vocabulary.encode(prompt)[-length:], ids[: len(ids) - (ids[-1:] == [vocabulary.eos_id])]

  return _tokenize(dataset, ("inputs", "targets"), tokens_of)


def _tokenize(dataset: tf.data.Dataset, names: Sequence[str], tokens_of: Any) -> tf.data.Dataset:
  """Returns an example with two features for each row in the JSON of a dataset's examples."""

  def read(rows: bytes) -> list[np.ndarray]:
    columns = zip(*itertools.starmap(tokens_of, json.loads(rows)), strict=True)
    return [
      np.array(values, np.int32)
      for column in columns
      for values in (list(itertools.chain(*column)), list(map(len, column)))
    ]

  def examples(example: Mapping[str, Any]) -> tf.data.Dataset:
    arrays = tf.numpy_function(read, [example["rows"]], [tf.int32] * 4, stateful=False)
    for array in arrays:
      array.set_shape([None])
    pairs = zip(names, arrays[::2], arrays[1::2], strict=True)
    ragged = {name: tf.RaggedTensor.from_row_lengths(x, lengths) for name, x, lengths in pairs}
    return tf.data.Dataset.from_tensor_slices(ragged)

  return dataset.flat_map(examples)
