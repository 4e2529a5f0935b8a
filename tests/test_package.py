"""The contents of the wheel, and T5X's public names with T5X's arguments."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOT_SOURCE = shutil.ignore_patterns(
  ".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "quickstart"
)
_BUILD = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Returns a folder with the files that the wheel installs into site-packages."""
  folder = tmp_path_factory.mktemp("wheel")
  shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=NOT_SOURCE)
  subprocess.run(
    [sys.executable, "-c", _BUILD, folder],
    cwd=folder / "source",
    check=True,
    capture_output=True,
  )
  (wheel,) = folder.glob("*.whl")
  with zipfile.ZipFile(wheel) as archive:
    archive.extractall(folder / "site")
  return folder / "site"


def test_wheel_contains_every_module_and_recipe(installed):
  for package in ("rosetta_t5", "t5x"):
    ours = {p.relative_to(ROOT) for p in (ROOT / package).rglob("*.py")}
    assert ours <= {p.relative_to(installed) for p in installed.rglob("*.py")}
  for name in ("config/hugging_face_recipe.gin",):
    assert (installed / "rosetta_t5" / name).exists()
  recipes = {p.relative_to(ROOT / "gin") for p in (ROOT / "gin").rglob("*.gin")}
  shipped = installed / "rosetta_t5/recipes"
  assert {p.relative_to(shipped) for p in shipped.rglob("*.gin")} == recipes


def test_wheel_does_not_hide_gin_config(installed):
  top = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
  assert top == {"rosetta_t5", "t5x"}


def test_installed_package_finds_recipes_from_any_folder(installed, tmp_path):
  program = (
    "import rosetta_t5.config.t5x_surface as paths\n"
    "for path in ('gin/runs/pretrain.gin', 't5x/examples/t5/t5_1_1/small.gin'):\n"
    "  print(paths.find_gin_file(path, ['.']))"
  )
  found = subprocess.run(
    [sys.executable, "-c", program],
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": str(installed)},
    capture_output=True,
    text=True,
    check=True,
  )
  assert [pathlib.Path(line).is_relative_to(installed) for line in found.stdout.split()] == [
    True
  ] * 2


def test_lock_names_every_requirement():
  locked = (ROOT / "requirements.lock").read_text()
  required = re.findall(r"^    ([a-z0-9-]+)>=", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
  gpu_only = {"transformer-engine"}
  assert len(required) > 15
  missing = [n for n in required if n not in gpu_only and f"\n{n}==" not in locked]
  assert not missing, "run `make lock`"


# Names whose arguments differ from T5X's, with the reason.
KNOWN_DIFFERENCES = {}


def _listed(shared: pathlib.Path) -> list[tuple[str, str, str]]:
  """Returns the module, name and arguments of each function and class of T5X."""
  rows, module = [], ""
  for line in (shared / "t5x-interface.md").read_text().splitlines():
    if line.startswith("## "):
      module = line.removeprefix("## ").strip()
    if match := re.match(r"- (?:class )?`(\w+)\((.*?)\)`", line):
      rows.append((module, match[1], match[2]))
  return rows


def test_t5x_has_every_name_of_the_original(shared):
  missing = set()
  for module, name, _ in _listed(shared):
    try:
      ours = importlib.import_module(module)
    except ModuleNotFoundError:
      missing.add(module)
      continue
    if not hasattr(ours, name):
      missing.add(f"{module}.{name}")
  # docs/from-t5x.md lists the names that do not exist here, with the reason.
  page = (ROOT / "docs" / "from-t5x.md").read_text()
  missing = {name for name in missing if f"`{name.removeprefix('t5x.')}`" not in page}
  assert not missing, f"missing names: {sorted(missing)}"


def _arguments(text: str) -> dict[str, ast.expr | None]:
  """Returns the names of the arguments with their defaults, in order."""
  parsed = ast.parse(f"def f({text}): pass").body[0].args  # type: ignore[attr-defined]
  positional = [a.arg for a in (*parsed.posonlyargs, *parsed.args)]
  defaults = dict(zip(reversed(positional), reversed(parsed.defaults), strict=False))
  named = {a.arg: d for a, d in zip(parsed.kwonlyargs, parsed.kw_defaults, strict=True)}
  found = {**{name: defaults.get(name) for name in positional}, **named}
  # A field with init=False is not an argument.
  return {name: d for name, d in found.items() if d is None or "init=False" not in ast.unparse(d)}


def _differences(ours: Any, text: str) -> list[str]:
  try:
    has = inspect.signature(ours).parameters
  except (TypeError, ValueError):
    return []
  wants = _arguments(text)
  found = [f"has no argument {name}" for name in wants if name not in has]
  by_position = [n for n in has if n in wants and has[n].kind is not inspect.Parameter.KEYWORD_ONLY]
  if by_position != [n for n in wants if n in by_position]:
    found.append(f"has its arguments in another order: {list(has)}")
  for name, default in wants.items():
    try:
      value = ast.literal_eval(default) if default is not None else None
    except ValueError:
      continue  # a name, such as checkpoints.Checkpointer
    # T5X's required arguments may be optional here.
    if default is not None and name in has and has[name].default != value:
      found.append(f"{name} defaults to {has[name].default!r}, not {value!r}")
  extra = [
    n
    for n, p in has.items()
    if n not in wants
    and p.default is p.empty
    and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
  ]
  return found + [f"requires an argument {name}, which T5X does not have" for name in extra]


def test_t5x_s_functions_keep_their_arguments_and_defaults(shared):
  wrong, seen = [], 0
  for module, name, text in _listed(shared):
    if not (ROOT / module.replace(".", "/")).with_suffix(".py").exists():
      continue
    ours = getattr(importlib.import_module(module), name, None)
    if ours is None or not text:
      continue
    seen += 1
    key = f"{module}.{name}"
    wrong += [f"{key} {what}" for what in _differences(ours, text) if key not in KNOWN_DIFFERENCES]
  assert seen > 50
  assert not wrong, "\n".join(wrong)
