"""Parses the command line of `rosetta-t5` and runs its verbs."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from rosetta_t5 import __version__
from rosetta_t5.cli.verbs import VERBS
from rosetta_t5.terminal import begin
from rosetta_t5.user_errors import DEBUG_VARIABLE, did_you_mean, exit_on_user_error

_HELP = ("-h", "--help")


class Parser(argparse.ArgumentParser):
  """A parser that refuses abbreviated options, keeps the lines of examples, and prints short errors."""

  def __init__(self, **options: Any):
    formatter = argparse.RawDescriptionHelpFormatter
    super().__init__(allow_abbrev=False, formatter_class=formatter, **options)

  def error(self, message: str) -> NoReturn:
    """Ends the program with status 2."""
    self.exit(2, f"error: {message}\n  {self.prog} --help shows all options and examples.\n")


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the verb on the command line and returns its exit status.

  Raises:
    SystemExit: --help was given, or the command has failed; the error has been printed.
  """
  with exit_on_user_error():
    try:
      return _run([*(sys.argv[1:] if argv is None else argv)], is_own_process=argv is None)
    finally:
      print(end="", flush=True)  # so that a closed pipe is noticed here


def run_module(verb: str) -> int:
  """Runs `python -m t5x.VERB`: the verb with the arguments of this process."""
  return main([verb, *sys.argv[1:]])


def _run(argv: list[str], is_own_process: bool) -> int:
  if "--debug" in argv:
    os.environ[DEBUG_VARIABLE] = "1"
    argv.remove("--debug")
  argv = argv or ["--help"]
  if argv[0] in _HELP or argv == ["help"]:
    print("usage: rosetta-t5 VERB …    (rosetta-t5 VERB --help shows its options and examples)\n")
    print("\n".join(f"  {name:<20}{verb.help}" for name, verb in VERBS.items()))
    return 0
  if argv[0] == "--version":
    print(f"rosetta-t5 {__version__}")
    return 0
  if is_own_process and argv[0] in VERBS and argv[0] != "completion":
    begin(f"rosetta-t5 {argv[0]}")
  if argv[0] == "help":
    argv = [*argv[1:], "--help"]
  options = parse(argv)
  if _imports_users_modules(argv[0], options):
    sys.path.insert(0, os.getcwd())  # as `python -m` does
  with exit_on_user_error(*options.user_errors), _limited_code(options):
    return int(options.run(options))


def _limited_code(options: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
  """Limits a command that has --trust, and was called without it, to listed code."""
  if getattr(options, "trust", True):
    return contextlib.nullcontext()
  from rosetta_t5.config.language.allow_list import limited_to_list

  return limited_to_list()


def _imports_users_modules(verb: str, options: argparse.Namespace) -> bool:
  """Returns whether a command may import modules in the working directory.

  Otherwise a file there, such as a matplotlib.py beside the config.gin that somebody sent, would be
  imported in place of a package.
  """
  if not VERBS[verb].imports_modules:
    return False
  # Without the option --trust, or without a MODEL_DIR, a command opens no files of other people.
  opens_others_files = hasattr(options, "trust") and getattr(options, "model_dir", "") is not None
  return not opens_others_files or bool(options.trust or getattr(options, "module", None))


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
  if VERBS[name].has_flags:
    from rosetta_t5.config.command_line import split_flags

    arguments, flags = split_flags(arguments, name, parser._option_string_actions)
  options, unknown = parser.parse_known_args(arguments)
  if unknown:
    parser.error(_describe_unknown(unknown, parser, name))
  options.flags = flags
  # A run has a traceback for these errors, unless one of its input files is the cause.
  options.user_errors = () if VERBS[name].has_flags else (ValueError, OSError)
  return options


def add_arguments(parser: argparse.ArgumentParser, name: str, with_flags: bool) -> None:
  """Adds a verb's arguments to a parser, its description and its examples.

  Args:
    with_flags: whether T5X's flags are added too, if the verb takes them.
  """
  verb = VERBS[name]
  module, _, function = verb.arguments.partition(":")
  getattr(importlib.import_module(f"rosetta_t5.{module}"), function)(parser)
  parser.add_argument("--debug", action="store_true", help="print the tracebacks of all errors")
  if with_flags and verb.has_flags:
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
  hint, has_flags = "", VERBS[verb].has_flags
  if not argument.startswith("-"):
    if has_flags and argument.startswith("gin."):
      hint = f" Did you mean --{argument}?"
    elif has_flags and argument.endswith(".gin"):
      hint = f" Did you mean --gin_file={argument}?"
    return f"unexpected argument {argument!r}.{hint}"
  if has_flags:
    from rosetta_t5.config.command_line import add_flags, suggest_binding

    add_flags(parser, verb)
    hint = suggest_binding(option, value if equals else "".join(rest[:1]))
  return f"unknown option {option}.{hint or did_you_mean(option, parser._option_string_actions)}"


def completion_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 completion`."""
  parser.add_argument("shell", choices=("bash", "zsh"))
  parser.set_defaults(run=_print_completion)


def _print_completion(options: argparse.Namespace) -> int:
  parser = Parser(prog="rosetta-t5")
  verbs = parser.add_subparsers()
  for name, verb in VERBS.items():
    add_arguments(verbs.add_parser(name, help=verb.help), name, with_flags=True)
  print(completion_script(parser, options.shell))
  return 0


_TAKES_RECIPES = ("files", "gin_file", "recipe")
# Recipes are found by the path gin/… wherever the package is installed.
_LIST_RECIPES = """
_rosetta_t5_gin_files() {{
  {{ compgen -f -X '!*.gin' -- "$1"; compgen -d -- "$1"; compgen -W '{recipes}' -- "$1"; }} | sort -u
}}
"""
_ZSH_LIST_RECIPES = """
_rosetta_t5_gin_files() {{
  _files -g '*.gin'
  compadd -f -- {recipes}
}}
"""
# Bash splits --option=value into three words, of which shtab's function expects two.
_BASH_JOIN = """
_rosetta_t5() {
  local words=() current=$COMP_CWORD index
  for ((index = 0; index < ${#COMP_WORDS[@]}; index++)); do
    if [[ ${COMP_WORDS[index]} != '=' ]]; then
      words+=("${COMP_WORDS[index]}")
    elif ((index == COMP_CWORD)); then
      words+=('')
    elif ((index < COMP_CWORD)); then
      ((current--))
    fi
  done
  COMP_WORDS=("${words[@]}") COMP_CWORD=$current
  _shtab_rosetta_t5
}
complete -o bashdefault -F _rosetta_t5 rosetta-t5
"""


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
  """Returns the completion script of a parser with subparsers.

  Args:
    parser: the parser of `rosetta-t5`. Arguments that take a text complete the names of files.
  """
  import shtab

  from rosetta_t5.config.t5x_surface import RECIPES

  recipes = " ".join(f"gin/{file.relative_to(RECIPES)}" for file in sorted(RECIPES.rglob("*.gin")))
  preamble = {
    "bash": _LIST_RECIPES.format(recipes=recipes),
    "zsh": _ZSH_LIST_RECIPES.format(recipes=recipes),
  }
  function = "_rosetta_t5_gin_files"
  gin_files = {"bash": function, "zsh": function, "preamble": preamble}
  for action in _actions_of(parser):
    takes_text = action.nargs != 0 and action.type is None and action.choices is None
    if action.dest in _TAKES_RECIPES:
      action.complete = gin_files  # type: ignore[attr-defined]
    elif takes_text:
      action.complete = shtab.FILE  # type: ignore[attr-defined]
  script = shtab.complete(parser, shell)
  if shell == "bash":
    return script + "\n" + _BASH_JOIN
  # Zsh accepts --option value and --option=value where the specification says `--option=`.
  return re.sub(r'^( +"\*?--[\w-]+)(\[.*\]:)', r"\1=\2", script, flags=re.MULTILINE)


def _actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
  """Returns the actions of a parser and its subparsers, without those that choose a subparser."""
  actions = []
  for action in parser._actions:
    if isinstance(action, argparse._SubParsersAction):
      actions += [each for verb in action.choices.values() for each in _actions_of(verb)]
    else:
      actions.append(action)
  return actions
