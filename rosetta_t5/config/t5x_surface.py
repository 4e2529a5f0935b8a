"""T5X's paths of gin files, its run functions, its retired arguments, and other installations of it."""

import importlib
import importlib.util
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any, TextIO

from rosetta_t5.user_errors import ConfigError, did_you_mean

# The repository's folder gin/: a symbolic link in a checkout, a copy in an installed wheel.
RECIPES = pathlib.Path(__file__).resolve().parents[1] / "recipes"

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
  is_inside = pathlib.Path(path).resolve().is_relative_to(RECIPES.resolve())
  return is_inside or find_recipe(path) is not None


def open_recipe(path: str) -> TextIO:
  """Opens the recipe that `find_recipe` finds."""
  found = find_recipe(path)
  assert found is not None, path
  return found.open(encoding="utf-8")


def find_gin_file(path: str, search_paths: Sequence[str]) -> pathlib.Path:
  """Returns the gin file or Hugging Face folder `path`: in the working directory, in a search path, or a recipe.

  Raises:
    ConfigError: there is none. The text lists the searched folders and files with similar names.
  """
  for folder in ("", *search_paths):
    candidate = pathlib.Path(folder, path)
    # A pipe is allowed. For a name that is too long, these are False, and no error.
    is_model = os.path.exists(candidate / "config.json")
    if is_model or (os.path.exists(candidate) and not os.path.isdir(candidate)):
      return candidate
  found = find_recipe(path)
  if found is None:
    raise ConfigError(_not_found_text(path, search_paths))
  return found


def _not_found_text(path: str, search_paths: Sequence[str]) -> str:
  searched = ", ".join(dict.fromkeys(str(pathlib.Path(p).absolute()) for p in search_paths))
  parts = pathlib.PurePosixPath(path).parts
  ends = ("/".join(parts[n:]) for n in range(1, len(parts)))
  # A path in a checkout of T5X ends in a recipe's path.
  found = next((end for end in ends if find_recipe(end)), "")
  known = set(_candidates(path, search_paths)) - {path}
  return (
    f"there is no gin file {path!r}.{f' Did you mean {found}?' if found else did_you_mean(path, known)}\n"
    f"  searched: {searched}, and the recipes in {RECIPES}\n"
    "  to search another folder too: --gin_search_paths=.,/another/folder"
  )


def _candidates(path: str, search_paths: Sequence[str]) -> Iterator[str]:
  """Yields the paths of all gin files for which `path` may be a misspelling."""
  for folder, ours in FOLDERS:
    for file in (RECIPES / ours).rglob("*.gin"):
      yield f"{folder}/{file.relative_to(RECIPES / ours)}"
  parent = pathlib.Path(path).parent
  for folder in search_paths:
    for file in pathlib.Path(folder, parent).glob("*.gin"):
      yield str(parent / file.name)


# T5X's gin files contain `import __main__ as train_script` and bind `train_script.train`. They mean
# these functions whatever program runs: a console script, pytest, a notebook, `python -m t5x.main`.
RUN_FUNCTION_MODULES = {
  "train": "rosetta_t5.train",
  "evaluate": "rosetta_t5.eval",
  "infer": "rosetta_t5.infer",
  "create_task_from_tfexample_file": "rosetta_t5.data.tasks.file_task",
  "write_inferences_to_file": "rosetta_t5.inference.result_files",
  "precompile": "rosetta_t5.precompile",
  "save": "rosetta_t5.export.saved_model",
}
# T5X's names of `__main__`. One of its files uses `train_script` without importing it.
T5X_RUN_ALIASES = ("train_script", "eval_script", "infer_script")
# The function of each of T5X's run modes.
RUN_MODES = {
  "train": "train",
  "eval": "evaluate",
  "infer": "infer",
  "precompile": "precompile",
  "export": "save",
}


def find_run_function(name: str) -> Callable[..., Any]:
  """Returns the function that `__main__.NAME` means: the running program's own, else ours.

  Raises:
    KeyError: there is no run function of this name.
  """
  if callable(own := getattr(sys.modules["__main__"], name, None)):
    return own
  return getattr(importlib.import_module(RUN_FUNCTION_MODULES[name]), name)


# Pairs (function or class, argument).
RETIRED_ARGUMENTS = {
  # Whether arrays are global: since jax 0.4 all arrays are. T5X's own export.gin still sets False.
  ("RestoreCheckpointConfig", "use_gda"),
  ("SaveCheckpointConfig", "use_gda"),
  *((name, "use_gda") for name in ("train", "evaluate", "infer")),
  # The same. T5X's own sparse_upcycle.gin still sets True.
  ("train", "use_jax_array"),
  # The number of values that the model's function returns. T5X's own export.gin sets the default, None.
  ("create_inference_function", "output_len"),
}


_STAND_INS = {
  r"flaxformer\.architectures\.t5\.t5_architecture": "t5x.contrib.flaxformer",
  r"flaxformer\.components\.(attention\.dense_attention|dense|embedding)": "t5x.contrib.flaxformer",
  r"flaxformer\.components\.(layer_norm|relative_position_biases)": "t5x.contrib.flaxformer",
  r"prompt_tuning\.prompts": "t5x.contrib.prompt_tuning.prompts",
  r"prompt_tuning\.(masks|extended\.train\.ia3)": "t5x.contrib.prompt_tuning.train",
  r"prompt_tuning\.train\.(layers|optim|partitioning|prompts|utils)": "t5x.contrib.prompt_tuning.train",
}


def stand_in_of(module: str) -> str | None:
  """Returns the module of `t5x` that has the names of a module of flaxformer or of prompt_tuning, or None.

  Published gin files for T5X import them. Where flaxformer, which both packages need, is installed, gin files
  import the originals.
  """
  found = next((ours for regex, ours in _STAND_INS.items() if re.fullmatch(regex, module)), None)
  return None if found and importlib.util.find_spec("flaxformer") else found


T5X_PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "t5x"
_REINSTALL = "pip install --force-reinstall --no-deps rosetta-t5"


def check_t5x_installation() -> None:
  """Raises ConfigError if another t5x is imported, or has overwritten this one: gin would use its classes."""
  spec = importlib.util.find_spec("t5x")
  locations = [*(spec.submodule_search_locations or ()), spec.origin] if spec else ["no module"]
  found = pathlib.Path(locations[0] or "").resolve()
  other = next(iter(metadata.distributions(name="t5x")), None)
  files = [pathlib.Path(str(file.locate())) for file in (other.files or ())] if other else []
  if found == T5X_PACKAGE and T5X_PACKAGE not in {file.parent.resolve() for file in files}:
    return
  fix = f"remove {found.parent} from PYTHONPATH, or run from a folder without t5x/ or t5x.py"
  if other:
    fix = f"pip uninstall {other.metadata['Name']} && {_REINSTALL}"
  raise ConfigError(
    f"`import t5x` finds {found}, or files of it, instead of this distribution's package\n"
    f"  {T5X_PACKAGE}\n  {fix}"
  )
