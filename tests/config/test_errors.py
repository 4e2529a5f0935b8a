"""The messages that a user reads if the configuration is wrong."""

from __future__ import annotations

import pathlib
import re

import pytest

from rosetta_t5.config.configuration import configure
from rosetta_t5.config.language.statements import read_program
from rosetta_t5.user_errors import ConfigError, exit_on_user_error

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
  message = _text(run, text, *bindings)
  for part in parts:
    assert part in message, message


def test_a_missing_file_error_has_similar_names_and_the_searched_folders(write, tmp_path):
  write("finetune_my_task.gin", "")
  message = _text(read_program, ["finetune_my_tsk.gin"])
  assert "there is no gin file 'finetune_my_tsk.gin'. Did you mean finetune_my_task.gin" in message
  assert f"searched: {tmp_path}" in message
  assert "--gin_search_paths=" in message


def test_a_missing_include_error_names_the_including_file(write):
  write("main.gin", "A = 1\ninclude 't5x/configs/runs/pretain.gin'")
  message = _text(read_program, ["main.gin"])
  assert "'t5x/configs/runs/pretain.gin'. Did you mean t5x/configs/runs/pretrain.gin" in message
  assert "included from main.gin, line 2:  include 't5x/configs/runs/pretain.gin'" in message


def test_a_file_that_includes_itself_is_refused(write):
  write("a.gin", "include 'b.gin'")
  write("b.gin", "include 'a.gin'")
  message = _text(read_program, ["a.gin"])
  assert "the file includes itself" in message
  assert "included from b.gin, line 1" in message
  assert "included from a.gin, line 1" in message


@pytest.mark.parametrize(
  ("text", "parts"),
  [
    ("A = 1\nB = [1,\n", ["invalid gin syntax", "main.gin, line "]),
    ("A = 1\nB == 2", ["invalid gin syntax", "main.gin, line 2:  B == 2"]),
    ("A = 1\n  B 2", ["invalid gin syntax", "main.gin, line 2:  B 2"]),
    ("A = " + "[" * 2000 + "]" * 2000, ["main.gin", "nested"]),
    ("A = $x", ["invalid gin syntax", "main.gin, line 1:  A = $x"]),
    ("A = 'x", ["invalid gin syntax", "main.gin, line 1:  A = 'x"]),
    (
      "from os import path, sep",
      ["main.gin, line 1:  from os import path, sep\n  gin imports one name per line"],
    ),
  ],
)
def test_a_syntax_error_contains_the_line(write, text, parts):
  write("main.gin", text)
  message = _text(read_program, ["main.gin"])
  assert all(part in message for part in parts), message


def test_a_value_without_quotes_is_named(write):
  assert _text(read_program, [], ["A = [1, b]"]) == (
    "invalid gin syntax: Failed to parse token 'b'\n  the command line:  A = [1, b]"
  )


@pytest.mark.parametrize("given", ["/tmp/run", "/tmp/run'", "'/tmp/run", '"/tmp/run'])
def test_an_unquoted_string_on_the_command_line_gets_a_hint(write, given):
  message = _text(read_program, [], [f"MODEL_DIR = {given}"])
  assert "a string needs quotes that the shell keeps: --gin.MODEL_DIR=\"'/tmp/run'\"" in message


@pytest.mark.parametrize(
  ("given", "value"), [("false", "False"), ("TRUE", "True"), ("none", "None")]
)
def test_a_constant_in_the_wrong_case_is_corrected(given, value):
  message = _text(read_program, [], [f"PACK = {given}"])
  assert message.endswith(f"  write --gin.PACK={value}")


def test_curly_quotes_are_replaced_by_straight_ones():
  message = _text(read_program, [], ["MODEL_DIR = ‘/tmp/run’"])
  assert message.endswith("--gin.MODEL_DIR=\"'/tmp/run'\"")


def test_a_misspelled_argument_gets_a_suggestion(run):
  _fails(
    run,
    "train has no argument 'modle_dir'. Did you mean model_dir",
    "its arguments: model, model_dir, total_steps, dataset_cfg",
    "run.gin, line 6:  modle_dir = '/run'",
    text=GOOD.replace("model_dir", "modle_dir"),
  )


def test_a_misspelled_argument_on_the_command_line_gets_a_suggestion(run):
  _fails(
    run,
    "Model has no argument 'widht'. Did you mean width?",
    "the command line:  toy.Model.widht = 3",
    bindings=("toy.Model.widht = 3",),
  )


def test_a_misspelled_class_gets_a_suggestion(run):
  _fails(
    run,
    "toy has no 'Modell'. Did you mean Model?",
    "run.gin, line 5:  model = @toy.Modell()",
    text=GOOD.replace("toy.Model()", "toy.Modell()"),
  )


def test_a_name_without_an_import_gets_a_suggestion(run):
  text = GOOD + "toyy.Model.width = 1"
  _fails(run, "nothing is called 'toyy.Model'. Did you mean toy?", text=text)
  _fails(run, "Import it: from … import utils", text=GOOD + "utils.Model.width = 1")


def test_a_misspelled_name_on_the_command_line_gets_a_suggestion(run):
  _fails(
    run,
    "nothing is called 'tain'. Did you mean",
    "train",
    "the command line:  tain.model_dir = '/x'",
    bindings=("tain.model_dir = '/x'",),
  )


def test_misspelled_macros_and_scopes_on_the_command_line_are_refused(run):
  text = GOOD.replace("total_steps = 3", "total_steps = %TRAIN_STEPS") + "TRAIN_STEPS = 3\n"
  text += "train_script.train.dataset_cfg = @train/toy.DatasetConfig()"
  _fails(
    run,
    "the macro 'TRAIN_STEP' is never used. Did you mean TRAIN_STEPS?",
    "the command line:  TRAIN_STEP = 5",
    text=text,
    bindings=("TRAIN_STEP = 5",),
  )
  _fails(
    run,
    "the scope 'trainn' is never used. Did you mean train?",
    text=text,
    bindings=("trainn/toy.DatasetConfig.batch_size = 5",),
  )


def test_unused_macros_without_a_similar_name_are_allowed(run):
  assert run(GOOD, "DROPOUT_RATE = 0.1")["total_steps"] == 3


def test_all_missing_required_values_are_reported_at_once(run):
  text = GOOD + "MODEL_DIR = %gin.REQUIRED\nTRAIN_STEPS = %gin.REQUIRED\nA = %gin.REQUIRED\n"
  message = _text(run, text + "toy.Model.width = %gin.REQUIRED", "A = 1", "TRAIN_STEP = 5")
  assert message.startswith("3 values are missing:")
  assert "MODEL_DIR, needed at run.gin, line 9:  MODEL_DIR = %gin.REQUIRED" in message
  assert "--gin.MODEL_DIR=\"'/path/for/this/run'\"" in message
  assert "TRAIN_STEPS, needed at run.gin, line 10" in message
  assert "TRAIN_STEP is set but never used." in message
  assert "toy.Model.width, needed at run.gin, line 12" in message
  assert "\n  A," not in message


def test_a_required_value_may_be_set_under_another_alias_of_its_module(run):
  text = GOOD + "train_script.train.total_steps = %gin.REQUIRED"
  assert run(text, "train.total_steps = 5")["total_steps"] == 5


def test_missing_required_values_are_reported_before_anything_is_imported(run):
  _fails(run, "1 value is missing", text="A = %gin.REQUIRED\nimport no_such_module")


def test_macros_that_are_never_set_are_reported(run):
  text = GOOD.replace("@toy.Model()", "%MODEL").replace("'/run'", "%DIR")
  _fails(
    run,
    "2 values are missing:",
    "MODEL, needed at run.gin, line 5:  model = %MODEL",
    "include 't5x/examples/t5/t5_1_1/small.gin'",
    "DIR, needed at run.gin, line 6",
    text=text,
  )


def test_missing_arguments_are_reported_with_the_lines_to_add(run):
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


def test_functions_passed_on_uncalled_may_lack_arguments(run):
  text = GOOD.replace("toy.Model.width = 8", "").replace("@toy.Model()", "@toy.Model")
  assert run(text)["model"](width=3).width == 3


OPTIMIZER = """
import optax
from optax import contrib
from t5x import optimizers
optimizers.chain.transformations = [@optax.adamw, @contrib.schedule_free_adamw]
"""


def test_a_learning_rate_that_the_trainers_replaces_is_refused(run):
  text = OPTIMIZER + GOOD
  run(text)
  refused = "adamw.learning_rate has no effect, because chain.transformations contains @optax.adamw"
  bindings = ("optax.adamw.learning_rate = 0.1",)
  _fails(run, refused, "run.gin, line 7", "write @optax.adamw()", text=text, bindings=bindings)
  run(text.replace("adamw, ", "adamw(), "), *bindings)


def test_a_tuple_of_another_length_is_refused_with_its_length(run):
  text = (
    f"{GOOD}from t5x import trainer\ntrainer.EarlyStoppingAction.metric = ('train', 'loss', 'x')"
  )
  _fails(run, "EarlyStoppingAction.metric must be a list of 2 values, got (", text=text)


def test_a_missing_module_gets_a_suggestion(run):
  _fails(run, "there is no module 'toyss'", "PYTHONPATH", "run.gin, line", text="import toyss")
  _fails(
    run,
    "there is no module 't5x.adafacter'. Did you mean adafactor?",
    text="from t5x import adafacter",
  )


def test_a_missing_dependency_of_a_module_is_named(run, write, monkeypatch):
  write("needy.py", "import not_installed_here.part")
  monkeypatch.syspath_prepend(".")
  _fails(run, "importing needy needs the module 'not_installed_here'", text="import needy")


def test_a_module_that_fails_on_import_is_reported_with_its_line(run, write, monkeypatch):
  write("failing.py", "import os\n\nPATH = os.environ['NO_SUCH_VARIABLE']\n")
  monkeypatch.syspath_prepend(".")
  _fails(
    run,
    "importing failing failed: KeyError: 'NO_SUCH_VARIABLE'",
    "failing.py, line 3:  PATH = os.environ['NO_SUCH_VARIABLE']",
    "run.gin, line 4:  import failing",
    text="import failing",
  )


def test_user_errors_are_printed_without_a_traceback(capsys, monkeypatch):
  monkeypatch.delenv("ROSETTA_T5_DEBUG", raising=False)
  with pytest.raises(SystemExit) as ended, exit_on_user_error():
    raise ConfigError("no such thing")
  assert ended.value.code == 2
  assert "error: no such thing\n" in capsys.readouterr().err


def test_our_error_classes_are_user_errors_too(capsys, monkeypatch):
  monkeypatch.delenv("ROSETTA_T5_DEBUG", raising=False)
  from rosetta_t5.telemetry.run_metrics import NonFiniteError

  with pytest.raises(SystemExit) as ended, exit_on_user_error():
    raise NonFiniteError(3, "params/w")
  assert ended.value.code == 1
  assert "params/w" in capsys.readouterr().err


def test_errors_of_other_code_keep_their_traceback():
  with pytest.raises(ValueError, match="invalid literal"), exit_on_user_error():
    int("x")


def test_debug_keeps_every_traceback(monkeypatch):
  monkeypatch.setenv("ROSETTA_T5_DEBUG", "1")
  with pytest.raises(ConfigError), exit_on_user_error():
    raise ConfigError("no such thing")


def test_gin_notes_are_removed_from_the_errors_of_a_run(run, capsys, monkeypatch):
  monkeypatch.delenv("ROSETTA_T5_DEBUG", raising=False)
  import toy

  def refuse(**kwargs):
    # A ValueError of this package, which a run page does not catch.
    read_program(["missing.gin"])

  refuse.__name__ = "train"
  monkeypatch.setattr(toy, "train", refuse)
  with pytest.raises(SystemExit), exit_on_user_error():
    run("")
  message = capsys.readouterr().err
  assert "there is no gin file 'missing.gin'" in message
  assert not re.search("In call to configurable", message)


@pytest.mark.parametrize(
  ("path", "message"),
  [
    ("gone/pieces.model", "error: gone/pieces.model: No such file or directory"),
    ("/proc/self/mem", "error: Input/output error"),  # its first page cannot be read
  ],
)
def test_a_file_that_a_run_cannot_read_is_an_error_without_a_traceback(
  path, message, run, capsys, monkeypatch
):
  monkeypatch.delenv("ROSETTA_T5_DEBUG", raising=False)
  import toy

  def train(**kwargs):
    pathlib.Path(path).read_bytes()

  monkeypatch.setattr(toy, "train", train)
  with pytest.raises(SystemExit) as ended, exit_on_user_error():
    run("")
  assert ended.value.code == 1
  assert message in capsys.readouterr().err


def test_an_ambiguous_name_error_lists_the_candidates(run, write, monkeypatch):
  write("other_toy.py", "def Model(x=1): return x")
  text = GOOD.replace("'/run'", "@other_toy.Model()")
  monkeypatch.syspath_prepend(".")
  message = _text(run, "import other_toy\n" + text, "Model.x = 2")
  assert "'Model' may mean other_toy.Model or toy.Model: write one of them in full." in message


def test_configure_checks_arguments_without_calling_the_function(write):
  called = []

  def train(steps):
    called.append(steps)

  with pytest.raises(ConfigError, match="train needs steps"):
    configure(read_program([]), train)
  assert not called


def test_an_import_without_dynamic_registration_can_be_used(run):
  head = "import toy\nimport __main__ as train_script"
  assert run(GOOD, head=head)["model"].width == 8


@pytest.mark.parametrize(
  ("text", "lacking"),
  [
    ("allocating 9 bytes", "memory"),
    ("Failed to write: No space left on device", "space on the disk"),
  ],
)
def test_a_full_disk_and_a_full_memory_have_different_messages(capsys, text, lacking):
  with pytest.raises(SystemExit), exit_on_user_error():
    raise RuntimeError(f"RESOURCE_EXHAUSTED: {text}")
  assert f"error: there is not enough {lacking}: {text}" in capsys.readouterr().err
