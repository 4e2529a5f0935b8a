"""The packages that the Dockerfile's steps install, without building it."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

_ROOT = pathlib.Path(__file__).parents[2]
_DOCKERFILE = (_ROOT / "Dockerfile").read_text()
# The version of Python in each Ubuntu.
_PYTHON_OF_UBUNTU = {"22.04": "3.10", "24.04": "3.12", "26.04": "3.14"}


def _locked(package: str, python: str) -> str:
  """Returns the version of a package that requirements.lock has for a version of Python."""
  lines = re.findall(rf"^{package}==.*$", (_ROOT / "requirements.lock").read_text(), re.MULTILINE)
  environment = {"python_version": python, "python_full_version": f"{python}.5"}
  found = [
    each.specifier
    for each in map(Requirement, lines)
    if each.marker is None or each.marker.evaluate(environment)
  ]
  assert len(found) == 1, f"{package} for Python {python}: {lines}"
  return str(found[0]).removeprefix("==")


def _step(word: str) -> str:
  """Returns the shell command of the only RUN that contains this word."""
  steps = re.findall(r"^RUN ((?:.*\\\n)*.*)$", _DOCKERFILE, re.MULTILINE)
  (found,) = [step for step in steps if word in step]
  return found


def _installed(step: str, folder: pathlib.Path, jax: str, **environment: str) -> list[str]:
  """Runs a step with this version of jax installed; returns the arguments of each pip install."""
  site = folder / "site"
  (site / f"jax-{jax}.dist-info").mkdir(parents=True)
  (site / f"jax-{jax}.dist-info/METADATA").write_text(f"Name: jax\nVersion: {jax}\n")
  python = folder / ".venv/bin/python"
  python.parent.mkdir(parents=True)
  lines = [
    "#!/usr/bin/env bash",
    f'[[ $1 != -m ]] || {{ echo "$@" >>"{folder}/installs"; exit; }}',
    f'PYTHONPATH="{site}" exec "{sys.executable}" "$@"',
  ]
  python.write_text("\n".join(lines))
  python.chmod(0o755)
  (folder / "installs").touch()
  environment = {"PATH": "/usr/bin:/bin", **environment}
  subprocess.run(["bash", "-euo", "pipefail", "-c", step], cwd=folder, env=environment, check=True)
  return (folder / "installs").read_text().splitlines()


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "the image's"])
def test_the_cuda_wheels_belong_to_the_locked_jax_of_the_python_version(tmp_path, python):
  if python == "the image's":
    (ubuntu,) = re.findall(r"^FROM nvidia/cuda:.*ubuntu([\d.]+)", _DOCKERFILE, re.MULTILINE)
    python = _PYTHON_OF_UBUNTU[ubuntu]
  jax = _locked("jax", python)
  (install,) = _installed(_step("jax["), tmp_path, jax, EXTRAS="gpu")
  assert install.split()[:3] == ["-m", "pip", "install"]
  asked = Requirement(install.split()[-1])
  (cuda,) = re.findall(r"^ARG CUDA=(\d+)", _DOCKERFILE, re.MULTILINE)
  assert (asked.name, asked.extras) == ("jax", {f"cuda{cuda}"})
  assert str(asked.specifier) == f"=={jax}"
  # CUDA's plugin requires jax and jaxlib of the same version.
  assert _locked("jaxlib", python) == jax


def test_an_image_for_the_cpu_gets_no_cuda_wheels(tmp_path):
  assert _installed(_step("jax["), tmp_path, _locked("jax", "3.12"), EXTRAS="") == []


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing():
  command = ["hadolint", "--no-color", str(_ROOT / "Dockerfile")]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert (done.returncode, done.stdout) == (0, "")
