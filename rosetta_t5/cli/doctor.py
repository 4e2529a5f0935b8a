"""Reports what is installed: the first command to run when something does not work."""

import argparse
import importlib.util
import platform
from importlib import metadata

from packaging.requirements import Requirement

from rosetta_t5.user_errors import ConfigError

# Optional package → what it is for and how to install it.
OPTIONAL = {
  "t5": "tasks and mixtures of the t5 package: make, or pip install --no-deps t5==0.9.4",
  "transformer-engine": "NVIDIA's FP8 kernels: pip install 'rosetta-t5[te]'",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 doctor`."""
  parser.set_defaults(run=lambda options: main())


def main() -> int:
  """Prints versions, import paths and devices; returns 1 if there is a problem, else 0."""
  print(f"Python {platform.python_version()} on {platform.platform()}")
  problems = _check_packages() + _check_import_paths()
  try:
    import jax

    for device in jax.devices():
      print(f"  device {device.id:<15}{device.device_kind} ({device.platform})")
  except (ImportError, RuntimeError) as error:
    print(f"  no devices: {error}")
  print("\n".join(["", *problems]) if problems else "\nNo problems found.")
  return 1 if problems else 0


def _check_packages() -> list[str]:
  """Prints each package with its version and requirement; returns the problems."""
  lines = metadata.requires("rosetta-t5") if _version("rosetta-t5") else ()
  problems = []
  for required in map(Requirement, ("rosetta-t5", *(lines or ()))):
    if required.marker is not None and not required.marker.evaluate({"extra": ""}):
      continue
    name, specifier, version = required.name, required.specifier, _version(required.name)
    print(f"  {name:<22}{version or 'missing':<12}{specifier}")
    if not specifier.contains(version or "0", prereleases=True) or not version:
      found = f"{version} is not {specifier}" if version else "is missing"
      problems.append(f"{name} {found}: pip install '{name}{specifier}'")
  for name, purpose in OPTIONAL.items():
    print(f"  {name:<22}{_version(name) or f'-           optional; {purpose}'}")
  return problems


def _version(package: str) -> str:
  try:
    return metadata.version(package)
  except metadata.PackageNotFoundError:
    return ""


def _check_import_paths() -> list[str]:
  """Prints where Python finds t5x and gin; another t5x or a folder named gin may hide ours."""
  for name in ("t5x", "gin"):
    spec = importlib.util.find_spec(name)
    print(f"  import {name:<15}{spec.origin if spec else 'not found'}")
  try:
    from rosetta_t5.config.t5x_surface import check_t5x_installation

    check_t5x_installation()
  except ImportError:
    return ["gin-config cannot be imported: check whether a folder called gin hides it"]
  except ConfigError as error:
    return [str(error)]
  return []
