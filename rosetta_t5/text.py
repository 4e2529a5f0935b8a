"""Text in, text out, with a trained model: the commands `rosetta-t5 infer --input` and `chat`."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import string
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from rosetta_t5.config.errors import errors_as_text

Row = str | dict[str, Any]
_PROMPT = "> "


def infer(argv: Sequence[str]) -> int:
  """Reads texts or rows, a line each, and writes what the model says of them, a JSON object each."""
  options = _infer_parser().parse_args(argv)
  with errors_as_text(), contextlib.ExitStack() as stack:
    templates = _Templates(options.template, options.targets, options.input)
    source = _open_input(options.input, stack)
    target, done = _open_output(options.output, stack)
    rows = _rows(source, templates)
    _skip(rows, done, options.output)
    opened = _open_model(options.model_dir)
    for written in _infer_rows(opened, rows, templates, options):
      print(json.dumps(written, ensure_ascii=False), file=target, flush=True)
  return 0


def chat(argv: Sequence[str]) -> int:
  """Reads sentences with blanks from the terminal, and shows them filled."""
  parser = argparse.ArgumentParser("rosetta-t5 chat", description=chat.__doc__)
  parser.add_argument("model_dir", help="MODEL_DIR of a run that learnt by span corruption")
  options = parser.parse_args(argv)
  from rosetta_t5.inference.infilling import BLANK, BlankFiller

  with errors_as_text():
    opened = _open_model(options.model_dir)
    fill = BlankFiller(opened.model, opened.state.params, opened.lengths["inputs"])
    print(f"Type text with blanks, such as: The sky is {BLANK}. An empty line ends.", flush=True)
    for text in _typed():
      try:
        print(fill([text])[0], flush=True)
      except ValueError as error:  # the next line may be better
        print(error, flush=True)
  return 0


def _typed() -> Iterator[str]:
  while True:
    try:
      text = input(_PROMPT).strip()
    except (EOFError, KeyboardInterrupt):
      return
    if not text:
      return
    yield text


def _infer_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser("rosetta-t5 infer", description=infer.__doc__)
  add = parser.add_argument
  add("--model_dir", required=True, help="MODEL_DIR of a training run, or one of its checkpoints")
  add("--input", required=True, help="a file with a text or a JSON object a line, or - for stdin")
  add("--template", help="makes the model's input of a JSON object: 'question: {question}'")
  add("--targets", help="makes the target of a JSON object; the target is then scored")
  add("--output", default="-", help="a file, - for stdout; a file that is there is continued")
  add("--batch_size", type=int, default=8)
  add("--num_decodes", type=int, default=1, help="beams or samples; the best is written")
  add("--input_length", type=int, help="tokens; the run's if not given")
  add("--output_length", type=int, help="tokens; the run's if not given")
  return parser


class _Templates:
  """Makes the model's texts of a row."""

  def __init__(self, inputs: str | None, targets: str | None, path: str):
    if inputs is None and (targets is not None or path.endswith(".jsonl")):
      raise ValueError(
        f"the rows of {path} are JSON objects, and what the model is to read of them is not said: "
        "give --template, such as --template 'question: {question} context: {context}'"
      )
    self.inputs, self.targets = inputs, targets

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
    for template in filter(None, (self.inputs, self.targets)):
      for _, field, _, _ in string.Formatter().parse(template):
        if field is not None and field.split(".")[0].split("[")[0] not in row:
          raise ValueError(
            f"line {number} of the input has no field {field!r}, which the template {template!r} "
            f"names; it has {', '.join(row)}"
          )
    return row

  def example(self, row: Row) -> dict[str, str]:
    """Returns the model's texts."""
    if isinstance(row, str):
      return {"input": row, "target": ""}
    target = "" if self.targets is None else self.targets.format(**row)
    return {"input": (self.inputs or "").format(**row), "target": target}


def _rows(source: IO[str], templates: _Templates) -> Iterator[Row]:
  for number, line in enumerate(source, 1):
    if line.strip():
      yield templates.parse(line.rstrip("\n"), number)


def _infer_rows(
  opened: Any, rows: Iterator[Row], templates: _Templates, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
  """Yields {"inputs": row, "prediction": text, "score": number}, or the target's score alone."""
  from rosetta_t5.data.text_examples import default_preprocessors
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
  from rosetta_t5.data.tensorflow_import import import_seqio
  from rosetta_t5.model_dir import open_model_dir
  from rosetta_t5.parallel import cache_compiled_programs

  cache_compiled_programs()
  import_seqio()  # before gin files import it: it must not find a GPU
  return open_model_dir(model_dir)


def _open_input(path: str, stack: contextlib.ExitStack) -> IO[str]:
  if path == "-":
    return sys.stdin
  if not pathlib.Path(path).is_file():
    raise ValueError(f"there is no file {path!r}: give --input a file, or - for standard input")
  return stack.enter_context(open(path, encoding="utf-8"))


def _open_output(path: str, stack: contextlib.ExitStack) -> tuple[IO[str], list[Any]]:
  """Returns where to write, and the rows that an earlier call has answered there."""
  if path == "-":
    return sys.stdout, []
  done: list[Any] = []
  if os.path.exists(path):
    whole = 0
    with open(path, "rb") as earlier:
      for line in earlier:
        if not line.endswith(b"\n"):
          break  # written by a call that was killed
        whole += len(line)
        done.append(json.loads(line)["inputs"])
    os.truncate(path, whole)
    print(f"going on after {len(done)} lines of {path}", file=sys.stderr, flush=True)
  return stack.enter_context(open(path, "a", encoding="utf-8")), done


def _skip(rows: Iterator[Row], done: list[Any], output: str) -> None:
  for number, answered in enumerate(done, 1):
    row = next(rows, None)
    if row != answered:
      raise ValueError(
        f"{output} is there, and line {number} of it is not about line {number} of the input: give "
        "another --output, or remove that file"
      )
