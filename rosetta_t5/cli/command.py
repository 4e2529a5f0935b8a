"""The command `rosetta-t5`: the table of its verbs, and one way to parse, run and complete them."""

import argparse
import contextlib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from rosetta_t5 import __version__
from rosetta_t5.terminal import begin, machine_path, option_names, output_file
from rosetta_t5.user_errors import DEBUG_VARIABLE, did_you_mean, exit_on_user_error

_HELP = ("-h", "--help")


class Verb(NamedTuple):
  """A verb of the command line.

  Attributes:
    help: what it does, in one line.
    examples: the arguments of calls that --help shows.
    arguments: the MODULE:FUNCTION of rosetta_t5 that adds the verb's arguments to a parser, and as
      the default `run` the function that gets their values and returns the exit status. By default it
      is `VERB_arguments` of `run_commands`.
  """

  help: str
  examples: tuple[str, ...]
  arguments: str = ""


# These verbs take T5X's flags too, such as --gin.NAME=VALUE, as `options.flags`, and may import users' modules.
_RUNS, _CHECKS = ("train", "eval", "infer", "export", "quickstart"), ("check", "plan", "compile")
WITH_FLAGS = (*_RUNS, *_CHECKS, "inspect", "finetune", "embed")
VERBS = {
  "train": Verb(
    "Train a model as gin files configure it, or continue its training (python -m t5x.train).",
    (
      "--gin_file=gin/examples/quickstart.gin --gin.TRAIN_STEPS=100",
      "--gin_file=my_run.gin --dry_run",
    ),
  ),
  "finetune": Verb(
    "Finetune a model on rows of a file: choose all settings, write them as a gin file, and train.",
    (
      "google/flan-t5-small rows.jsonl --inputs '{question}' --targets '{answer}' --out runs/qa",
      "models/t5-small reviews.csv --inputs text --targets label --out runs/labels --dry_run",
    ),
    "cli.finetune.command:add_arguments",
  ),
  "eval": Verb(
    "Evaluate the task or the loss of a trained model, or what gin files configure (t5x.eval).",
    ("--model_dir runs/squad --split test", "--model_dir runs/squad --file new_rows.csv"),
  ),
  "infer": Verb(
    "Write predictions or scores: for texts, for a run's own task, or as gin files configure it.",
    (
      "--model_dir runs/squad --input questions.jsonl --template 'question: {question}'",
      "--gin_file=gin/examples/base_wmt_infer.gin --gin.CHECKPOINT_PATH=\"'runs/wmt'\"",
    ),
  ),
  "embed": Verb(
    "Write vectors of texts: what a model's encoder computes, as .npy or .parquet.",
    (
      "--model_dir sentence-transformers/sentence-t5-base --input texts.txt --output vectors.npy",
      "--model_dir runs/squad --input rows.csv --template '{question}' --output vectors.parquet",
    ),
    "cli.embed:add_arguments",
  ),
  "export": Verb(
    "Write a model as a TensorFlow SavedModel and as StableHLO (t5x.export).",
    ("--model_dir google/flan-t5-small --output_dir exported/flan --num_decodes 4",),
  ),
  "chat": Verb(
    "Answer messages by a model's chat template, or fill the blanks in sentences that you type.",
    ("quickstart/run", "models/llama-3.2-1b-instruct --output_length 256"),
    "cli.chat:add_arguments",
  ),
  "serve": Verb(
    "Serve models over HTTP, with the interface of OpenAI's servers.",
    ("--model_dir google/flan-t5-base", "--model_dir runs/base --adapter qa=runs/qa --port 8080"),
    "cli.serve:add_arguments",
  ),
  "check": Verb(
    "Report all errors in gin files, and what they would run; nothing is run.",
    ("my_run.gin --gin.MODEL_DIR=\"'runs/mine'\" --devices=64",),
  ),
  "plan": Verb(
    "Estimate the memory, time and traffic of a recipe on GPUs that need not be present.",
    ("gin/examples/xl_pile_pretrain.gin --devices=64 --gpu=h200",),
    "plan.plan_command:add_arguments",
  ),
  "compile": Verb(
    "Compile a recipe's step for GPUs that need not be present, and show the program.",
    ("gin/examples/xl_pile_pretrain.gin --devices=64 --mesh='{\"fsdp\": 64}' --json=xl.json",),
    "gpu_program.compile_command:add_arguments",
  ),
  "convert": Verb(
    "Write a checkpoint in another layout, and verify that the model is the same.",
    ("google/flan-t5-small runs/flan --to t5x", "runs/squad out --to hf --tokenizer spiece.model"),
    "conversion.convert:add_arguments",
  ),
  "ckpt": Verb(
    "Inspect, compare and verify checkpoints of any layout.",
    ("ls runs/squad", "show runs/squad", "diff runs/squad exported", "verify runs/squad --write"),
    "checkpoints.ckpt_command:add_arguments",
  ),
  "vocab": Verb(
    "Train a vocabulary on your text, or show how one splits a text.",
    ("train --input 'corpus/*.txt' --size 32000 --out my.model", "show my.model 'some text'"),
    "data.vocabularies.vocab_command:add_arguments",
  ),
  "prepare": Verb(
    "Tokenize text into shards.",
    ("--input 'corpus/*.jsonl.zst' --vocab my.model --out corpus_tokens",),
    "data.prepared.prepare:add_arguments",
  ),
  "inspect": Verb(
    "Show a task's batches as text, their statistics and the problems found.",
    (
      "rows.tsv --inputs 'question: {question}' --targets answer --vocab my.model",
      "squad_v010_allanswers --tfds_data_dir /data --lengths inputs=512,targets=64 --pack",
    ),
  ),
  "quickstart": Verb(
    "Pretrain a small T5 on the text of Python's standard library, and finetune it on dates.",
    ("", "--gin.TRAIN_STEPS=200"),
    "cli.quickstart:add_arguments",
  ),
  "report": Verb(
    "Write one HTML page that shows training runs, this package's or T5X's, and compares them.",
    ("runs/small runs/base --out compared.html", "runs/small --follow"),
    "run_report.report_command:add_arguments",
  ),
  "bench": Verb(
    "Time a training step on this machine's devices.",
    ("--size base --batch 128", "--size large --batch 64 --fp8 --kernel cudnn --json large.json"),
    "cli.bench:add_arguments",
  ),
  "doctor": Verb(
    "Show what is installed, what is missing, and the devices.", ("",), "cli.doctor:add_arguments"
  ),
  "completion": Verb(
    "Print a script that makes a shell complete verbs and options.",
    ("bash > ~/.local/share/bash-completion/completions/rosetta-t5",),
    "cli.command:completion_arguments",
  ),
}


class Parser(argparse.ArgumentParser):
  """A parser that refuses abbreviated options, keeps the lines of examples, and prints short errors."""

  def __init__(self, **options: Any):
    formatter = argparse.RawDescriptionHelpFormatter
    super().__init__(allow_abbrev=False, formatter_class=formatter, **options)

  def error(self, message: str) -> NoReturn:
    """Ends the program with status 2."""
    self.exit(2, f"error: {message}\n  {self.prog} --help shows all options and examples.\n")


def main(argv: Sequence[str] | None = None, trusts_gin_files: bool = False) -> int:
  """Runs the verb on the command line and returns its exit status.

  Args:
    argv: the verb and its arguments; None for those of this process.
    trusts_gin_files: whether gin files of the command line run their code without --trust.

  Raises:
    SystemExit: --help was given, or the command has failed; the error has been printed.
  """
  with exit_on_user_error():
    try:
      given = [*(sys.argv[1:] if argv is None else argv)]
      return _run(given, argv is None, trusts_gin_files)
    finally:
      print(end="", flush=True)  # so that a closed pipe is noticed here


def run_module(verb: str) -> int:
  """Runs `python -m t5x.VERB`: the verb with the arguments of this process, and the gin files' code."""
  begin(f"t5x.{verb}")
  return main([verb, *sys.argv[1:]], trusts_gin_files=True)


def _run(argv: list[str], is_own_process: bool, trusts_gin_files: bool) -> int:
  if "--debug" in argv:
    os.environ[DEBUG_VARIABLE] = "1"
    argv.remove("--debug")
  if not argv or argv[0] in _HELP or argv == ["help"]:
    print("usage: rosetta-t5 VERB …    (rosetta-t5 VERB --help shows its options and examples)\n")
    print("\n".join(f"  {name:<20}{verb.help}" for name, verb in VERBS.items()))
    return 0
  if argv[0] == "--version":
    print(f"rosetta-t5 {__version__}")
    return 0
  if is_own_process and argv[0] in VERBS and argv[0] != "completion":
    begin(f"rosetta-t5 {argv[0]}")
  options = parse([*argv[1:], "--help"] if argv[0] == "help" else argv)
  is_trusted = getattr(options, "trust", True)
  is_trusted = is_trusted or (trusts_gin_files and options.model_dir is None)
  limited: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
  if not is_trusted:
    from rosetta_t5.config.language.allow_list import limited_to_list

    limited = limited_to_list()
  # A file beside the config.gin that somebody sent, such as matplotlib.py, must not replace a package.
  if argv[0] in WITH_FLAGS and (is_trusted or getattr(options, "module", None)):
    sys.path.insert(0, os.getcwd())  # as `python -m` does
  with exit_on_user_error(*options.user_errors), limited:
    return int(options.run(options))


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Returns the values of a verb's arguments; the verb comes first."""
  name, *arguments = argv
  if name not in VERBS:
    Parser(prog="rosetta-t5").error(
      f"rosetta-t5 has no verb {name!r}.{did_you_mean(name, VERBS)}\n  verbs: {', '.join(VERBS)}"
    )
  parser = Parser(prog=f"rosetta-t5 {name}")
  flags: list[str] = []
  add_arguments(parser, name, with_flags=not {*_HELP}.isdisjoint(arguments))
  if name in WITH_FLAGS:
    from rosetta_t5.config.command_line import split_flags

    arguments, flags = split_flags(arguments, name, option_names(parser))
  options, unknown = parser.parse_known_args(arguments)
  if unknown:
    parser.error(_describe_unknown(unknown, parser, name))
  options.flags = flags
  # A run has a traceback for these errors, unless one of its input files is the cause.
  options.user_errors = () if name in WITH_FLAGS else (ValueError, OSError)
  return options


def add_arguments(parser: argparse.ArgumentParser, name: str, with_flags: bool) -> None:
  """Adds a verb's arguments to a parser, its description and its examples.

  Args:
    with_flags: whether T5X's flags are added too, if the verb takes them.
  """
  verb = VERBS[name]
  module, _, function = (verb.arguments or f"cli.run_commands:{name}_arguments").partition(":")
  getattr(importlib.import_module(f"rosetta_t5.{module}"), function)(parser)
  parser.add_argument("--debug", action="store_true", help="print the tracebacks of all errors")
  if with_flags and name in WITH_FLAGS:
    from rosetta_t5.config.command_line import add_flags

    usage = parser.format_usage().removeprefix("usage: ").rstrip()
    parser.usage = f"{usage} [--gin.NAME=VALUE …]"
    add_flags(parser, name)
  parser.description = verb.help
  calls = (f"  rosetta-t5 {name} {example}".rstrip() for example in verb.examples)
  parser.epilog = "\n".join(["examples:", *calls])


def _describe_unknown(unknown: Sequence[str], parser: argparse.ArgumentParser, verb: str) -> str:
  """Returns the text of the error for arguments that a verb does not have."""
  argument, *rest = unknown
  option, equals, value = argument.partition("=")
  hint, has_flags = "", verb in WITH_FLAGS
  if not argument.startswith("-"):
    if has_flags and argument.startswith("gin."):
      hint = f" Did you mean --{argument}?"
    elif has_flags and argument.endswith(".gin"):
      hint = f" Did you mean --gin_file={argument}?"
    return f"unexpected argument {argument!r}.{hint}"
  if (own := f"--{option[2:].replace('-', '_')}") in option_names(parser):
    hint = f" Did you mean {own}?"
  elif has_flags:
    from rosetta_t5.config.command_line import add_flags, suggest_binding

    add_flags(parser, verb)
    hint = suggest_binding(option, value if equals else "".join(rest[:1]))
  return f"unknown option {option}.{hint or did_you_mean(option, option_names(parser))}"


def completion_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 completion`."""
  parser.add_argument("shell", choices=("bash", "zsh"))
  parser.set_defaults(run=_print_completion)


def _print_completion(options: argparse.Namespace) -> int:
  """Prints a script in which arguments that take a text complete the names of files."""
  import shtab

  parser = Parser(prog="rosetta-t5")
  verbs = parser.add_subparsers()
  for name, verb in VERBS.items():
    add_arguments(verbs.add_parser(name, help=verb.help), name, with_flags=True)
  actions, text_types = list(parser._actions), (None, machine_path, output_file)
  for action in actions:  # which the loop extends by those of subcommands
    if isinstance(action, argparse._SubParsersAction):
      actions += [each for verb in action.choices.values() for each in verb._actions]
    elif action.nargs != 0 and action.choices is None and action.type in text_types:
      action.complete = shtab.FILE  # type: ignore[attr-defined]
  script = shtab.complete(parser, options.shell)
  if options.shell == "zsh":  # It accepts --option value, too, where the script says `--option=`.
    script = re.sub(r'^( +"\*?--[\w-]+)(\[.*\]:)', r"\1=\2", script, flags=re.MULTILINE)
  print(script)
  return 0
