"""Text in, text out, with a trained model: the commands `rosetta-t5 infer --input` and `chat`."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import pathlib
import signal
import string
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from rosetta_t5.config.errors import exit_on_user_error

Row = str | dict[str, Any]
_PROMPT = "> "
_START = b'{"inputs": '  # of every line that is written


def infer(argv: Sequence[str]) -> int:
  """Reads texts or rows, a line each, and writes what the model says of them, a JSON object each."""
  options = _infer_parser().parse_args(argv)
  with exit_on_user_error(), _ends_quietly(options.output), contextlib.ExitStack() as stack:
    templates = _Templates(options.template, options.targets, options.input)
    rows = _rows(_open_input(options.input, stack), templates)
    done, whole = _answered(options.output)
    _skip(rows, done, options.output)
    first = next(rows, None)
    if first is None:
      _tell_no_row(options, len(done))
      return 0
    target = _open_output(options.output, len(done), whole, stack)
    opened = _open_model(options.model_dir)
    for written in _infer_rows(opened, itertools.chain([first], rows), templates, options):
      print(json.dumps(written, ensure_ascii=False), file=target, flush=True)
  return 0


def chat(argv: Sequence[str]) -> int:
  """Reads sentences with blanks from the terminal, and shows them filled."""
  parser = argparse.ArgumentParser("rosetta-t5 chat", description=chat.__doc__)
  parser.add_argument("model_dir", help="MODEL_DIR of a run that learnt by span corruption")
  options = parser.parse_args(argv)
  from rosetta_t5.inference.infilling import BLANK, BlankFiller

  with exit_on_user_error(), _ends_quietly():
    opened = _open_model(options.model_dir)
    fill = BlankFiller(opened.model, opened.state.params, opened.lengths["inputs"])
    print(f"Type text with blanks, such as: The sky is {BLANK}. An empty line ends.", flush=True)
    for text in _typed():
      try:
        print(fill([text])[0], flush=True)
      except ValueError as error:  # the next line may be better
        print(error, flush=True)
  return 0


@contextlib.contextmanager
def _ends_quietly(output: str = "-") -> Iterator[None]:
  """Ends without a stack trace on Ctrl-C, and where nobody reads the answers any more, as after `head`."""
  try:
    yield
  except KeyboardInterrupt:
    kept = "" if output == "-" else f": {output} keeps the answers, and the same command goes on"
    print(f"\nstopped{kept}", file=sys.stderr, flush=True)
    sys.exit(128 + signal.SIGINT)
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where Python's last flush goes
    sys.exit(128 + signal.SIGPIPE)


def _typed() -> Iterator[str]:
  if isinstance(sys.stdin, io.TextIOWrapper):
    sys.stdin.reconfigure(errors="replace")  # what is not UTF-8 is shown, and typed again
  while True:
    try:
      text = input(_PROMPT).strip()
    except (EOFError, KeyboardInterrupt):
      return
    if not text:
      return
    yield text


def _count(text: str) -> int:
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
  return int(text)


def _infer_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser("rosetta-t5 infer", description=infer.__doc__)
  add = parser.add_argument
  add("--model_dir", required=True, help="MODEL_DIR of a training run, or one of its checkpoints")
  add("--input", required=True, help="a file with a text or a JSON object a line, or - for stdin")
  add("--template", help="makes the model's input of a JSON object: 'question: {question}'")
  add("--targets", help="makes the target of a JSON object; the target is then scored")
  add("--output", default="-", help="a file, - for stdout; a file that is there is continued")
  add("--batch_size", type=_count, default=8)
  add("--num_decodes", type=_count, default=1, help="beams or samples; the best is written")
  add("--input_length", type=_count, help="tokens; the run's if not given")
  add("--output_length", type=_count, help="tokens; the run's if not given")
  return parser


def _fields(template: str) -> list[str]:
  try:
    named = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
  except ValueError as error:
    raise ValueError(
      f"the template {template!r} cannot be read ({error}): a field is in braces, as {{question}}, "
      "and a brace of the text is written twice"
    ) from error
  return [field.split(".")[0].split("[")[0] for field in named]


class _Templates:
  """Makes the model's texts of a row."""

  def __init__(self, inputs: str | None, targets: str | None, path: str):
    if inputs is None and (targets is not None or path.endswith(".jsonl")):
      raise ValueError(
        f"the rows of {path} are JSON objects, and what the model is to read of them is not said: "
        "give --template, such as --template 'question: {question} context: {context}'"
      )
    self.inputs, self.targets = inputs, targets
    self.fields: dict[str, str] = {}  # and the template that each is in
    for template in filter(None, (inputs, targets)):
      self.fields |= dict.fromkeys(_fields(template), template)

  def parse(self, line: str, number: int) -> Row:
    """Returns a line as a text, or as an object where there are templates for one."""
    if self.inputs is None:
      return line
    try:
      row = json.loads(line)
    except ValueError as error:
      raise ValueError(f"line {number} of the input is no JSON ({error}): {line[:80]}") from error
    if not isinstance(row, dict):
      raise ValueError(f"line {number} of the input is no JSON object: {line[:80]}")
    for field, template in self.fields.items():
      if field not in row:
        raise ValueError(
          f"line {number} of the input has no field {field!r}, which the template {template!r} "
          f"names; it has {', '.join(row)}"
        )
    return row

  def example(self, row: Row) -> dict[str, str]:
    """Returns the model's texts."""
    if isinstance(row, str):
      return {"input": row, "target": ""}
    return {"input": _filled(self.inputs, row), "target": _filled(self.targets, row)}


def _filled(template: str | None, row: dict[str, Any]) -> str:
  try:
    return "" if template is None else template.format(**row)
  except (AttributeError, LookupError, TypeError, ValueError) as error:
    # As {text.size}, {text[5]} or {text:d}, which not all values have.
    raise ValueError(f"the template {template!r} does not suit {row!r}: {error}") from error


def _rows(source: IO[str], templates: _Templates) -> Iterator[Row]:
  for number, line in enumerate(source, 1):
    if not line.isascii() and any("\udc80" <= letter <= "\udcff" for letter in line):
      raise ValueError(f"line {number} of the input is not in UTF-8: {line[:80]!r}")
    if line.strip():
      yield templates.parse(line.rstrip("\n"), number)


def _infer_rows(
  opened: Any, rows: Iterator[Row], templates: _Templates, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
  """Yields {"inputs": row, "prediction": text, "score": number}, or the target's score alone."""
  from rosetta_t5.data.pipeline.text_examples import default_preprocessors
  from rosetta_t5.inference.text_inference import InferenceType, TextInference

  devices = opened.partitioner.data_mesh_size
  batch_size = options.batch_size + -options.batch_size % devices
  texts = TextInference(
    opened.model,
    opened.partitioner,
    opened.state_axes,
    batch_size,
    _lengths(opened.lengths, options),
    inputs_end="inputs" in opened.lengths,
  )
  scores = templates.targets is not None
  mode = InferenceType.SCORE if scores else InferenceType.PREDICT_WITH_AUX
  arguments = {} if scores else {"num_decodes": options.num_decodes}
  while batch := list(itertools.islice(rows, batch_size)):
    examples = [templates.example(row) for row in batch]
    inferred, aux = texts.infer(mode, examples, default_preprocessors(), opened.state, **arguments)
    for number, (row, (_, output)) in enumerate(zip(batch, inferred, strict=True)):
      if scores:
        yield {"inputs": row, "score": output}
      else:
        said = output.decode("utf-8", errors="replace")
        yield {"inputs": row, "prediction": said, "score": aux["scores"][number]}


def _lengths(trained: Mapping[str, int], options: argparse.Namespace) -> dict[str, int]:
  """Returns the tokens of inputs and targets: as trained, but for what the command line says.

  A language model's rows are targets alone; half of a row is for what it is to go on from.
  """
  lengths = dict(trained)
  if "inputs" not in lengths:
    half = lengths["targets"] // 2
    lengths |= {"inputs": half, "targets": lengths["targets"] - half}
  given = {"inputs": options.input_length, "targets": options.output_length}
  return lengths | {name: length for name, length in given.items() if length is not None}


def _open_model(model_dir: str) -> Any:
  from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio
  from rosetta_t5.parallel import enable_compilation_cache
  from rosetta_t5.trained_model import open_model_dir

  enable_compilation_cache()
  import_seqio()  # before gin files import it: it must not find a GPU
  return open_model_dir(model_dir)


def _open_input(path: str, stack: contextlib.ExitStack) -> IO[str]:
  # What is not UTF-8 becomes surrogates, so that its line can be told, after those before it.
  encoding, errors = "utf-8-sig", "surrogateescape"
  if path == "-":
    if sys.stdin is None:
      raise ValueError("standard input is closed: give --input a file, or a text to read there")
    if isinstance(sys.stdin, io.TextIOWrapper):
      sys.stdin.reconfigure(encoding=encoding, errors=errors)
    return sys.stdin
  if not pathlib.Path(path).is_file():
    raise ValueError(f"there is no file {path!r}: give --input a file, or - for standard input")
  return stack.enter_context(open(path, encoding=encoding, errors=errors))


def _tell_no_row(options: argparse.Namespace, done: int) -> None:
  if not done:
    name = "standard input" if options.input == "-" else options.input
    raise ValueError(f"{name} holds no text: give a text or a JSON object a line")
  print(f"all {done} rows are answered in {options.output}", file=sys.stderr, flush=True)


def _answered(path: str) -> tuple[list[Any], int]:
  """Returns the rows that an earlier call has answered in the output, and the bytes of its lines.

  Raises:
    ValueError: the file is something else, or cannot be written.
  """
  there = path if os.path.exists(path) else os.path.dirname(path) or "."
  if path != "-" and (os.path.isdir(path) or not os.access(there, os.W_OK)):
    folder = "is a folder" if os.path.isdir(path) else f"cannot be written: look at {there}"
    raise ValueError(f"--output {path} {folder}; give a file in a folder that you may write in")
  done: list[Any] = []
  whole = 0
  if path == "-" or not os.path.exists(path):
    return done, whole
  with open(path, "rb") as earlier:
    for line in earlier:
      if line.endswith(b"\n"):
        done.append(_answered_row(path, line))
        whole += len(line)
      elif not line.startswith(_START[: len(line)]):  # else cut short by a call that was killed
        _answered_row(path, line)
  return done, whole


def _answered_row(path: str, line: bytes) -> Any:
  try:
    return json.loads(line)["inputs"]
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f"--output {path} is there, and is none that this command has written: {line[:60]!r}; give "
      "another"
    ) from error


def _open_output(path: str, done: int, whole: int, stack: contextlib.ExitStack) -> IO[str]:
  """Returns where to write: after the `done` lines, `whole` bytes, of an earlier call."""
  if path == "-":
    return sys.stdout
  if os.path.exists(path):
    print(f"going on after {done} lines of {path}", file=sys.stderr, flush=True)
    os.truncate(path, whole)
  return stack.enter_context(open(path, "a", encoding="utf-8"))


def _skip(rows: Iterator[Row], done: list[Any], output: str) -> None:
  for number, answered in enumerate(done, 1):
    row = next(rows, None)
    if row != answered:
      raise ValueError(
        f"{output} is there, and line {number} of it is not about line {number} of the input: give "
        "another --output, or remove that file"
      )
