"""Whether `import t5x` finds the doors of this package, or those of another distribution."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from importlib import metadata

from rosetta_t5.config.errors import ConfigError

OURS = pathlib.Path(__file__).resolve().parents[3] / "t5x"


def check_which_t5x() -> None:
  """Says so if Google's T5X, or another package of that name, is installed beside this one.

  Raises:
    ConfigError: theirs stands before ours, or has written over it: gin files would reach its classes.
  """
  found = found_t5x()
  others = _other_distributions()
  if found != OURS:
    raise ConfigError(
      f"`import t5x` finds another package than this one's: {found or 'nothing'}\n"
      f"  this one's is {OURS}\n  {_how_to_mend(found, others)}"
    )
  overwritten = [d for d in others if OURS in {_folder(f, d) for f in d.files or ()}]
  if overwritten:
    raise ConfigError(
      f"{_names(overwritten)} has written its files over this one's in {OURS}\n"
      f"  {_how_to_mend(found, overwritten)}"
    )
  if others:
    print(
      f"note: {_names(others)} is installed too; `import t5x` finds this package's ({OURS}).\n"
      f"  Whichever stands first on sys.path wins, so better: {_uninstall(others)}",
      file=sys.stderr,
    )


def found_t5x() -> pathlib.Path | None:
  """The folder that `import t5x` finds."""
  spec = importlib.util.find_spec("t5x")
  if spec is None:
    return None
  places = [
    spec.origin and pathlib.Path(spec.origin).parent,
    *(spec.submodule_search_locations or ()),
  ]
  first = next((place for place in places if place), None)
  return pathlib.Path(first).resolve() if first else None


def _other_distributions() -> list[metadata.Distribution]:
  """T5X itself, and whatever else calls itself so."""
  try:
    return [metadata.distribution("t5x")]
  except metadata.PackageNotFoundError:
    return []


def _folder(file: metadata.PackagePath, distribution: metadata.Distribution) -> pathlib.Path:
  return pathlib.Path(str(distribution.locate_file(file))).parent.resolve()


def _names(distributions: list[metadata.Distribution]) -> str:
  return ", ".join(f"{d.metadata['Name']} {d.version}" for d in distributions)


def _uninstall(distributions: list[metadata.Distribution]) -> str:
  return f"pip uninstall {' '.join(d.metadata['Name'] for d in distributions)}"


def _how_to_mend(found: pathlib.Path | None, others: list[metadata.Distribution]) -> str:
  if others:
    return f"{_uninstall(others)} && pip install --force-reinstall --no-deps rosetta-t5"
  if found is None:
    return "pip install --force-reinstall --no-deps rosetta-t5"
  return (
    f"take {found.parent} out of PYTHONPATH, or run from another folder than one that holds t5x/"
  )
