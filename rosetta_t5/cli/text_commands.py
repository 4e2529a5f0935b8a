"""The commands `rosetta-t5 infer --input` and `rosetta-t5 chat`, which use a model on plain text."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import pathlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from rosetta_t5 import terminal
from rosetta_t5.cli import decoding_options
from rosetta_t5.cli.input_rows import Row, count_lines, read_rows
from rosetta_t5.config.command_line import add_trust_option
from rosetta_t5.files import exclusive_output
from rosetta_t5.terminal import positive_integer

_SETTINGS = ".settings.json"  # What determined the lines of an output is in OUTPUT.settings.json.
_LINE_START = b'{"inputs": '  # Each line of an output begins like this.
LENGTHS = ("input_length", "output_length")
# The options that only --input has.
OPTIONS = ("template", "targets", "output", "num_decodes", "n_best", *LENGTHS, "quoted")


def infer_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 infer` for texts."""
  add = parser.add_argument_group("texts").add_argument
  add(
    "--input",
    help="a file with a text or JSON object per line, a csv, tsv, json or parquet file, or - for stdin",
  )
  add("--template", help="makes the model's input of a row's columns: 'question: {question}'")
  add("--targets", help="makes the target of a row's columns; the target is then scored")
  add("--quoted", action=argparse.BooleanOptionalAction, help="whether tsv fields are in quotes")
  add("--output", help="a file, or - for stdout (the default); an existing file is continued")
  add(
    "--num_decodes", type=positive_integer, help="beams or samples; the run's by default, mostly 1"
  )
  add(
    "--n_best",
    type=positive_integer,
    help="also write this many predictions with their scores, the best first",
  )
  add_length_options(add)


def add_length_options(add: Callable[..., Any]) -> None:
  """Adds --input_length and --output_length with a parser's method `add_argument`."""
  for name in LENGTHS:
    add(f"--{name}", type=positive_integer, help="tokens; the training run's by default")


def infer(options: argparse.Namespace) -> int:
  """Reads texts or JSON objects, one per line, and writes the model's predictions or scores."""
  from rosetta_t5.inference.result_files import check_same_settings
  from rosetta_t5.trained_model import open_model_dir

  output = options.output or "-"
  if output != "-":
    terminal.continue_without_output()
  with contextlib.ExitStack() as stack:
    if options.targets is not None and (options.n_best or options.num_decodes):
      raise ValueError("--targets scores texts: leave out --n_best and --num_decodes")
    rows = read_rows(options.input, options.template, options.targets, options.quoted)
    if os.path.isfile(output):
      stack.enter_context(exclusive_output(output))
    completed, size = _read_completed_rows(output)
    settings_file = f"{output}{_SETTINGS}"
    if completed and os.path.exists(settings_file):
      check_same_settings(settings_file, _settings_of(options), output)
    _skip_completed(rows, completed, output)
    first = next(rows, None)
    if first is not None:
      file = _open_output(output, len(completed), size, stack)
      model = open_model_dir(options.model_dir, options.flags, options.trust)
      decoding_options.apply(options, model.model)
      if output != "-":
        pathlib.Path(settings_file).write_text(json.dumps(_settings_of(options)))
      results = _infer_rows(model, itertools.chain([first], rows), options)
      # On a terminal, the results themselves show the progress.
      if output != "-" or not sys.stdout.isatty():
        count = count_lines(options.input)
        left = None if count is None else count - len(completed)
        results = terminal.track(results, "inferring", left, "rows", sys.stderr)
      for result in results:
        print(json.dumps(result, ensure_ascii=False), file=file, flush=True)
    elif completed:
      print(f"all {len(completed)} rows are in {output}", file=sys.stderr, flush=True)
    else:
      name = "Standard input" if options.input == "-" else options.input
      raise ValueError(f"{name} contains no text: give one text or JSON object per line")
  return 0


def _settings_of(options: argparse.Namespace) -> dict[str, Any]:
  """Returns what determines the results, besides the input."""
  from rosetta_t5.checkpoints import fingerprint, resolve_checkpoint

  checkpoint = resolve_checkpoint(options.model_dir)
  names = [name for name in OPTIONS if name != "output"] + list(decoding_options.NAMES)
  given = {f"--{name}": getattr(options, name) for name in names}
  return {
    **{name: value for name, value in given.items() if value is not None},
    "flags": options.flags,
    "checkpoint": checkpoint.name,
    "the checkpoint's content": fingerprint(checkpoint),
  }


def chat_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 chat`."""
  parser.add_argument("model_dir", help="MODEL_DIR of a run that was trained by span corruption")
  decoding_options.add_arguments(parser)
  add_trust_option(parser)
  parser.set_defaults(run=chat)


def chat(options: argparse.Namespace) -> int:
  """Reads sentences with blanks from the terminal, and prints them with the blanks filled."""
  from rosetta_t5.inference.text_inference import BLANK, BlankFiller
  from rosetta_t5.trained_model import open_model_dir

  model = open_model_dir(options.model_dir, trust=options.trust)
  decoding_options.apply(options, model.model)
  fill = BlankFiller(model.model, model.state.params, model.lengths["inputs"])
  print(f"Type text with blanks, such as: The sky is {BLANK}. An empty line ends.", flush=True)
  for text in _typed_lines():
    try:
      print(fill([text])[0], *(f"(note: {note})" for note in fill.notes), flush=True)
    except ValueError as error:  # An error in one line does not end the command.
      print(error, flush=True)
  return 0


def _typed_lines() -> Iterator[str]:
  if isinstance(sys.stdin, io.TextIOWrapper):
    sys.stdin.reconfigure(errors="replace")  # Invalid UTF-8 is shown, and can be typed again.
  with contextlib.suppress(EOFError):
    while text := input("> ").strip():
      yield text


def _infer_rows(
  model: Any, rows: Iterator[Row], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
  """Yields {"inputs": row, "prediction": text, "score": number}; without prediction for targets."""
  from rosetta_t5.data.pipeline.inference_data import default_preprocessors
  from rosetta_t5.inference.infer_fn import notes_on_tokens_left_behind
  from rosetta_t5.inference.text_inference import InferenceType, TextInference
  from rosetta_t5.models.batch_metrics import LEFT_BEHIND

  # A batch is split over the devices, so its size is rounded up to a multiple of their number.
  batch_size = options.batch_size or 8
  batch_size += -batch_size % model.partitioner.data_mesh_size
  lengths = feature_lengths(model.lengths, options)
  texts = TextInference(
    model.model,
    model.partitioner,
    model.state_axes,
    batch_size,
    lengths,
    inputs_end="inputs" in model.lengths,
  )
  is_scoring = options.targets is not None
  mode = InferenceType.SCORE if is_scoring else InferenceType.PREDICT_WITH_AUX
  arguments = {} if is_scoring else _decodes(options)
  preprocessors = default_preprocessors()
  truncated, unknown = Counter[str](), Counter[str]()
  left_behind: list[float] = []
  num_empty = 0
  while batch := list(itertools.islice(rows, batch_size)):
    examples = [row.example for row in batch if row.example is not None]
    num_empty += len(batch) - len(examples)
    truncated += texts.count_truncated(examples)
    unknown += texts.count_unknown(examples)
    results, aux = (
      texts.infer(mode, examples, preprocessors, model.state, **arguments) if examples else ([], {})
    )
    fractions = aux.pop(LEFT_BEHIND, [0.0] * len(results))
    left_behind += fractions
    scores = aux.get("scores", [None] * len(results))
    computed = iter(zip(results, scores, fractions, strict=True))
    for row in batch:
      if row.example is None:
        empty = {"score": None} if is_scoring else {"prediction": "", "score": None}
        yield {"inputs": row.inputs, **empty}
        continue
      (_, output), score, fraction = next(computed)
      result = {"score": output} if is_scoring else _prediction(output, score, options.n_best)
      yield {"inputs": row.inputs, **result, **({LEFT_BEHIND: fraction} if fraction else {})}
  notes = _notes_on_rows(num_empty, unknown, truncated, lengths)
  for note in [*notes, *notes_on_tokens_left_behind({LEFT_BEHIND: left_behind})]:
    print(f"note: {note}", file=sys.stderr)


def _notes_on_rows(
  num_empty: int, unknown: Counter[str], truncated: Counter[str], lengths: Mapping[str, int]
) -> Iterator[str]:
  """Yields what a user should know about the rows that were read."""
  from rosetta_t5.data.vocabularies.lost_text import describe_unknown

  if num_empty:
    yield f"an empty line has an empty prediction ({num_empty} in all)"
  if unknown:
    yield f"the vocabulary has no piece for these characters of the inputs: {describe_unknown(unknown)}"
  for feature, option in (("inputs", "--input_length"), ("targets", "--output_length")):
    if truncated[feature]:
      yield (
        f"{truncated[feature]} {feature} had more than {lengths[feature]} tokens and were truncated: set "
        f"a larger {option}"
      )


def _decodes(options: argparse.Namespace) -> dict[str, Any]:
  """Returns the arguments of `predict_batch_with_aux`: only what is given, so that gin's values count."""
  if options.n_best is None:
    return {} if options.num_decodes is None else {"num_decodes": options.num_decodes}
  num_decodes = options.num_decodes or options.n_best
  if num_decodes < options.n_best:
    raise ValueError(
      f"--n_best {options.n_best} needs as many decodes, got --num_decodes {num_decodes}"
    )
  return {"num_decodes": num_decodes, "return_all_decodes": True}


def _prediction(output: Any, score: Any, n_best: int | None) -> dict[str, Any]:
  """Returns the best of an example's predictions, and a list of them if the model returns several.

  Args:
    output: a text as bytes, or several, the best last.
    score: a number, or as many.
    n_best: the number of predictions in the list; None for all.
  """
  if isinstance(output, bytes):
    return {"prediction": output.decode("utf-8", errors="replace"), "score": score}
  best_first = zip(reversed(list(output)), reversed(score), strict=True)
  ranked = [_prediction(text, number, None) for text, number in best_first][:n_best]
  return {**ranked[0], "n_best": ranked}


def feature_lengths(trained: Mapping[str, int], options: argparse.Namespace) -> dict[str, int]:
  """Returns the lengths of inputs and targets: the trained ones unless options replace them.

  A language model's rows are targets alone; half of a row is used for the text that it continues.
  """
  lengths = dict(trained)
  if "inputs" not in lengths:
    half = lengths["targets"] // 2
    lengths |= {"inputs": half, "targets": lengths["targets"] - half}
  given = {"inputs": options.input_length, "targets": options.output_length}
  return lengths | {name: length for name, length in given.items() if length is not None}


def _read_completed_rows(path: str) -> tuple[list[Any], int]:
  """Returns the rows that an earlier call has completed in the output, and their size in bytes.

  Raises:
    ValueError: the file contains something else, or cannot be written.
  """
  rows: list[Any] = []
  size = 0
  if path == "-":
    return rows, size
  existing = path if os.path.exists(path) else os.path.dirname(path) or "."
  if os.path.isdir(path):
    raise ValueError(f"--output {path} is a folder: give a file")
  # Such an output cannot be continued, and reading a pipe would block.
  if os.path.exists(path) and not os.path.isfile(path):
    raise ValueError(
      f"--output {path} is a device or a pipe: give a file, or - for standard output"
    )
  if not os.access(existing, os.W_OK):
    raise ValueError(f"--output {path} cannot be written: check {existing}, or give another file")
  if not os.path.exists(path):
    return rows, size
  with open(path, "rb") as file:
    for line in file:
      if line.endswith(b"\n"):
        rows.append(_parse_completed_row(path, line))
        size += len(line)
      elif not line.startswith(_LINE_START[: len(line)]):
        _parse_completed_row(path, line)  # It is not a line that a killed call left unfinished.
  return rows, size


def _parse_completed_row(path: str, line: bytes) -> Any:
  try:
    return json.loads(line)["inputs"]
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f"--output {path} exists and is not an output of this command: {line[:60]!r}. Give another file"
    ) from error


def _skip_completed(rows: Iterator[Row], completed: list[Any], output: str) -> None:
  for number, expected in enumerate(completed, 1):
    row = next(rows, None)
    # As text, because NaN differs from itself.
    if row is None or json.dumps(row.inputs) != json.dumps(expected):
      raise ValueError(
        f"{output} exists, and its line {number} does not belong to row {number} of the input: give "
        "another --output, or remove that file"
      )


def _open_output(path: str, completed: int, size: int, stack: contextlib.ExitStack) -> IO[str]:
  """Opens the output after the completed rows of an earlier call, which have `size` bytes."""
  if path == "-":
    if isinstance(sys.stdout, io.TextIOWrapper):
      sys.stdout.reconfigure(encoding="utf-8")
    return sys.stdout
  if os.path.exists(path):
    print(f"continuing after {completed} lines of {path}", file=sys.stderr, flush=True)
    os.truncate(path, size)
  else:
    stack.enter_context(exclusive_output(path, create=True))
  return stack.enter_context(open(path, "a", encoding="utf-8"))
