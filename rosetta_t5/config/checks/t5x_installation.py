"""Checks that `import t5x` finds this distribution's package and not Google's T5X."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from importlib import metadata

from rosetta_t5.user_errors import ConfigError

T5X_PACKAGE = pathlib.Path(__file__).resolve().parents[3] / "t5x"
_REINSTALL = "pip install --force-reinstall --no-deps rosetta-t5"


def check_t5x_installation() -> None:
  """Prints a note if another distribution called t5x is installed too.

  Raises:
    ConfigError: `import t5x` finds the other one, or it has overwritten files of this one. Gin files
      would use its classes.
  """
  found = _imported_t5x()
  other = next(iter(metadata.distributions(name="t5x")), None)
  fix = f"pip uninstall {other.metadata['Name']} && {_REINSTALL}" if other else _REINSTALL
  if found != T5X_PACKAGE:
    if found is not None and not other:
      fix = f"remove {found.parent} from PYTHONPATH, or run from a folder without t5x/ or t5x.py"
    found_text = f"{found} instead of" if found else "no module; it should find"
    raise ConfigError(
      f"`import t5x` finds {found_text} this distribution's package\n  {T5X_PACKAGE}\n  {fix}"
    )
  if other is None:
    return
  name = f"{other.metadata['Name']} {other.version}"
  files = (pathlib.Path(str(other.locate_file(file))) for file in other.files or ())
  if T5X_PACKAGE in {file.parent.resolve() for file in files}:
    raise ConfigError(f"{name} has overwritten files in {T5X_PACKAGE}\n  {fix}")
  print(
    f"note: {name} is installed too. `import t5x` finds this distribution's package "
    f"({T5X_PACKAGE})\n  because it comes first on sys.path. Better: {fix.partition(' &&')[0]}",
    file=sys.stderr,
  )


def _imported_t5x() -> pathlib.Path | None:
  """Returns the folder or file that `import t5x` finds; None if it finds nothing."""
  spec = importlib.util.find_spec("t5x")
  if spec is None:
    return None
  locations = [*(spec.submodule_search_locations or ()), spec.origin]
  return pathlib.Path(locations[0] or "").resolve()
