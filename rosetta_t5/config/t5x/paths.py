"""Finds gin files: the user's own first, then the recipes, by their paths or T5X's."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import TextIO

from rosetta_t5.user_errors import ConfigError, did_you_mean

# The repository's folder gin/: a symbolic link in a checkout, a copy in an installed wheel.
RECIPES = pathlib.Path(__file__).resolve().parents[2] / "recipes"

# Folders by T5X's paths or this repository's, and the folder of RECIPES that contains their files. The
# first row that has a file wins: T5X keeps a family's runs, models and examples in one folder.
FOLDERS = (
  ("gin", ""),
  ("t5x/configs/runs", "runs"),
  ("t5x/examples/t5/t5_1_1/examples", "examples"),
  ("t5x/examples/t5/byt5/examples", "examples/byt5"),
  ("t5x/examples/t5", "models"),
  ("t5x/examples/scalable_t5/t5_1_1/examples", "examples/scalable_t5"),
  ("t5x/examples/scalable_t5/umt5", "models/umt5"),
  ("t5x/examples/scalable_t5/umt5", "examples/umt5"),
  ("t5x/examples/scalable_t5", "models/scalable_t5"),
  ("t5x/examples/decoder_only/examples", "examples/decoder_only"),
  ("t5x/examples/decoder_only/models", "models/decoder_only"),
  ("t5x/examples/decoder_only", "models/decoder_only"),  # the name in T5X's own examples
  ("t5x/contrib/gpu/t5/configs/runs", "runs"),
  ("t5x/contrib/moe/configs/runs", "runs/moe"),
  ("t5x/contrib/gpu/t5/t5_1_1/examples", "examples"),
  ("t5x/contrib/gpu/t5", "models"),
)


def find_recipe(path: str) -> pathlib.Path | None:
  """Returns the recipe whose path is `path` in T5X or in this repository, or None."""
  name = pathlib.PurePosixPath(path)
  if name.parts[:2] == ("t5x", "t5x"):  # in gin files written beside a checkout of T5X
    name = pathlib.PurePosixPath(*name.parts[1:])
  for folder, ours in FOLDERS:
    if name.is_relative_to(folder):
      found = RECIPES / ours / name.relative_to(folder)
      if found.is_file():
        return found
  return None


def is_recipe(path: str) -> bool:
  """Returns whether a gin file, as the user named it, is one of the recipes."""
  return find_recipe(path) is not None or pathlib.Path(path).resolve().is_relative_to(
    RECIPES.resolve()
  )


def open_recipe(path: str) -> TextIO:
  """Opens the recipe that `find_recipe` finds."""
  found = find_recipe(path)
  assert found is not None, path
  return found.open(encoding="utf-8")


def find_gin_file(path: str, search_paths: Sequence[str]) -> pathlib.Path:
  """Returns the gin file `path`: in the working directory, in a search path, or among the recipes.

  Raises:
    ConfigError: there is none. The text lists the searched folders and files with similar names.
  """
  for folder in ("", *search_paths):
    candidate = pathlib.Path(folder, path)
    # A pipe is allowed. For a name that is too long, these are False, and no error.
    if os.path.exists(candidate) and not os.path.isdir(candidate):
      return candidate
  found = find_recipe(path)
  if found is None:
    raise ConfigError(_not_found_text(path, search_paths))
  return found


def _not_found_text(path: str, search_paths: Sequence[str]) -> str:
  searched = ", ".join(dict.fromkeys(str(pathlib.Path(p).absolute()) for p in search_paths))
  known = set(_candidates(path, search_paths))
  folder, _, _ = path.rpartition("/")
  siblings = sorted(name.rpartition("/")[2] for name in known if name.rpartition("/")[0] == folder)
  lines = [
    f"there is no gin file {path!r}.{_recipe_at_the_end(path) or did_you_mean(path, known - {path})}",
    *([f"  in {folder}: {', '.join(siblings)}"] if folder and siblings else []),
    f"  searched: {searched}, and the recipes in {RECIPES}",
    "  to search another folder too: --gin_search_paths=.,/another/folder",
  ]
  return "\n".join(lines)


def _recipe_at_the_end(path: str) -> str:
  """Returns a hint if the path, such as one in a checkout of T5X, ends in a recipe's path."""
  parts = pathlib.PurePosixPath(path).parts
  ends = ("/".join(parts[n:]) for n in range(1, len(parts)))
  found = next((end for end in ends if find_recipe(end)), "")
  return f" Did you mean {found}?" if found else ""


def _candidates(path: str, search_paths: Sequence[str]) -> Iterator[str]:
  """Yields the paths of all gin files for which `path` may be a misspelling."""
  for folder, ours in FOLDERS:
    for file in (RECIPES / ours).rglob("*.gin"):
      yield f"{folder}/{file.relative_to(RECIPES / ours)}"
  parent = pathlib.Path(path).parent
  for folder in search_paths:
    for file in pathlib.Path(folder, parent).glob("*.gin"):
      yield str(parent / file.name)
