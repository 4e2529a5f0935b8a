"""`rosetta-t5 infer --input`, which uses a model on texts, rows and conversations, and its options."""

import argparse
import contextlib
import inspect
import io
import itertools
import json
import os
import pathlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from rosetta_t5 import terminal
from rosetta_t5.files import exclusive_output
from rosetta_t5.terminal import output_file, positive_integer, positive_number

LENGTHS = ("input_length", "output_length")
# The options that only --input has, and those that control what predictions may contain.
OPTIONS = ("adapter", "template", "targets", "output", "num_decodes", "n_best", *LENGTHS)
NEEDS_TEMPLATE = "have columns: give the model's input, such as --template 'question: {question} context: {context}'"
# Rows of this many batches are sorted by length. Those of standard input are not: somebody may wait for each answer.
_BATCHES = 8
DECODING_OPTIONS = ("repetition_penalty", "no_repeat_ngram_size", "min_new_tokens", "bad_word")


def infer_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 infer` for texts."""
  add = parser.add_argument_group("texts").add_argument
  add("--input", help="lines of text, or rows of a json, csv, tsv or parquet file; - for stdin")
  add("--template", help="makes the model's input of a row's columns; default: as the run did")
  add("--targets", help="makes the target of a row's columns; the target is then scored")
  text = "a file, or - for stdout (the default); an existing file is continued"
  add("--output", type=output_file, help=text)
  add_adapter_option(add)
  add("--num_decodes", type=positive_integer, help="beams or samples; the run's by default")
  add("--n_best", type=positive_integer, help="also write this many predictions, the best first")
  add_length_options(add)
  add_decoding_options(parser)


def add_adapter_option(add: Callable[..., Any]) -> None:
  """Adds --adapter with a parser's method `add_argument`."""
  text = "a PEFT folder, or a run with an adapter, whose changes of the model are added; repeatable"
  add("--adapter", action="append", metavar="PATH[=WEIGHT]", help=text)


def add_length_options(add: Callable[..., Any]) -> None:
  """Adds --input_length and --output_length with a parser's method `add_argument`."""
  for name in LENGTHS:
    add(f"--{name}", type=positive_integer, help="tokens; the training run's by default")


def add_decoding_options(parser: argparse.ArgumentParser) -> None:
  """Adds the options whose names are those of the arguments of the decode functions."""
  add = parser.add_argument_group("decoding").add_argument
  add("--repetition_penalty", type=positive_number, help="above 1, tokens are repeated less")
  text = "tokens that do not occur twice in order"
  add("--no_repeat_ngram_size", type=positive_integer, help=text)
  add("--min_new_tokens", type=positive_integer, help="predictions have at least this many tokens")
  add("--bad_word", action="append", help="a text that does not occur; can be given repeatedly")


def infer(options: argparse.Namespace) -> int:
  """Reads texts or records and writes the model's predictions or scores, one JSON object per line."""
  from rosetta_t5.trained_model import open_model_dir

  if options.targets is not None and (options.n_best or options.num_decodes):
    raise ValueError("--targets scores texts: leave out --n_best and --num_decodes")
  if options.template is None and _format_of(options.input) != "text":
    options.template = recorded_template(options.model_dir)
  rows = read_rows(options)
  if (first := next(rows, None)) is None:
    raise no_text_error(options.input)
  numbered = enumerate(itertools.chain([first], rows))
  with contextlib.ExitStack() as stack:
    if options.output in (None, "-"):
      file: Any = sys.stdout
      if isinstance(file, io.TextIOWrapper):
        file.reconfigure(encoding="utf-8")
    else:
      settings = _settings_of(options)  # Without a checkpoint, no file is created.
      terminal.tolerate_lost_output()
      file = stack.enter_context(open(options.output, "a", encoding="utf-8"))
      stack.enter_context(exclusive_output(options.output))
      _skip_completed(options.output, settings, numbered)
    model = open_model_dir(options.model_dir, options.flags, options.trust, options.adapter)
    apply_decoding_options(options, model.model)
    results = _infer_rows(model, numbered, options)
    # On a terminal, the results themselves show the progress.
    if file is not sys.stdout or not sys.stdout.isatty():
      results = terminal.track(results, "inferring", unit="rows", stream=sys.stderr)
    for result in results:
      print(_to_json(result), file=file, flush=True)
  return 0


def no_text_error(path: str) -> ValueError:
  """Returns the error for an empty input."""
  name = "Standard input" if path == "-" else path
  return ValueError(f"{name} contains no text: give one text or JSON object per line")


class Row(NamedTuple):
  """A row of the input.

  Attributes:
    inputs: its text, or the record of its columns.
    example: {"input": text or messages, "target": text}; None for an empty line.
  """

  inputs: str | Mapping[str, Any]
  example: dict[str, Any] | None


def recorded_template(model_dir: str) -> str | None:
  """Returns the column or template from which a run of `data.file_task` made its inputs, or None."""
  from rosetta_t5.config.language.statements import Macro, read_program
  from rosetta_t5.trained_model import find_recipe

  _, file = find_recipe(model_dir)
  bindings = read_program([os.fspath(file)] if file.is_file() else []).effective_bindings()
  binding = bindings.get(("", "file_task", "inputs"))
  value = binding and binding.value
  if isinstance(value, Macro) and (value.name,) in bindings:
    value = bindings[value.name,].value
  return value if isinstance(value, str) else None


def read_rows(options: argparse.Namespace) -> Iterator[Row]:
  """Yields the rows of the input: its lines as texts, or records as `data.reading` reads them.

  Raises:
    ValueError: the records need a template, or a row cannot be used.
  """
  from rosetta_t5.data.reading import find_files, make_converter

  path, template, targets = options.input, options.template, options.targets
  name = "the input" if path == "-" else find_files(path)[0]
  file_format = _format_of(path)
  if template is None and targets is not None:
    raise ValueError(f"The rows of {path} {NEEDS_TEMPLATE}")
  if template is not None and file_format == "text":
    file_format = "jsonl"
  templates = {"input": template or "text"} | ({} if targets is None else {"target": targets})
  convert: Any = _conversation if has_conversations(options) else make_converter(templates)
  for number, content in _numbered_records(path, file_format):
    if isinstance(content, str) and not content.strip():
      yield Row(content, None)
      continue
    is_text = isinstance(content, str) and file_format == "text"
    record = {"text": content} if is_text else content
    example = record if isinstance(record, str) else convert(record)
    if isinstance(example, str):
      raise ValueError(f"Line {number} of {name} cannot be used: {example}")
    yield Row(content, {"target": "", **example})


def _format_of(path: str) -> str:
  """Returns the format that a file's name shows; "text" for other names, such as - for standard input."""
  from rosetta_t5.data.reading import DEFAULT_OPTIONS

  with contextlib.suppress(ValueError):
    return DEFAULT_OPTIONS.format_of(path)
  return "text"


def has_conversations(options: argparse.Namespace) -> bool:
  """Returns whether the rows are conversations for the model's chat template: without --template."""
  return options.template is None and _format_of(options.input) != "text"


def _conversation(record: Mapping[str, Any]) -> dict[str, Any] | str:
  """Returns the messages of a row as the input, or the reason why there are none."""
  from rosetta_t5.data.vocabularies.chat_template import conversation_of

  found = conversation_of(record, with_answer=False)
  return f"the rows {NEEDS_TEMPLATE} ({found})" if isinstance(found, str) else {"input": found}


def _numbered_records(path: str, file_format: str) -> Iterator[tuple[int, Any]]:
  """Yields the number of each line or row, and a text, or else a record or the reason why there is none."""
  from rosetta_t5.data.reading import ReadOptions, read_records
  from rosetta_t5.data.reading.files import open_bytes
  from rosetta_t5.data.reading.records import parse_json_line

  # A .json file may contain one array of all records. In other files of lines, each has a result.
  if file_format not in ("text", "jsonl") or ".json" in pathlib.PurePath(path).suffixes:
    yield from read_records(path, ReadOptions(file_format))
    return
  raw = sys.stdin.buffer if path == "-" else open_bytes(path)
  with io.TextIOWrapper(raw, "utf-8-sig", errors="surrogateescape", newline="\n") as lines:
    for number, line in enumerate(lines, 1):
      content: Any = line.rstrip("\r\n")
      if file_format == "jsonl" and content.strip():
        content = parse_json_line(line)
      yield number, content


def _to_json(value: Any) -> str:
  """Returns JSON, with values of Parquet files that it cannot represent as texts."""
  as_text = lambda x: x.decode(errors="replace") if isinstance(x, bytes) else str(x)  # noqa: E731
  return json.dumps(value, ensure_ascii=False, default=as_text)


def _skip_completed(output: str, settings: Any, rows: Iterator[tuple[int, Row]]) -> None:
  """Skips the rows whose results an earlier call has written, and removes its unfinished line.

  Raises:
    ValueError: the output is not that of an earlier call with the same rows and settings.
  """
  from rosetta_t5.inference.result_files import check_same_settings

  file = pathlib.Path(f"{output}.settings.json")
  lines = pathlib.Path(output).read_bytes().splitlines(keepends=True)
  if lines and not file.exists():
    reason = "exists and is not an output of this command: give another file"
    raise ValueError(f"--output {output} {reason}")
  if lines and lines[-1][-1:] != b"\n":
    os.truncate(output, sum(map(len, lines[:-1])))
    del lines[-1]
  if lines:
    check_same_settings(file, settings, output)
    print(f"continuing after {len(lines)} lines of {output}", file=sys.stderr, flush=True)
  for number, line in enumerate(lines, 1):
    _, row = next(rows, (0, None))
    # As text, because NaN differs from itself.
    if row is None or _to_json(row.inputs) != _to_json(json.loads(line)["inputs"]):
      raise ValueError(
        f"{output} exists, and its line {number} does not belong to row {number} of the input: give "
        "another --output, or remove that file"
      )
  file.write_text(json.dumps(settings))


def _settings_of(options: argparse.Namespace) -> dict[str, Any]:
  """Returns what determines the results, besides the input."""
  from rosetta_t5.checkpoints import checkpoint_to_use, fingerprint
  from rosetta_t5.checkpoints.checkpoint_folders import detect_checkpoint_type

  checkpoint = checkpoint_to_use(options.model_dir)
  detect_checkpoint_type(checkpoint)
  given = {f"--{n}": getattr(options, n) for n in (*OPTIONS, *DECODING_OPTIONS) if n != "output"}
  return {
    **{name: value for name, value in given.items() if value is not None},
    "flags": options.flags,
    "checkpoint": checkpoint.name,
    "the checkpoint's content": fingerprint(checkpoint),
  }


def _infer_rows(
  model: Any, rows: Iterator[tuple[int, Row]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
  """Yields {"inputs": row, "prediction": text, "score": number}; without prediction for targets."""
  from rosetta_t5.data.pipeline.inference_data import default_preprocessors
  from rosetta_t5.inference.infer_fn import notes_on_tokens_left_behind
  from rosetta_t5.inference.text_inference import ChatPrompts, InferenceType, TextInference
  from rosetta_t5.models.batch_metrics import LEFT_BEHIND

  # A batch is split over the devices, so its size is rounded up to a multiple of their number.
  size = options.batch_size or 8
  size += -size % model.partitioner.data_mesh_size
  lengths, is_scoring = feature_lengths(model.lengths, options), options.targets is not None
  texts = TextInference(
    *(model.model, model.partitioner, model.state_axes, size, lengths),
    inputs_end="inputs" in model.lengths,
  )
  mode = InferenceType.SCORE if is_scoring else InferenceType.PREDICT_WITH_AUX
  prompts = ChatPrompts(model.model) if has_conversations(options) else None
  preprocessors = prompts.preprocessors if prompts else default_preprocessors()
  call, empty = (preprocessors, model.state), None if is_scoring else b""
  decodes = _decodes(options) | (prompts.decoding if prompts else {})
  truncated, left_behind = Counter[str](), list[float]()
  group_size = size if options.input == "-" else size * _BATCHES
  while group := dict(itertools.islice(rows, group_size)):
    examples = {n: row.example for n, row in group.items() if row.example is not None}
    if prompts:
      examples = {n: {**x, "input": prompts(x["input"])} for n, x in examples.items()}
    order = sorted(examples, key=lambda n: len(examples[n]["input"]))
    ordered = [examples[n] for n in order]
    truncated += texts.count_truncated(ordered)
    results, aux = texts.infer(mode, ordered, *call, min(group), **decodes) if ordered else ([], {})
    fractions = aux.get(LEFT_BEHIND, [0.0] * len(results))
    left_behind += fractions
    scores = aux.get("scores", [None] * len(results))
    outputs = (output for _, output in results)
    computed = dict(zip(order, zip(outputs, scores, fractions, strict=True), strict=True))
    for n, row in group.items():
      output, score, fraction = computed.get(n, (empty, None, 0.0))
      result = {"score": output} if is_scoring else _prediction(output, score, options.n_best)
      yield {"inputs": row.inputs, **result, **({LEFT_BEHIND: fraction} if fraction else {})}
  notes = notes_on_truncated(truncated, lengths)
  for note in [*notes, *notes_on_tokens_left_behind({LEFT_BEHIND: left_behind})]:
    print(f"note: {note}", file=sys.stderr)


def notes_on_truncated(truncated: Mapping[str, int], lengths: Mapping[str, int]) -> list[str]:
  """Returns a note for each feature of which some texts had too many tokens.

  Args:
    truncated: the number of these texts, by feature.
    lengths: the lengths of the features.
  """
  options_of = dict(zip(("inputs", "targets"), LENGTHS, strict=True))
  return [
    f"{count} {feature} had more than {lengths[feature]} tokens and were truncated: set a larger "
    f"--{options_of[feature]}"
    for feature, count in truncated.items()
  ]


def _decodes(options: argparse.Namespace) -> dict[str, Any]:
  """Returns the arguments of `predict_batch_with_aux`: only what is given, so that gin's values count."""
  if options.n_best is None:
    return {} if options.num_decodes is None else {"num_decodes": options.num_decodes}
  num_decodes = max(options.num_decodes or 0, options.n_best)
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


def decoding_controls(options: argparse.Namespace, model: Any) -> dict[str, Any]:
  """Returns the options that control what predictions may contain, by the names of `decoding.Controls`."""
  given = {n: x for n in DECODING_OPTIONS if (x := getattr(options, n)) is not None}
  if words := given.pop("bad_word", None):
    given["bad_words_ids"] = [model.output_vocabulary.encode(word) for word in words]
  return given


def apply_decoding_options(options: argparse.Namespace, model: Any) -> None:
  """Makes a model decode as the options specify.

  Raises:
    ValueError: its decode function lacks an argument.
  """
  from rosetta_t5.models import DecoderOnlyModel
  from rosetta_t5.models.base_model import accepts, set_decode_fn

  given = decoding_controls(options, model)
  if any((getattr(options, name, None) or 1) > 1 for name in ("n_best", "num_decodes")):
    _search_instead_of_greedy(model)
  if getattr(options, "output_length", None) and isinstance(model, DecoderOnlyModel):
    # A row also has the prompt, so its length does not limit the decode.
    limits = ("max_decode_steps", "max_decode_step")
    given |= {n: options.output_length for n in limits if accepts(model.decode_fn, n)}
  if given:
    set_decode_fn(model, model.decode_fn, **given)


def bound_controls(model: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
  """Returns a model's decode function, its arguments that are bound, and the controls among them."""
  from rosetta_t5 import decoding
  from rosetta_t5.config.saved_config import bindings_of

  decode_fn = getattr(model.decode_fn, "func", model.decode_fn)  # of a partial
  bound = {**bindings_of(decode_fn), **getattr(model.decode_fn, "keywords", {})}
  return decode_fn, bound, {n: bound[n] for n in decoding.Controls._fields if n in bound}


def _search_instead_of_greedy(model: Any) -> None:
  """Replaces greedy decoding, whose decodes would all be equal, by beam search with the same controls."""
  from rosetta_t5 import decoding
  from rosetta_t5.models.base_model import set_decode_fn

  decode_fn, bound, kept = bound_controls(model)
  is_sampling = inspect.unwrap(decode_fn) is inspect.unwrap(decoding.temperature_sample)
  if is_sampling and (bound.get("topk", 1) == 1 or bound.get("temperature") == 0):
    if bound.get("max_decode_steps"):
      kept["max_decode_step"] = bound["max_decode_steps"]
    set_decode_fn(model, decoding.beam_search, **kept)
    print("note: several decodes are made by beam search, not greedily", file=sys.stderr)
