"""The run functions that gin files find in `__main__`, whichever program is running."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from rosetta_t5.config.language.statements import Binding, Import, Program

# T5X's gin files contain `import __main__ as train_script` and bind `train_script.train`. They mean
# these functions whatever program runs: a console script, pytest, a notebook, `python -m t5x.main`.
RUN_FUNCTION_MODULES = {
  "train": "rosetta_t5.train",
  "evaluate": "rosetta_t5.eval",
  "infer": "rosetta_t5.infer",
  "create_task_from_tfexample_file": "rosetta_t5.data.tasks.file_task",
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
  own = getattr(sys.modules["__main__"], name, None)
  if callable(own):
    return own
  return getattr(importlib.import_module(RUN_FUNCTION_MODULES[name]), name)


def runs_bound_by(program: Program) -> list[str]:
  """Returns the runs whose arguments a program binds through an import of `__main__`, in order."""
  aliases = {"__main__", "export_lib"}  # T5X's gin files bind the export by its module
  names = []
  for statement in program.statements():
    if isinstance(statement, Import) and statement.gin_statement.module == "__main__":
      aliases.add(statement.gin_statement.bound_name())
    elif isinstance(statement, Binding):
      first, *rest = statement.selector.split(".")
      if first in aliases and len(rest) == 1:
        names += rest
      elif statement.argument and not rest:
        names.append(first)  # on the command line, train.X reaches the run without an import
  return [name for name in dict.fromkeys(names) if name in RUN_MODES.values()]
