"""Restores gin's global state and `__main__` after each test, and writes gin files."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import gin
import pytest

from rosetta_t5.config.binding_checks import check_required
from rosetta_t5.config.configuration import configure
from rosetta_t5.config.language.statements import read_program
from rosetta_t5.config.t5x_surface import RUN_FUNCTION_MODULES

sys.path.insert(0, str(pathlib.Path(__file__).parent))

HEAD = """
from __gin__ import dynamic_registration
import __main__ as train_script
import toy
"""


@pytest.fixture(autouse=True)
def empty_gin() -> Iterator[None]:
  gin.clear_config()
  registry, inverse = gin.config._REGISTRY, gin.config._INVERSE_REGISTRY
  known, known_inverse = registry.copy(), dict(inverse)
  main = vars(sys.modules["__main__"])
  runs = {name: main[name] for name in RUN_FUNCTION_MODULES if name in main}
  yield
  gin.clear_config()
  # Not only the new entries: a test may have registered a toy run under the name of a real one.
  registry.clear()
  for selector, configurable in known.items():
    registry[selector] = configurable
  inverse.clear()
  inverse.update(known_inverse)
  for name in RUN_FUNCTION_MODULES:
    main.pop(name, None)
  main.update(runs)


@pytest.fixture
def write(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
  """Writes a gin file into a folder that is also the working directory."""
  monkeypatch.chdir(tmp_path)

  def _write(name: str, text: str) -> str:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    return name

  return _write


@pytest.fixture
def run(write: Callable[[str, str], str]) -> Callable[..., Any]:
  """Runs toy.train as configured by one file's text and bindings."""
  import toy

  def _run(text: str, *bindings: str, head: str = HEAD) -> Any:
    files = [write("run.gin", head.strip() + "\n" + text.lstrip())]
    program = read_program(files, bindings, ["."])
    check_required(program)
    return configure(program, toy.train)()

  return _run
