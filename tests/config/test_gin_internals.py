"""The private names of gin-config that this package uses exist, and only one module uses them."""

from __future__ import annotations

import pathlib
import re
from importlib import metadata

import gin
import pytest

import rosetta_t5
from rosetta_t5.config import parse_gin_flags
from rosetta_t5.config.language import gin_internals
from rosetta_t5.config.language.binding import bind, temporary_run_function
from rosetta_t5.config.language.statements import Program

PRIVATE_NAME = re.compile(r"\bgin\.config\.(_\w+)")
SOURCE = pathlib.Path(gin_internals.__file__)
NAMES = sorted(set(PRIVATE_NAME.findall(SOURCE.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("name", NAMES)
def test_gin_config_has_the_private_name(name):
  assert hasattr(gin.config, name), (
    f"gin-config {metadata.version('gin-config')} has no gin.config.{name}. Find what replaces it in "
    "gin/config.py and change rosetta_t5/config/language/gin_internals.py, or lower the upper bound "
    "of gin-config in setup.cfg."
  )


def test_no_other_module_uses_private_names_of_gin():
  package = pathlib.Path(rosetta_t5.__file__).parent
  users = {
    path for path in package.rglob("*.py") if PRIVATE_NAME.search(path.read_text(encoding="utf-8"))
  }
  assert users == {SOURCE}, "move them into config/language/gin_internals.py"


def test_an_unregistered_function_is_forgotten():
  def function(size):
    return size

  gin.external_configurable(function, "passing", module="toys")
  assert gin_internals.configurable_of(function).selector == "toys.passing"
  assert [c.selector for c in gin_internals.find_configurables("passing")] == ["toys.passing"]
  gin_internals.unregister(function)
  assert gin_internals.find_configurables("passing") == []


def test_a_run_function_is_found_again_after_a_temporary_one_of_the_same_name(tmp_path):
  def train(steps=0):
    return steps

  real = train

  def train(model=None):
    return model

  gin_file = tmp_path / "run.gin"
  gin_file.write_text(
    "from __gin__ import dynamic_registration\nimport __main__ as train_script\n"
    "train_script.train.steps = 3\n"
  )
  bind(Program(()), real)
  with temporary_run_function(train):
    bind(Program(()), train)
  parse_gin_flags([], [str(gin_file)], [])
  assert gin_internals.configurable_of(real).wrapper() == 3


def test_macros_and_constants_count_as_set():
  gin.bind_parameter("STEPS/gin.macro.value", 3)
  gin.constant("toys.WIDTH", 8)
  assert [gin_internals.is_macro_set(n) for n in ("STEPS", "WIDTH", "OTHER")] == [True, True, False]
  assert gin_internals.all_bindings() == {("STEPS", "gin.macro"): {"value": 3}}
