"""Tasks on your own files, without code: `file_task`, a `mixture` of tasks, and files of tf.train.Example."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from rosetta_t5.argument_types import Percentage, Positive, PositiveNumber, check_one_of, one_of
from rosetta_t5.data import objectives, reading
from rosetta_t5.data import task_metrics as known_metrics
from rosetta_t5.data.denoisers import Denoiser, ul2_denoisers
from rosetta_t5.data.local_copies import T5_VOCABULARY
from rosetta_t5.data.reading.examples import POLICIES
from rosetta_t5.data.reading.files import FORMATS, TEXT_UNITS
from rosetta_t5.data.tasks.catalogue import register, registered_names
from rosetta_t5.data.tensorflow_import import seqio, tf
from rosetta_t5.data.vocabularies.encoder_inputs import input_feature

RATES = ("proportional", "equal")
# The arguments of a `file_task` that are also used for the rows of other files.
_KEPT = ("objective", "text", "inputs", "targets", "columns", "text_unit", "denoisers")


def file_task(
  files: str | Sequence[str],
  *,
  vocabulary: seqio.Vocabulary | None = None,
  objective: Annotated[str, one_of(objectives.OBJECTIVES)] = "span_corruption",
  text: str = "text",
  inputs: str | None = None,
  targets: str | None = None,
  validation_files: str | Sequence[str] | None = None,
  validation_percent: Percentage = 1.0,
  format: Annotated[str, one_of(FORMATS)] | None = None,
  columns: Sequence[str] | None = None,
  text_unit: Annotated[str, one_of(TEXT_UNITS)] = "line",
  quoted: bool | None = None,
  on_bad_example: Annotated[str, one_of(POLICIES)] = "skip",
  metrics: Sequence[Annotated[str, one_of(known_metrics.METRICS)]] = (),
  name: str | None = None,
  denoisers: Sequence[Sequence[Any]] | None = None,
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
    validation_files: file patterns of the validation split: other files, or exactly the same. If None,
      `validation_percent` of the examples, chosen by the hash of their text, are the validation split and
      not in "train".
    validation_percent: the size of that split.
    format: "text", "jsonl", "csv", "tsv", "parquet" or "arrow", for files whose names do not show it.
    columns: the column names of csv and tsv files that have no header line.
    text_unit: one example of a text file is a "line", a "paragraph" or the "file".
    quoted: whether fields of csv and tsv files may be in quotes, as pandas writes them. None finds it out
      for each tsv file; csv files may have such fields.
    on_bad_example: "skip" counts and logs unreadable examples; "refuse" stops at the first.
    metrics: names of functions in rosetta_t5.data.task_metrics, for evaluation by predictions.
    name: the task's name; None derives one from the arguments.
    denoisers: for "ul2", (mode text, density, mean span length, rate) of each denoiser, where a length
      of None means one span at the end; None for the seven of the paper. See gin/runs/ul2.

  Raises:
    ValueError: no file matches, only some files are in both splits, an argument has an unknown value, or
      `name` belongs to another task.
  """
  arguments = locals().copy()  # the first statement, because later ones add variables
  digest = digest_of_arguments(arguments)
  for metric in metrics:
    check_one_of("each of file_task.metrics (--metrics)", metric, known_metrics.METRICS)
  templates = _templates(objective, text, inputs, targets)
  name = name or f"files_{digest}"
  if is_registered(name, digest, "file_task"):
    return name
  options = reading.ReadOptions(format, tuple(columns) if columns else None, text_unit, quoted)
  convert, bad_examples = reading.make_converter(templates), reading.BadExamples(on_bad_example)
  source = file_source(
    files, validation_files, validation_percent, list(templates), convert, bad_examples, options
  )
  source.arguments = {
    "objective": objective,
    "text": dict(templates),
    "layout": dataclasses.asdict(options),
    "validation_percent": None if validation_files else validation_percent,
  }
  vocabulary = vocabulary or seqio.SentencePieceVocabulary(T5_VOCABULARY)
  mixed = ul2_denoisers(denoisers)
  _register(name, source, vocabulary, [getattr(known_metrics, m) for m in metrics], mixed)
  made = seqio.get_mixture_or_task(name)
  made.digest, made.arguments = digest, arguments
  return name


def is_registered(name: str, digest: str, function: str) -> bool:
  """Returns whether the task or mixture that a function made of arguments with a digest is registered.

  Raises:
    ValueError: another task or mixture has the name.
  """
  if name not in registered_names():
    return False
  if getattr(seqio.get_mixture_or_task(name), "digest", None) != digest:
    raise ValueError(
      f"A task '{name}' already exists with other arguments. Choose another data.{function}.name."
    )
  return True


def file_source(
  files: str | Sequence[str],
  validation_files: str | Sequence[str] | None,
  validation_percent: float,
  names: Sequence[str],
  convert: Callable[..., Any],
  bad_examples: reading.BadExamples,
  options: reading.ReadOptions = reading.DEFAULT_OPTIONS,
) -> Any:
  """Returns a `FileSource` with the splits "train" and "validation"; see `file_task` for the arguments.

  Args:
    files: file patterns.
    validation_files: file patterns of the validation split, or None.
    validation_percent: the size of the validation split, without files of its own.
    names: the names of the texts in an example.
    convert: converts a record to texts by name, or returns the reason why it cannot.
    bad_examples: counts or refuses the bad examples.
    options: how the files' bytes become records.
  """
  from rosetta_t5.data.reading.file_source import FileSource

  def reader(is_validation: bool) -> reading.BlockReader:
    def is_kept(fields: Mapping[str, str]) -> bool:
      return bool(validation_files) or (
        reading.is_in_validation(fields, validation_percent) == is_validation
      )

    return reading.BlockReader(convert, options, is_kept, bad_examples)

  train = reading.find_files(files)
  validation = reading.find_files(validation_files) if validation_files else train
  both = {*map(os.path.realpath, train)} & {*map(os.path.realpath, validation)}
  if both and train != validation:  # The same files for both are meant: all rows are evaluated.
    raise ValueError(
      f"{min(both)} is in the files to train on (files; DATA of finetune) and in those of the evaluation "
      "(validation_files; --eval of finetune): leave it out of one of them"
    )
  splits = {"train": (train, reader(False)), "validation": (validation, reader(True))}
  return FileSource(splits, names)


def task_on_rows(
  files: Sequence[str], like: Any, vocabulary: seqio.Vocabulary, given: Mapping[str, Any]
) -> str:
  """Registers a task whose split "validation" has all rows of files, and returns its name.

  Args:
    files: the files.
    like: a task or None. If it is a `file_task` or a `prepared_task`, the rows are read with its columns, made into
      examples as its own are, and evaluated with its metrics.
    vocabulary: the model's vocabulary.
    given: "inputs" and "targets", columns or templates, and "metrics", a list of names. By default they are those
      of `like`, or without one the columns of these names and accuracy.

  Raises:
    ValueError: a file or a metric does not exist, or "inputs" is not given and `like` is another kind of task.
  """
  arguments = getattr(like, "arguments", {})
  options = {name: arguments[name] for name in _KEPT if arguments.get(name) is not None}
  if "inputs" in given or arguments.get("objective", "seq2seq") == "seq2seq":
    if like and not arguments and "inputs" not in given:
      raise ValueError(f"the run's task {like.name} has no columns: give --inputs and --targets")
    metrics = arguments.get("metrics") or ["accuracy"]
    columns = {"inputs": "inputs", "targets": "targets", "metrics": metrics}
    options = {**columns, **options, **given, "objective": "seq2seq"}
  # Outside this folder the absolute path is used: "../data/x" and "data/x" are different files.
  paths = (os.path.abspath(x) if ".." in os.path.relpath(x) else os.path.relpath(x) for x in files)
  name = "_".join(re.sub(r"[^\w.]+", "_", path).strip("_.") for path in paths)[-80:]
  return file_task(files, validation_files=files, vocabulary=vocabulary, name=name, **options)


def mixture(
  tasks: Sequence[str],
  *,
  rates: Annotated[str, one_of(RATES)] | Sequence[float] = "proportional",
  maximum: Positive | None = None,
  temperature: PositiveNumber = 1.0,
  name: str | None = None,
) -> str:
  """Registers a SeqIO mixture of tasks, and returns its name. A second call returns the same mixture.

  In a gin file, scopes distinguish several tasks on files:
  `data.mixture.tasks = [@news/data.file_task(), @books/data.file_task(), 'glue_mnli_v2']`.

  Args:
    tasks: names of tasks or mixtures: known ones, or what `data.file_task` returns.
    rates: how often examples of each task are drawn: a number for each task; "proportional" to the tasks'
      numbers of examples; or "equal".
    maximum: with proportional rates, the number of examples above which a task counts as having just as
      many (K of Raffel et al. 2020, section 3.5.2); None for no limit.
    temperature: proportional rates are raised to the power 1/temperature: 1 leaves them as they are, and
      larger values make them more equal.
    name: the name of the mixture; None derives one from the arguments.

  Raises:
    ValueError: a task does not exist, the rates are not positive numbers, one for each task, a number of
      examples is unknown, or `name` belongs to another task or mixture.
  """
  for task in tasks:
    register(task)
    if task not in registered_names():
      raise ValueError(f"data.mixture.tasks names {task!r}, but there is no such task or mixture")
  if isinstance(rates, str):
    check_one_of("data.mixture.rates", rates, RATES)
  elif len(rates) != len(tasks) or min(rates, default=0) <= 0:
    raise ValueError(
      f"data.mixture.rates must be a positive number for each of the {len(tasks)} tasks, "
      f"{' or '.join(map(repr, RATES))}, got {rates}"
    )
  arguments = repr((list(tasks), rates, maximum, temperature))
  digest = hashlib.blake2b(arguments.encode(), digest_size=5).hexdigest()
  name = name or f"mixture_{digest}"
  if is_registered(name, digest, "mixture"):
    return name
  numbers: list[Any] = [1.0] * len(tasks) if isinstance(rates, str) else [float(x) for x in rates]
  if rates == "proportional":
    rate = functools.partial(_proportional_rate, maximum=maximum, temperature=temperature)
    mixtures = seqio.MixtureRegistry.names()  # SeqIO accepts only numbers as their rates.
    numbers = [rate(seqio.MixtureRegistry.get(t)) if t in mixtures else rate for t in tasks]
  seqio.MixtureRegistry.add(name, list(zip(tasks, numbers, strict=True))).digest = digest
  return name


def _proportional_rate(task: Any, maximum: int | None, temperature: float) -> float:
  # UL2's denoisers are tasks with one source, whose examples count once.
  parts = {id(part.source): part for part in seqio.get_subtasks(task)}.values()
  numbers = [part.num_input_examples("train") for part in parts]
  if not all(numbers):
    raise ValueError(f"'{task.name}' does not know its number of examples: set data.mixture.rates")
  number = sum(numbers)
  return float(min(number, maximum or number) ** (1 / temperature))


def create_task_from_tfexample_file(
  paths: Sequence[str],
  file_type: str,
  inputs_key: str,
  targets_key: str | None,
  features: Mapping[str, seqio.Feature],
  task_id: str | None = None,
) -> str:
  """Registers a task with the split `infer` and returns its name (T5X's function).

  A second call with the same files and keys returns the same task.

  Args:
    paths: file names or patterns.
    file_type: the type of all files; must be 'tfrecord'.
    inputs_key: the key of the input text.
    targets_key: the key of the target text, for scores; None for empty targets.
    features: {"inputs": Feature, "targets": Feature} with their vocabularies.
    task_id: the last part of the task's name; None means a digest of the file names and keys.

  Raises:
    ValueError: no such file exists, or this type of file is not supported.
  """
  paths = [paths] if isinstance(paths, str) else list(paths)
  check_one_of("TF_EXAMPLE_FILE_TYPE", file_type, ("tfrecord",))
  if not tf.io.gfile.glob(paths):
    raise ValueError(
      f"There is no file {', '.join(map(repr, paths))}: set TF_EXAMPLE_FILE_PATHS to names or patterns"
    )
  if task_id is None:
    names = ":".join([*paths, inputs_key, targets_key or ""])
    task_id = hashlib.md5(names.encode(), usedforsecurity=False).hexdigest()[:10]
  name = f"infer_{task_id}"
  if name in seqio.TaskRegistry.names():
    return name
  keys = {"inputs": inputs_key, "targets": targets_key}
  schema = {key: tf.io.FixedLenFeature([], tf.string) for key in keys.values() if key}
  seqio.TaskRegistry.add(
    name,
    source=seqio.TFExampleDataSource({"infer": paths}, schema),
    preprocessors=[
      functools.partial(seqio.preprocessors.rekey, key_map=keys),
      seqio.preprocessors.tokenize_and_append_eos,
    ],
    output_features=dict(features),
  )
  return name


def _register(
  name: str, source: Any, vocabulary: Any, metrics: Sequence[Any], denoisers: Mapping[str, Denoiser]
) -> None:
  """Registers the task. For UL2, registers a task for each denoiser and a mixture called `name`."""
  from rosetta_t5.data.reading.file_source import CountedTask

  feature, objective = seqio.Feature(vocabulary, add_eos=True), source.arguments["objective"]
  inputs = {} if objective == "causal_lm" else {"inputs": input_feature(vocabulary)}
  tasks: dict[str, Denoiser | None] = {name: None}
  if objective == "ul2":
    tasks = {f"{name}_{key}": denoiser for key, denoiser in denoisers.items()}
  for task, denoiser in tasks.items():
    seqio.TaskRegistry.add(
      task,
      source=source,
      preprocessors=objectives.objective_preprocessors(objective, denoiser),
      output_features={**inputs, "targets": feature},
      metric_fns=list(metrics),
      task_cls=CountedTask,
    )
  if objective == "ul2":
    rates = [denoiser.rate for denoiser in denoisers.values()]
    seqio.MixtureRegistry.add(name, list(zip(tasks, rates, strict=True)))


def _templates(
  objective: str, text: str, inputs: str | None, targets: str | None
) -> Mapping[str, str]:
  check_one_of("file_task.objective", objective, objectives.OBJECTIVES)
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


def digest_of_arguments(arguments: Mapping[str, Any]) -> str:
  """Returns a short hash of `file_task`'s arguments, from which the task's default name is made."""
  # Without denoisers, tasks keep the names that they had before this argument existed.
  given = {key: x for key, x in sorted(arguments.items()) if (key, x) != ("denoisers", None)}
  vocabulary = given["vocabulary"]
  state: Any = getattr(vocabulary, "__getstate__", dict)()
  text = repr({**given, "vocabulary": (type(vocabulary).__name__, state)})
  return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
