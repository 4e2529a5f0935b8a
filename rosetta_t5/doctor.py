"""Looks at what is installed: the first thing to read when something does not work."""

from __future__ import annotations

import importlib.util
import pathlib
import platform
from importlib import metadata

from packaging.requirements import Requirement

_PACKAGE = "rosetta-t5"
# Not required: what each is for, and how to get it.
OPTIONAL = {
  "t5": "tasks and mixtures of the t5 package: make, or pip install --no-deps t5==0.9.4",
  "transformer-engine": "NVIDIA's FP8 kernels: pip install 'rosetta-t5[te]'",
}


def examine() -> int:
  """Prints versions, the t5x in use and the devices; returns how many things are wrong, at most 1."""
  print(f"Python {platform.python_version()} on {platform.platform()}")
  problems = [problem for line in _packages() if (problem := _show(*line))]
  problems += _check_doors()
  _show_devices()
  print("\n".join(["", *problems]) if problems else "\nNothing is wrong.")
  return 1 if problems else 0


def _packages() -> list[tuple[str, str, str]]:
  """Each package with its installed version (or "") and what is wanted of it (or "")."""
  lines = metadata.requires(_PACKAGE) if _version(_PACKAGE) else ()
  wanted = [Requirement(line) for line in lines or ()]
  required = [r for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
  rows = [(_PACKAGE, ""), *((r.name, str(r.specifier)) for r in required)]
  rows += [(name, "") for name in OPTIONAL]
  return [(name, _version(name), specifier) for name, specifier in rows]


def _version(package: str) -> str:
  try:
    return metadata.version(package)
  except metadata.PackageNotFoundError:
    return ""


def _show(name: str, version: str, specifier: str) -> str:
  """Prints one package; returns what is wrong with it, or nothing."""
  if not version and name in OPTIONAL:
    print(f"  {name:<22}{'-':<12}not needed. For {OPTIONAL[name]}")
    return ""
  print(f"  {name:<22}{version or 'missing':<12}{specifier}")
  if not version:
    return f"{name} is missing: pip install '{name}{specifier}'"
  if not Requirement(f"{name}{specifier}").specifier.contains(version, prereleases=True):
    return f"{name} {version} is not {specifier}: pip install '{name}{specifier}'"
  return ""


def _check_doors() -> list[str]:
  """Says which t5x and gin Python finds; Google's t5x, or a folder, may stand before ours."""
  ours = pathlib.Path(__file__).resolve().parents[1] / "t5x"
  problems = []
  for name in ("t5x", "gin"):
    spec = importlib.util.find_spec(name)
    found = pathlib.Path(spec.origin).parent if spec and spec.origin else None
    print(f"  import {name:<15}{found or 'not found'}")
    if found is None:
      problems.append(f"no package {name} is found: is a folder of that name in the way?")
    elif name == "t5x" and found.resolve() != ours.resolve():
      problems.append(f"t5x is another package than ours in {ours}: pip uninstall t5x")
  return problems


def _show_devices() -> None:
  try:
    import jax

    for device in jax.devices():
      print(f"  device {device.id:<15}{device.device_kind} ({device.platform})")
  except (ImportError, RuntimeError) as error:
    print(f"  no devices: {error}")
