"""Your own files as a task, without code: `MIXTURE_OR_TASK_NAME = @data.file_task()`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import logging

from rosetta_t5.data import metrics as known_metrics
from rosetta_t5.data.objectives.text_objectives import (
  OBJECTIVES,
  UL2_DENOISERS,
  preprocessors,
  ul2_preprocessors,
)
from rosetta_t5.data.reading import BadExamples, BlockReader, HashSplit, Layout, find_files
from rosetta_t5.data.reading.file_source import make_file_source
from rosetta_t5.data.reading.templates import make_converter
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio

if TYPE_CHECKING:
  import seqio

T5_VOCABULARY = "gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"


def file_task(
  files: str | Sequence[str],
  *,
  vocabulary: seqio.Vocabulary | None = None,
  objective: str = "span_corruption",
  text: str = "text",
  inputs: str | None = None,
  targets: str | None = None,
  validation_files: str | Sequence[str] | None = None,
  validation_percent: float = 1.0,
  format: str | None = None,
  columns: Sequence[str] | None = None,
  text_unit: str = "line",
  on_bad_example: str = "skip",
  metrics: Sequence[str] = (),
  name: str | None = None,
) -> str:
  """Registers a SeqIO task, or UL2's mixture, that reads files, and returns its name.

  It has the splits "train" and "validation". Called again with the same arguments it returns the
  same task. Files are text (.txt, .md), .jsonl, .csv, .tsv, .parquet or .arrow, also with .gz,
  .zst, .xz, .bz2; a folder means all of these under it, such as a Hugging Face dataset on disk.

  Args:
    files: patterns such as "corpus/*.jsonl.zst".
    vocabulary: of inputs and targets; T5's if None. In a gin file: %VOCABULARY.
    objective: "span_corruption", "prefix_lm", "causal_lm" or "ul2", which are made of `text`; or
      "seq2seq", which takes `inputs` and `targets`.
    text: the column with the text, or a template: "{title} {body}".
    inputs: for seq2seq, the inputs' column or template: "question: {question}".
    targets: for seq2seq, the same for targets.
    validation_files: patterns; without them `validation_percent` of the examples, chosen by the
      hash of their text, are the validation split and not in "train".
    validation_percent: see there.
    format: "text", "jsonl", "csv", "tsv", "parquet" or "arrow", where names do not tell.
    columns: names of the columns of csv and tsv files without a first line of names.
    text_unit: one example of a text file is a "line", a "paragraph" or the "file".
    on_bad_example: "skip" counts and logs what cannot be read; "refuse" stops.
    metrics: names from rosetta_t5.data.metrics, for evaluation by predictions.
    name: the task's; None makes one of the arguments' hash.

  Raises:
    ValueError: there are no such files, columns or names; or `name` is another task's.
  """
  arguments = dict(sorted(locals().items()))
  seqio = import_seqio()
  templates = _templates(objective, text, inputs, targets)
  digest = _digest(arguments)
  name = name or f"files_{digest}"
  if name in {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}:
    _check_same(name, digest)
    return name
  vocabulary = vocabulary or seqio.SentencePieceVocabulary(T5_VOCABULARY)
  train = find_files(files)
  held_out = find_files(validation_files) if validation_files else train
  layout = Layout(format, tuple(columns) if columns else None, text_unit)
  bad_examples = BadExamples(on_bad_example)

  def reader(is_validation: bool) -> BlockReader:
    split = None if validation_files else HashSplit(validation_percent, is_validation)
    return BlockReader(make_converter(templates), layout, split, bad_examples)

  source = make_file_source(
    {"train": train, "validation": held_out},
    {"train": reader(False), "validation": reader(True)},
    list(templates),
  )
  logging.info("Task '%s': %s on %d files", name, objective, len(train))
  _register(name, source, objective, vocabulary, [_metric(m) for m in metrics])
  _DIGESTS[name] = digest
  return name


_DIGESTS: dict[str, str] = {}


def _register(
  name: str, source: Any, objective: str, vocabulary: Any, metric_fns: Sequence[Any]
) -> None:
  """Adds the task; for UL2 one a denoiser, and their mixture."""
  seqio = import_seqio()
  feature = seqio.Feature(vocabulary, add_eos=True)
  inputs = {} if objective == "causal_lm" else {"inputs": feature}
  stages = (
    {f"{name}_{key}": ul2_preprocessors(d) for key, d in UL2_DENOISERS.items()}
    if objective == "ul2"
    else {name: preprocessors(objective)}
  )
  for task, steps in stages.items():
    seqio.TaskRegistry.add(
      task,
      source=source,
      preprocessors=steps,
      output_features={**inputs, "targets": feature},
      metric_fns=list(metric_fns),
    )
  if objective == "ul2":
    seqio.MixtureRegistry.add(name, list(stages), default_rate=1)


def _templates(
  objective: str, text: str, inputs: str | None, targets: str | None
) -> Mapping[str, str]:
  if objective not in OBJECTIVES:
    raise ValueError(f"file_task.objective = {objective!r} is none of {', '.join(OBJECTIVES)}")
  if objective != "seq2seq":
    if inputs or targets:
      raise ValueError(
        f"file_task.objective = {objective!r} makes inputs and targets of file_task.text, but "
        "file_task.inputs or targets is set: remove it, or set objective = 'seq2seq'"
      )
    return {"targets": text}
  if not (inputs and targets):
    raise ValueError(
      "file_task.objective = 'seq2seq' needs file_task.inputs and file_task.targets: a column's "
      "name, or a template such as 'question: {question}'"
    )
  return {"inputs": inputs, "targets": targets}


def _metric(name: str) -> Any:
  if name not in known_metrics.__all__:
    raise ValueError(f"file_task.metrics: {name!r} is none of {', '.join(known_metrics.__all__)}")
  return getattr(known_metrics, name)


def _digest(arguments: Mapping[str, Any]) -> str:
  vocabulary = arguments["vocabulary"]
  state: Any = getattr(vocabulary, "__getstate__", dict)()
  told = repr({**arguments, "vocabulary": (type(vocabulary).__name__, state)})
  return hashlib.blake2b(told.encode(), digest_size=5).hexdigest()


def _check_same(name: str, digest: str) -> None:
  if _DIGESTS.get(name) != digest:
    raise ValueError(
      f"There is a task '{name}' already, made with other arguments: set file_task.name to another"
    )
