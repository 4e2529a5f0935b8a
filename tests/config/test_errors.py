"""What a user reads when the configuration is wrong."""

from __future__ import annotations

import re

import pytest

from rosetta_t5.config.errors import ConfigError, errors_as_text
from rosetta_t5.config.language.binding import configure
from rosetta_t5.config.language.statements import read_program

GOOD = """
train_script.train:
  model = @toy.Model()
  model_dir = '/run'
  total_steps = 3
toy.Model.width = 8
"""


def _text(run, *args, **kwargs) -> str:
  with pytest.raises(ConfigError) as caught:
    run(*args, **kwargs)
  return str(caught.value)


def _fails(run, *parts: str, text: str = GOOD, bindings: tuple[str, ...] = ()):
  said = _text(run, text, *bindings)
  for part in parts:
    assert part in said, said


def test_missing_file_names_near_files_and_where_it_looked(write, tmp_path):
  write("finetune_my_task.gin", "")
  said = _text(read_program, ["finetune_my_tsk.gin"], [], ["."])
  assert "there is no gin file 'finetune_my_tsk.gin'. Did you mean finetune_my_task.gin" in said
  assert f"searched: {tmp_path}" in said
  assert "--gin_search_paths=" in said


def test_missing_include_says_which_file_wants_it(write):
  write("main.gin", "A = 1\ninclude 't5x/configs/runs/pretain.gin'")
  said = _text(read_program, ["main.gin"], [], ["."])
  assert "'t5x/configs/runs/pretain.gin'. Did you mean t5x/configs/runs/pretrain.gin" in said
  assert "included from main.gin, line 2:  include 't5x/configs/runs/pretain.gin'" in said


def test_file_that_includes_itself(write):
  write("a.gin", "include 'b.gin'")
  write("b.gin", "include 'a.gin'")
  said = _text(read_program, ["a.gin"], [], ["."])
  assert "the file includes itself" in said
  assert "included from b.gin, line 1" in said
  assert "included from a.gin, line 1" in said


@pytest.mark.parametrize(
  ("text", "parts"),
  [
    ("A = 1\nB = [1,\n", ["no valid gin", "main.gin, line "]),
    ("A = 1\nB == 2", ["no valid gin", "main.gin, line 2:  B == 2"]),
    ("A = 1\n  B 2", ["no valid gin", "main.gin, line 2:  B 2"]),
    ("A = $x", ["no valid gin", "main.gin, line 1:  A = $x"]),
    ("A = 'x", ["no valid gin", "main.gin, line 1:  A = 'x"]),
    (
      "from os import path, sep",
      ["main.gin, line 1:  from os import path, sep\n  gin imports one name a line"],
    ),
  ],
)
def test_syntax_error_shows_the_line(write, text, parts):
  write("main.gin", text)
  said = _text(read_program, ["main.gin"], [], ["."])
  assert all(part in said for part in parts), said


def test_unquoted_text_on_the_command_line(write):
  said = _text(read_program, [], ["MODEL_DIR = /tmp/run"], ["."])
  assert "text needs quotes that the shell leaves in place: --gin.MODEL_DIR=\"'/tmp/run'\"" in said


def test_misspelt_argument(run):
  _fails(
    run,
    "train has no argument 'modle_dir'. Did you mean model_dir",
    "its arguments: model, model_dir, total_steps, dataset_cfg",
    "run.gin, line 6:  modle_dir = '/run'",
    text=GOOD.replace("model_dir", "modle_dir"),
  )


def test_misspelt_argument_on_the_command_line(run):
  _fails(
    run,
    "Model has no argument 'widht'. Did you mean width?",
    "the command line:  toy.Model.widht = 3",
    bindings=("toy.Model.widht = 3",),
  )


def test_misspelt_class(run):
  _fails(
    run,
    "toy has no 'Modell'. Did you mean Model?",
    "run.gin, line 5:  model = @toy.Modell()",
    text=GOOD.replace("toy.Model()", "toy.Modell()"),
  )


def test_name_that_the_file_does_not_import(run):
  _fails(
    run, "imports nothing called 'toyy'. Did you mean toy?", text=GOOD + "toyy.Model.width = 1"
  )
  _fails(run, "Import it: from … import utils", text=GOOD + "utils.Model.width = 1")


def test_misspelt_name_on_the_command_line(run):
  _fails(
    run,
    "nothing is called 'tain'. Did you mean",
    "train",
    "the command line:  tain.model_dir = '/x'",
    bindings=("tain.model_dir = '/x'",),
  )


def test_misspelt_macro_and_scope_on_the_command_line_are_refused(run):
  text = GOOD.replace("total_steps = 3", "total_steps = %TRAIN_STEPS") + "TRAIN_STEPS = 3\n"
  text += "train_script.train.dataset_cfg = @train/toy.DatasetConfig()"
  _fails(
    run,
    "the macro 'TRAIN_STEP' is used nowhere. Did you mean TRAIN_STEPS?",
    "the command line:  TRAIN_STEP = 5",
    text=text,
    bindings=("TRAIN_STEP = 5",),
  )
  _fails(
    run,
    "the scope 'trainn' is used nowhere. Did you mean train?",
    text=text,
    bindings=("trainn/toy.DatasetConfig.batch_size = 5",),
  )


def test_macros_unlike_any_other_are_let_pass(run):
  assert run(GOOD, "DROPOUT_RATE = 0.1")["total_steps"] == 3


def test_every_required_value_is_named_at_once(run):
  text = GOOD + "MODEL_DIR = %gin.REQUIRED\nTRAIN_STEPS = %gin.REQUIRED\nA = %gin.REQUIRED\n"
  said = _text(run, text + "toy.Model.width = %gin.REQUIRED", "A = 1", "TRAIN_STEP = 5")
  assert said.startswith("3 values are missing:")
  assert "MODEL_DIR, needed at run.gin, line 9:  MODEL_DIR = %gin.REQUIRED" in said
  assert "--gin.MODEL_DIR=\"'/path/for/this/run'\"" in said
  assert "TRAIN_STEPS, needed at run.gin, line 10" in said
  assert "TRAIN_STEP is set, and used nowhere." in said
  assert "toy.Model.width, needed at run.gin, line 12" in said
  assert "\n  A," not in said


def test_required_value_counts_as_given_under_another_name_of_its_module(run):
  text = GOOD + "train_script.train.total_steps = %gin.REQUIRED"
  assert run(text, "train.total_steps = 5")["total_steps"] == 5


def test_required_values_are_told_before_anything_is_imported(run):
  _fails(run, "1 value is missing", text="A = %gin.REQUIRED\nimport no_such_module")


def test_macro_that_is_set_nowhere(run):
  text = GOOD.replace("@toy.Model()", "%MODEL").replace("'/run'", "%DIR")
  _fails(
    run,
    "2 values are missing:",
    "MODEL, needed at run.gin, line 5:  model = %MODEL",
    "include 't5x/examples/t5/t5_1_1/small.gin'",
    "DIR, needed at run.gin, line 6",
    text=text,
  )


def test_arguments_that_nobody_gives(run):
  text = GOOD.replace("toy.Model.width = 8", "").replace("  model_dir = '/run'\n", "")
  _fails(
    run,
    "train_script.train needs model_dir",
    "add: train_script.train.model_dir = …",
    "--gin_file=t5x/configs/runs/pretrain.gin, or in your gin file: include 't5x/configs/",
    "toy.Model needs width",
    "it is called at run.gin, line 5:  model = @toy.Model()",
    "add: toy.Model.width = …",
    text=text,
  )


def test_what_is_handed_on_uncalled_may_lack_arguments(run):
  text = GOOD.replace("toy.Model.width = 8", "").replace("@toy.Model()", "@toy.Model")
  assert run(text)["model"](width=3).width == 3


def test_module_that_does_not_exist(run):
  _fails(run, "there is no module 'toyss'", "PYTHONPATH", "run.gin, line", text="import toyss")
  _fails(
    run,
    "there is no module 't5x.adafacter'. Did you mean adafactor?",
    text="from t5x import adafacter",
  )


def test_module_that_needs_another(run, write, monkeypatch):
  write("needy.py", "import not_installed_here.part")
  monkeypatch.syspath_prepend(".")
  _fails(run, "importing needy needs the module 'not_installed_here'", text="import needy")


def test_module_that_fails_names_its_line(run, write, monkeypatch):
  write("failing.py", "import os\n\nPATH = os.environ['NO_SUCH_VARIABLE']\n")
  monkeypatch.syspath_prepend(".")
  _fails(
    run,
    "importing failing failed: KeyError: 'NO_SUCH_VARIABLE'",
    "failing.py, line 3:  PATH = os.environ['NO_SUCH_VARIABLE']",
    "run.gin, line 4:  import failing",
    text="import failing",
  )


def test_errors_for_users_end_the_program_without_traceback(capsys, monkeypatch):
  monkeypatch.delenv("ROSETTA_T5_DEBUG", raising=False)
  with pytest.raises(SystemExit) as ended, errors_as_text():
    raise ConfigError("no such thing")
  assert ended.value.code == 2
  assert "error: no such thing\n" in capsys.readouterr().err


def test_errors_of_our_own_classes_are_for_users_too(capsys, monkeypatch):
  monkeypatch.delenv("ROSETTA_T5_DEBUG", raising=False)
  from rosetta_t5.telemetry.nonfinite import NonFiniteError

  with pytest.raises(SystemExit) as ended, errors_as_text():
    raise NonFiniteError(3, "params/w")
  assert ended.value.code == 1
  assert "params/w" in capsys.readouterr().err


def test_errors_of_other_code_keep_their_traceback():
  with pytest.raises(ValueError, match="invalid literal"), errors_as_text():
    int("x")


def test_debug_keeps_every_traceback(monkeypatch):
  monkeypatch.setenv("ROSETTA_T5_DEBUG", "1")
  with pytest.raises(ConfigError), errors_as_text():
    raise ConfigError("no such thing")


def test_gins_notes_are_cut_from_what_a_run_raises(run, capsys, monkeypatch):
  monkeypatch.delenv("ROSETTA_T5_DEBUG", raising=False)
  import toy

  def refuse(**kwargs):
    # A ValueError of our own code, as a run page would let through.
    read_program(["missing.gin"], [], ["."])

  refuse.__name__ = "train"
  monkeypatch.setattr(toy, "train", refuse)
  with pytest.raises(SystemExit), errors_as_text():
    run("")
  said = capsys.readouterr().err
  assert "there is no gin file 'missing.gin'" in said
  assert not re.search("In call to configurable", said)


def test_ambiguous_name_lists_the_choices(run, write, monkeypatch):
  write("other_toy.py", "def Model(x=1): return x")
  text = GOOD.replace("'/run'", "@other_toy.Model()")
  monkeypatch.syspath_prepend(".")
  said = _text(run, "import other_toy\n" + text, "Model.x = 2")
  assert "'Model' may mean other_toy.Model or toy.Model: write one of them in full." in said


def test_configure_checks_before_it_calls(write):
  called = []

  def train(steps):
    called.append(steps)

  with pytest.raises(ConfigError, match="train needs steps"):
    configure(read_program([], [], ["."]), train)
  assert not called
