"""A script that makes bash or zsh complete the words of a command."""

from __future__ import annotations

import argparse
import re

from rosetta_t5.config.t5x_surface import RECIPES

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
