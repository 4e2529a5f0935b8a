"""The values in gin files and on the command line reach the functions that they name."""

from __future__ import annotations

import gin
import pytest

from rosetta_t5.config import parse_gin_flags
from rosetta_t5.config.language.binding import bind
from rosetta_t5.config.language.gin_internals import all_bindings
from rosetta_t5.config.language.statements import read_program
from rosetta_t5.user_errors import ConfigError

RUN = """
STEPS = 3
train_script.train:
  model = @toy.Model()
  model_dir = '/run'
  total_steps = %STEPS
  dataset_cfg = @train/toy.DatasetConfig()
toy.Model.width = 8
train/toy.DatasetConfig.lengths = {'inputs': 64, 'targets': [1, %STEPS]}
"""


def test_a_file_sets_arguments_macros_and_scopes(run):
  given = run(RUN)
  assert given["model"].width == 8
  assert given["total_steps"] == 3
  assert given["dataset_cfg"].batch_size == 128
  assert given["dataset_cfg"].lengths == {"inputs": 64, "targets": [1, 3]}


@pytest.mark.parametrize(
  ("binding", "get", "value"),
  [
    ("STEPS = 7", lambda given: given["total_steps"], 7),
    ("train.total_steps = 7", lambda given: given["total_steps"], 7),
    ("train_script.train.total_steps = 7", lambda given: given["total_steps"], 7),
    ("toy.Model.width = 16", lambda given: given["model"].width, 16),
    ("Model.width = 16", lambda given: given["model"].width, 16),
    ("train/toy.DatasetConfig.batch_size = 2", lambda given: given["dataset_cfg"].batch_size, 2),
    ("toy.DatasetConfig.batch_size = 2", lambda given: given["dataset_cfg"].batch_size, 2),
    ("train.model_dir = 'a = b'", lambda given: given["model_dir"], "a = b"),
    ("toy.Model.dropout_rate = -1.5", lambda given: given["model"].dropout_rate, -1.5),
  ],
)
def test_the_command_line_overrides_files(run, binding, get, value):
  assert get(run(RUN, binding)) == value


def test_the_command_line_may_use_the_imports_of_the_files(run):
  import toy

  given = run(RUN, "toy.Model.optimizer = @toy.Optimizer")
  assert issubclass(given["model"].optimizer, toy.Optimizer)


def test_the_command_line_can_bind_a_run_that_no_file_names(run):
  given = run("", "train.model = None", "train.model_dir = 'x'", "train.total_steps = 1", head="")
  assert given == {"model": None, "model_dir": "x", "total_steps": 1, "dataset_cfg": None}


def test_a_file_may_import_the_run_under_any_alias(run, write):
  head = "from __gin__ import dynamic_registration\nimport __main__ as my_script\nimport toy"
  text = RUN.replace("train_script", "my_script")
  assert run(text, "my_script.train.model_dir = '/other'", head=head)["model_dir"] == "/other"


def test_later_lines_and_files_win(run, write):
  write("inner.gin", "STEPS = 5")
  assert run(RUN + "include 'inner.gin'")["total_steps"] == 5
  gin.clear_config()
  assert run("include 'inner.gin'\n" + RUN)["total_steps"] == 3


def test_includes_are_found_through_search_paths(write):
  write("far/away.gin", "STEPS = 9")
  write("main.gin", "include 'away.gin'")
  parse_gin_flags([".", "far"], ["main.gin"], ["OTHER = %STEPS"])
  assert gin.query_parameter("STEPS/macro.value") == 9


def test_files_without_dynamic_registration_use_registered_names(write):
  gin.external_configurable(lambda depth: depth, "old_style", module="toys")
  write("old.gin", "old_style.depth = 4")
  parse_gin_flags(["."], ["old.gin"], [])
  assert gin.query_parameter("toys.old_style.depth") == 4


def test_a_file_may_use_the_imports_of_earlier_files(run, write):
  write("model.gin", "from __gin__ import dynamic_registration\nimport toy\n")
  text = RUN.replace("train_script.train:", "include 'model.gin'\ntrain_script.train:")
  head = "from __gin__ import dynamic_registration\nimport __main__ as train_script"
  assert run(text, head=head)["model"].width == 8


@pytest.fixture
def two_networks(write, monkeypatch):
  """Two gin files that import modules of one name and bind an argument of each."""
  monkeypatch.syspath_prepend(".")
  for folder in ("small", "scanned"):
    write(f"{folder}/network.py", "def Config(width): return width\n")
    head = f"from __gin__ import dynamic_registration\nfrom {folder} import network\n"
    write(f"{folder}.gin", head + "network.Config.width = 1")


@pytest.mark.usefixtures("two_networks")
@pytest.mark.parametrize("head", ["", "from __gin__ import dynamic_registration\n"])
def test_an_alias_that_two_files_give_to_different_modules_is_refused(write, head):
  write("both.gin", head + "include 'small.gin'\ninclude 'scanned.gin'\nnetwork.Config.width = 2")
  both = r"may mean scanned\.network\.Config or small\.network\.Config: write one of them"
  with pytest.raises(ConfigError, match=both):
    parse_gin_flags(["."], ["both.gin"], [])


@pytest.mark.usefixtures("two_networks")
def test_the_included_file_decides_between_two_registered_names(write):
  parse_gin_flags(["."], ["small.gin"], [])  # a run before this one, in the same process
  write("large.gin", "include 'scanned.gin'\nnetwork.Config.width = 2")
  parse_gin_flags(["."], ["large.gin"], [])
  assert gin.query_parameter("scanned.network.Config.width") == 2


def test_retired_arguments_of_t5x_are_skipped(write):
  head = "from __gin__ import dynamic_registration\nfrom t5x import utils\n"
  write("main.gin", head + "utils.RestoreCheckpointConfig:\n  path = 'x'\n  use_gda = False\n")
  parse_gin_flags(["."], ["main.gin"], [])
  bound = all_bindings()["", "t5x.utils.RestoreCheckpointConfig"]
  assert bound == {"path": "x"}
  write("main.gin", head + "utils.CheckpointConfig.use_gda = False")
  with pytest.raises(ConfigError, match="CheckpointConfig has no argument 'use_gda'"):
    parse_gin_flags(["."], ["main.gin"], [])


def test_unknown_names_are_skipped_on_request(write):
  write("main.gin", "import no_such_module\nnowhere.x = 1\nSTEPS = 2")
  parse_gin_flags(["."], ["main.gin"], [], skip_unknown=True)
  assert gin.query_parameter("STEPS/macro.value") == 2
  with pytest.raises(ConfigError, match="there is no module 'no_such_module'"):
    parse_gin_flags(["."], ["main.gin"], [], skip_unknown=["nowhere"])


def test_the_configuration_is_locked_by_default(write):
  parse_gin_flags(["."], [], ["A = %gin.REQUIRED"], finalize_config=False)
  parse_gin_flags(["."], [], ["A = 1"])
  assert gin.config_is_locked()


def test_files_may_use_one_alias_for_different_modules(write, monkeypatch):
  write("first_models.py", "def Model(x=0): return ('first', x)\n")
  write("second_models.py", "def Model(x=0): return ('second', x)\n")
  monkeypatch.syspath_prepend(".")
  head = "from __gin__ import dynamic_registration\n"
  for name, x in (("first", 1), ("second", 2)):
    write(f"{name}.gin", f"{head}import {name}_models as m\nm.Model.x = {x}\n{name} = @m.Model()")
  program = read_program(["first.gin", "second.gin"])
  bind(program).raise_if_any()
  assert gin.query_parameter("first/gin.macro.value").scoped_configurable_fn() == ("first", 1)
  assert gin.query_parameter("second/gin.macro.value").scoped_configurable_fn() == ("second", 2)
