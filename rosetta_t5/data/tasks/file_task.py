"""A task that reads your own files, without code: `MIXTURE_OR_TASK_NAME = @data.file_task()`."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from absl import logging

from rosetta_t5.argument_types import Percentage, check_one_of, one_of
from rosetta_t5.data import task_metrics as known_metrics
from rosetta_t5.data.local_copies import T5_VOCABULARY
from rosetta_t5.data.objectives import text_objectives
from rosetta_t5.data.reading import (
  BadExamples,
  BlockReader,
  ReadOptions,
  find_files,
  is_in_validation,
  make_converter,
)
from rosetta_t5.data.reading.examples import POLICIES
from rosetta_t5.data.reading.files import FORMATS, TEXT_UNITS
from rosetta_t5.data.tasks.catalogue import registered_names
from rosetta_t5.data.tensorflow_import import seqio

Objective = Annotated[str, one_of(text_objectives.OBJECTIVES)]
Format = Annotated[str, one_of(FORMATS)]
TextUnit = Annotated[str, one_of(TEXT_UNITS)]
OnBadExample = Annotated[str, one_of(POLICIES)]
Metric = Annotated[str, one_of(known_metrics.__all__)]

_digests: dict[str, str] = {}  # a digest of the arguments of each task registered here, by name


def file_task(
  files: str | Sequence[str],
  *,
  vocabulary: seqio.Vocabulary | None = None,
  objective: Objective = "span_corruption",
  text: str = "text",
  inputs: str | None = None,
  targets: str | None = None,
  validation_files: str | Sequence[str] | None = None,
  validation_percent: Percentage = 1.0,
  format: Format | None = None,
  columns: Sequence[str] | None = None,
  text_unit: TextUnit = "line",
  quoted: bool | None = None,
  on_bad_example: OnBadExample = "skip",
  metrics: Sequence[Metric] = (),
  name: str | None = None,
) -> str:
  """Registers a SeqIO task, or UL2's mixture, that reads files, and returns its name.

  It has the splits "train" and "validation". A second call with the same arguments returns the same
  task. Files may be text (.txt, .md), .jsonl, .csv, .tsv, .parquet or .arrow, each also with .gz, .zst,
  .xz or .bz2. A folder, such as a Hugging Face dataset on disk, means all such files under it.

  Args:
    files: file patterns such as "corpus/*.jsonl.zst".
    vocabulary: the vocabulary of inputs and targets; None means T5's. In a gin file: %VOCABULARY.
    objective: "span_corruption", "prefix_lm", "causal_lm" or "ul2" make examples from `text`;
      "seq2seq" uses `inputs` and `targets`.
    text: the column with the text, or a template such as "{title} {body}".
    inputs: for seq2seq, the column or template of the inputs, such as "question: {question}".
    targets: for seq2seq, the column or template of the targets.
    validation_files: file patterns of the validation split. If None, `validation_percent` of the
      examples, chosen by the hash of their text, are the validation split and not in "train".
    validation_percent: the size of that split.
    format: "text", "jsonl", "csv", "tsv", "parquet" or "arrow", for files whose names do not show it.
    columns: the column names of csv and tsv files that have no header line.
    text_unit: one example of a text file is a "line", a "paragraph" or the "file".
    quoted: whether fields of csv and tsv files may be in quotes, as pandas writes them. None finds it out
      for each tsv file; csv files may have such fields.
    on_bad_example: "skip" counts and logs unreadable examples; "refuse" stops at the first.
    metrics: names of functions in rosetta_t5.data.task_metrics, for evaluation by predictions.
    name: the task's name; None derives one from the arguments.

  Raises:
    ValueError: no file matches, an argument has an unknown value, or `name` belongs to another task.
  """
  digest = _digest(dict(sorted(locals().items())))
  templates = _templates(objective, text, inputs, targets)
  name = name or f"files_{digest}"
  if name in registered_names():
    if _digests.get(name) != digest:
      raise ValueError(
        f"A task '{name}' already exists with other arguments. Choose another data.file_task.name."
      )
    return name
  from rosetta_t5.data.reading.file_source import FileSource

  train = find_files(files)
  options = ReadOptions(format, tuple(columns) if columns else None, text_unit, quoted)
  bad_examples = BadExamples(on_bad_example)

  def reader(is_validation: bool) -> BlockReader:
    def is_kept(fields: Mapping[str, str]) -> bool:
      return bool(validation_files) or (
        is_in_validation(fields, validation_percent) == is_validation
      )

    return BlockReader(make_converter(templates), options, is_kept, bad_examples)

  source = FileSource(
    {"train": train, "validation": find_files(validation_files) if validation_files else train},
    {"train": reader(False), "validation": reader(True)},
    list(templates),
    {
      "objective": objective,
      "text": dict(templates),
      "layout": dataclasses.asdict(options),
      "validation_percent": None if validation_files else validation_percent,
    },
  )
  logging.info("Task '%s': %s on %d files", name, objective, len(train))
  vocabulary = vocabulary or seqio.SentencePieceVocabulary(T5_VOCABULARY)
  _register(name, source, objective, vocabulary, [_metric_function(m) for m in metrics])
  _digests[name] = digest
  return name


def task_on_rows(
  files: Sequence[str],
  like: Any,
  vocabulary: seqio.Vocabulary,
  inputs: str | None = None,
  targets: str | None = None,
  metrics: Sequence[str] | None = None,
) -> str:
  """Registers a task whose split "validation" has all rows of files, and returns its name.

  Args:
    files: the files.
    like: a task or None. If it is a `file_task`, the rows are read with its columns and judged with its metrics.
    vocabulary: the model's vocabulary.
    inputs: the column of the inputs or a template; None for that of `like`, or the column "inputs".
    targets: the same of the targets.
    metrics: names of metrics; None for those of `like`, or else accuracy.

  Raises:
    ValueError: a file or a metric does not exist.
  """
  arguments = getattr(getattr(like, "source", None), "arguments", None) or {}
  columns, layout = arguments.get("text", {}), arguments.get("layout", {})
  if metrics is None:
    metrics = (
      [f.__name__ for f in like.metric_fns if f.__name__ in known_metrics.__all__]
      if columns
      else []
    )
  options: dict[str, Any] = {
    "vocabulary": vocabulary,
    "validation_files": list(files),
    **{name: layout[name] for name in ("columns", "text_unit") if name in layout},
    "objective": arguments.get("objective", "seq2seq") if not inputs else "seq2seq",
  }
  if options["objective"] == "seq2seq":
    options["inputs"] = inputs or columns.get("inputs", "inputs")
    options["targets"] = targets or columns.get("targets", "targets")
    options["metrics"] = list(metrics) or ["accuracy"]
  else:
    options["text"] = columns["targets"]
  name = "_".join(re.sub(r"[^\w.]+", "_", os.path.relpath(file)).strip("_.") for file in files)[:80]
  return file_task(list(files), **options, name=name)


def _register(
  name: str,
  source: seqio.DataSource,
  objective: str,
  vocabulary: seqio.Vocabulary,
  metric_fns: Sequence[Any],
) -> None:
  """Registers the task. For UL2, registers a task for each denoiser and a mixture called `name`."""
  from rosetta_t5.data.reading.file_source import CountedTask

  feature = seqio.Feature(vocabulary, add_eos=True)
  inputs = {} if objective == "causal_lm" else {"inputs": feature}
  tasks: dict[str, text_objectives.Denoiser | None] = {name: None}
  if objective == "ul2":
    tasks = {f"{name}_{key}": denoiser for key, denoiser in text_objectives.UL2_DENOISERS.items()}
  for task, denoiser in tasks.items():
    seqio.TaskRegistry.add(
      task,
      source=source,
      preprocessors=text_objectives.objective_preprocessors(objective, denoiser),
      output_features={**inputs, "targets": feature},
      metric_fns=list(metric_fns),
      task_cls=CountedTask,
    )
  if objective == "ul2":
    seqio.MixtureRegistry.add(name, list(tasks), default_rate=1)


def _templates(
  objective: str, text: str, inputs: str | None, targets: str | None
) -> Mapping[str, str]:
  check_one_of("file_task.objective", objective, text_objectives.OBJECTIVES)
  if objective != "seq2seq":
    if inputs or targets:
      raise ValueError(
        f"file_task.objective = {objective!r} makes inputs and targets from file_task.text, but "
        "file_task.inputs or targets is set: remove it, or set objective = 'seq2seq'"
      )
    return {"targets": text}
  if not (inputs and targets):
    raise ValueError(
      "file_task.objective = 'seq2seq' needs file_task.inputs and file_task.targets: a column's "
      "name, or a template such as 'question: {question}'"
    )
  return {"inputs": inputs, "targets": targets}


def _metric_function(name: str) -> Any:
  check_one_of("each of file_task.metrics", name, known_metrics.__all__)
  return getattr(known_metrics, name)


def _digest(arguments: Mapping[str, Any]) -> str:
  """Returns a short hash of `file_task`'s arguments, from which the task's default name is made."""
  vocabulary = arguments["vocabulary"]
  state: Any = getattr(vocabulary, "__getstate__", dict)()
  text = repr({**arguments, "vocabulary": (type(vocabulary).__name__, state)})
  return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
