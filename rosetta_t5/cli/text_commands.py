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
from collections.abc import Iterator, Mapping
from typing import IO, Any

from rosetta_t5.config.trust import add_trust_options, allowed_by
from rosetta_t5.telemetry.atomic_files import exclusive_output
from rosetta_t5.terminal import ctrl_c, progress
from rosetta_t5.terminal.option_types import positive_integer
from rosetta_t5.terminal.standard_streams import optional_output

# A line of the input (a text or a JSON object), and its example: {"input": text, "target": text}.
Row = tuple[str | dict[str, Any], dict[str, str]]
_SETTINGS = ".settings.json"  # A file beside the output: what has determined its lines.
_LINE_START = b'{"inputs": '  # Each line of an output begins like this.


def infer_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 infer` for texts."""
  add = parser.add_argument_group("texts").add_argument
  add("--input", help="a file with a text or JSON object per line, or - for stdin")
  add("--template", help="makes the model's input of a JSON object: 'question: {question}'")
  add("--targets", help="makes the target of a JSON object; the target is then scored")
  add("--output", help="a file, or - for stdout (the default); an existing file is continued")
  add(
    "--num_decodes", type=positive_integer, help="beams or samples, 1 by default; the best counts"
  )
  add("--input_length", type=positive_integer, help="tokens; the training run's by default")
  add("--output_length", type=positive_integer, help="tokens; the training run's by default")


def infer(options: argparse.Namespace) -> int:
  """Reads texts or JSON objects, one per line, and writes the model's predictions or scores."""
  from rosetta_t5.inference.result_files import check_same_settings
  from rosetta_t5.trained_model import open_model_dir

  output = options.output or "-"
  with _exit_when_stopped(output), contextlib.ExitStack() as stack:
    if output != "-":
      stack.enter_context(optional_output())
    _check_template(options)
    rows = _read_rows(_open_input(options.input, stack), options.template, options.targets)
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
      model = open_model_dir(options.model_dir, options.flags, allowed_by(options))
      if output != "-":
        pathlib.Path(settings_file).write_text(json.dumps(_settings_of(options)))
      results = _infer_rows(model, itertools.chain([first], rows), options)
      # On a terminal, the results themselves show the progress.
      if output != "-" or not sys.stdout.isatty():
        is_file = os.path.isfile(options.input)  # A pipe can be read only once.
        count = _count_lines(options.input) - len(completed) if is_file else None
        results = progress.track(results, "inferring", count, "rows", sys.stderr)
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
  from rosetta_t5.checkpoints import resolve_checkpoint, values_checksum

  checkpoint = resolve_checkpoint(options.model_dir)
  names = ("template", "targets", "num_decodes", "input_length", "output_length")
  return {
    **{f"--{name}": getattr(options, name) for name in names},
    "flags": options.flags,
    "checkpoint": checkpoint.name,
    "the checkpoint's values": values_checksum(checkpoint),
  }


def chat_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 chat`."""
  parser.add_argument("model_dir", help="MODEL_DIR of a run that was trained by span corruption")
  add_trust_options(parser)
  parser.set_defaults(run=chat)


def chat(options: argparse.Namespace) -> int:
  """Reads sentences with blanks from the terminal, and prints them with the blanks filled."""
  from rosetta_t5.inference.infilling import BLANK, BlankFiller
  from rosetta_t5.trained_model import open_model_dir

  with _exit_when_stopped():
    model = open_model_dir(options.model_dir, allowed=allowed_by(options))
    fill = BlankFiller(model.model, model.state.params, model.lengths["inputs"])
    print(f"Type text with blanks, such as: The sky is {BLANK}. An empty line ends.", flush=True)
    for text in _typed_lines():
      try:
        print(fill([text])[0], *(f"(note: {note})" for note in fill.notes), flush=True)
      except ValueError as error:  # An error in one line does not end the command.
        print(error, flush=True)
  return 0


def _exit_when_stopped(output: str = "-") -> contextlib.AbstractContextManager[ctrl_c.Section]:
  """Returns a context in which Ctrl-C says what is kept."""
  kept = f"{output} has the results so far; run again to continue"
  return ctrl_c.entered(ctrl_c.Section("no file was written" if output == "-" else kept))


def _typed_lines() -> Iterator[str]:
  if isinstance(sys.stdin, io.TextIOWrapper):
    sys.stdin.reconfigure(errors="replace")  # Invalid UTF-8 is shown, and can be typed again.
  with contextlib.suppress(EOFError):
    while text := input("> ").strip():
      yield text


def _check_template(options: argparse.Namespace) -> None:
  has_objects = options.targets is not None or options.input.endswith(".jsonl")
  if options.template is None and has_objects:
    raise ValueError(
      f"The rows of {options.input} are JSON objects, which need a template for the model's input: "
      "give --template, such as --template 'question: {question} context: {context}'"
    )


def _open_input(path: str, stack: contextlib.ExitStack) -> IO[str]:
  # Invalid UTF-8 becomes surrogates, so that its line is reported after the lines before it.
  encoding, errors = "utf-8-sig", "surrogateescape"
  if path == "-":
    if sys.stdin is None:
      raise ValueError(
        "Standard input is closed: give a file as --input, or text on standard input"
      )
    if isinstance(sys.stdin, io.TextIOWrapper):
      sys.stdin.reconfigure(encoding=encoding, errors=errors)
    return sys.stdin
  if not pathlib.Path(path).exists() or pathlib.Path(path).is_dir():
    raise ValueError(f"There is no file {path!r}: give a file as --input, or - for standard input")
  return stack.enter_context(open(path, encoding=encoding, errors=errors))


def _read_rows(source: IO[str], template: str | None, targets: str | None) -> Iterator[Row]:
  from rosetta_t5.data.reading.templates import make_converter

  templates = {"input": template, "target": targets}
  convert = make_converter({name: text for name, text in templates.items() if text is not None})
  for number, line in enumerate(source, 1):
    if not line.isascii() and any("\udc80" <= letter <= "\udcff" for letter in line):
      raise ValueError(f"Line {number} of the input is invalid UTF-8: {line[:80]!r}")
    text = line.rstrip("\n")
    if not text.strip():
      continue
    if template is None:
      yield text, {"input": text, "target": ""}
      continue
    try:
      fields = json.loads(text)
    except (ValueError, RecursionError) as error:
      raise ValueError(
        f"Line {number} of the input is invalid JSON ({error}): {text[:80]}"
      ) from error
    if not isinstance(fields, dict):
      raise ValueError(f"Line {number} of the input is not a JSON object: {text[:80]}")
    example = convert(fields)
    if isinstance(example, str):
      raise ValueError(f"Line {number} of the input cannot be used: {example}")
    yield fields, {"target": "", **example}


def _infer_rows(
  model: Any, rows: Iterator[Row], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
  """Yields {"inputs": row, "prediction": text, "score": number}; without prediction for targets."""
  from rosetta_t5.data.pipeline.text_examples import default_preprocessors
  from rosetta_t5.inference.expert_capacity import notes_on_tokens_left_behind
  from rosetta_t5.inference.text_inference import InferenceType, TextInference
  from rosetta_t5.models.expert_losses import LEFT_BEHIND

  # A batch is split over the devices, so its size is rounded up to a multiple of their number.
  batch_size = options.batch_size or 8
  batch_size += -batch_size % model.partitioner.data_mesh_size
  lengths = _lengths(model.lengths, options)
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
  arguments = {} if is_scoring else {"num_decodes": options.num_decodes or 1}
  preprocessors = default_preprocessors()
  truncated: Counter[str] = Counter()
  left_behind: list[float] = []
  while batch := list(itertools.islice(rows, batch_size)):
    examples = [example for _, example in batch]
    truncated += texts.count_truncated(examples)
    results, aux = texts.infer(mode, examples, preprocessors, model.state, **arguments)
    fractions = aux.get(LEFT_BEHIND, [0.0] * len(results))
    left_behind += fractions
    for number, ((inputs, _), (_, output)) in enumerate(zip(batch, results, strict=True)):
      left = {LEFT_BEHIND: fractions[number]} if fractions[number] else {}
      if is_scoring:
        yield {"inputs": inputs, "score": output, **left}
      else:
        text = output.decode("utf-8", errors="replace")
        yield {"inputs": inputs, "prediction": text, "score": aux["scores"][number], **left}
  for note in notes_on_tokens_left_behind({LEFT_BEHIND: left_behind}):
    print(f"note: {note}", file=sys.stderr)
  for feature, option in (("inputs", "--input_length"), ("targets", "--output_length")):
    if truncated[feature]:
      print(
        f"note: {truncated[feature]} {feature} had more than {lengths[feature]} tokens and were truncated: "
        f"set a larger {option}",
        file=sys.stderr,
      )


def _lengths(trained: Mapping[str, int], options: argparse.Namespace) -> dict[str, int]:
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


def _count_lines(path: str) -> int:
  with open(path, "rb") as file:
    return sum(not line.isspace() for line in file)


def _skip_completed(rows: Iterator[Row], completed: list[Any], output: str) -> None:
  for number, expected in enumerate(completed, 1):
    if next(rows, (None,))[0] != expected:
      raise ValueError(
        f"{output} exists, and its line {number} does not belong to row {number} of the input: give "
        "another --output, or remove that file"
      )


def _open_output(path: str, completed: int, size: int, stack: contextlib.ExitStack) -> IO[str]:
  """Opens the output after the completed rows of an earlier call, which have `size` bytes."""
  if path == "-":
    return sys.stdout
  if os.path.exists(path):
    print(f"continuing after {completed} lines of {path}", file=sys.stderr, flush=True)
    os.truncate(path, size)
  else:
    stack.enter_context(exclusive_output(path, create=True))
  return stack.enter_context(open(path, "a", encoding="utf-8"))
