"""Checks that `import t5x` finds this distribution's package and not Google's T5X."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from importlib import metadata

from rosetta_t5.config.errors import ConfigError

T5X_PACKAGE = pathlib.Path(__file__).resolve().parents[3] / "t5x"
_REINSTALL = "pip install --force-reinstall --no-deps rosetta-t5"


def check_t5x_installation() -> None:
  """Prints a note if another distribution called t5x is installed too.

  Raises:
    ConfigError: `import t5x` finds the other one, or it has overwritten files of this one. Gin files
      would reach its classes.
  """
  found, other = _imported_t5x(), _other_distribution()
  name = f"{other.metadata['Name']} {other.version}" if other else ""
  fix = f"pip uninstall {other.metadata['Name']} && {_REINSTALL}" if other else _REINSTALL
  if found != T5X_PACKAGE:
    if found is not None and not other:
      fix = f"remove {found.parent} from PYTHONPATH, or run from a folder without a folder t5x/"
    raise ConfigError(
      f"`import t5x` finds {found or 'nothing'} instead of this distribution's package\n"
      f"  {T5X_PACKAGE}\n  {fix}"
    )
  if other is None:
    return
  folders = {
    pathlib.Path(str(other.locate_file(file))).parent.resolve() for file in other.files or ()
  }
  if T5X_PACKAGE in folders:
    raise ConfigError(f"{name} has overwritten files in {T5X_PACKAGE}\n  {fix}")
  print(
    f"note: {name} is installed too. `import t5x` finds this distribution's package "
    f"({T5X_PACKAGE})\n  because it comes first on sys.path. Better: {fix.partition(' &&')[0]}",
    file=sys.stderr,
  )


def _imported_t5x() -> pathlib.Path | None:
  """Returns the folder that `import t5x` finds."""
  spec = importlib.util.find_spec("t5x")
  if spec is None:
    return None
  folders = [*([str(pathlib.Path(spec.origin).parent)] if spec.origin else [])]
  folders += spec.submodule_search_locations or ()
  return pathlib.Path(folders[0]).resolve() if folders else None


def _other_distribution() -> metadata.Distribution | None:
  try:
    return metadata.distribution("t5x")
  except metadata.PackageNotFoundError:
    return None
