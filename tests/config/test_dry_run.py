"""`--dry_run` and `rosetta-t5 check` report every problem at once, with file and line."""

from __future__ import annotations

import pytest

from rosetta_t5.config import run_from_command_line

RUN = """
from __gin__ import dynamic_registration
import __main__ as train_script
import toy
train_script.train:
  model = @toy.Model()
  model_dir = 'run'
  total_steps = %STEPS
STEPS = 3
toy.Model.width = 8
"""


@pytest.fixture
def check(write, capsys, monkeypatch):
  """Returns the exit status and the output of a dry run of toy.train."""
  import toy

  monkeypatch.delenv("ROSETTA_T5_DEBUG", raising=False)

  def _check(text: str, *arguments: str, describe=None) -> tuple[int, str]:
    file = write("run.gin", text.lstrip())
    try:
      command = ["train", f"--gin_file={file}", "--dry_run", *arguments]
      run_from_command_line(toy.train, command, describe)
      status = 0
    except SystemExit as ended:
      status = ended.code
    shown = capsys.readouterr()
    return status, shown.out + shown.err

  return _check


def test_a_correct_run_is_not_started(check, monkeypatch):
  import toy

  def train(*, model, model_dir: str, total_steps: int):
    raise AssertionError("the run must not start")

  monkeypatch.setattr(toy, "train", train)
  status, output = check(RUN)
  assert (status, output) == (0, "The configuration is valid.\n")


def test_all_problems_are_reported_at_once_with_their_lines(check):
  status, output = check(
    RUN.replace("model_dir", "modle_dir")
    + "include 'not_there.gin'\nimport no_such_module\nno_such_module.f.x = 1\n"
    + "toy.Modell.width = 2\nMISSING = %gin.REQUIRED\n",
    "--gin.toy.Model.widht=9",
  )
  assert status == 2
  assert "error: 6 problems" in output
  for part in (
    "there is no gin file 'not_there.gin'",
    "included from run.gin, line 10:  include 'not_there.gin'",
    "1 value is missing:\n     MISSING, needed at run.gin, line 14",
    "train has no argument 'modle_dir'. Did you mean model_dir?",
    "run.gin, line 6:  modle_dir = 'run'",
    "there is no module 'no_such_module'. Is its folder on PYTHONPATH?",
    "toy has no 'Modell'. Did you mean Model?",
    "Model has no argument 'widht'. Did you mean width?",
    "the command line:  toy.Model.widht = 9",
  ):
    assert part in output, output
  # Consequences of the failed import are not reported.
  assert "no_such_module.f" not in output


def test_unused_bindings_are_listed_but_are_not_problems(check):
  status, output = check(
    RUN + "other/toy.Model.width = 3\ntoy.DatasetConfig.batch_size = 4\nDROPOUT = 0.1\n"
  )
  assert status == 0
  assert "3 bindings are never used:" in output
  assert "  run.gin, line 10:  other/toy.Model.width = 3" in output
  assert "  run.gin, line 11:  toy.DatasetConfig.batch_size = 4" in output
  assert "  run.gin, line 12:  DROPOUT = 0.1" in output
  assert "line 9" not in output


def test_bindings_of_methods_count_as_used_if_the_class_is_used(check):
  status, output = check(RUN + "toy.Model.predict.num_decodes = 4\n")
  assert status == 0
  assert "never used" not in output
  output = check(RUN.replace("@toy.Model()", "None") + "toy.Model.predict.num_decodes = 4\n")[1]
  assert "run.gin, line 10:  toy.Model.predict.num_decodes = 4" in output


def test_retired_arguments_of_t5x_are_listed_as_unused(check):
  text = RUN.replace("import toy", "import toy\nfrom t5x import utils")
  status, output = check(
    text
    + "train_script.train.dataset_cfg = @utils.RestoreCheckpointConfig()\n"
    + "utils.RestoreCheckpointConfig.path = 'x'\nutils.RestoreCheckpointConfig.use_gda = False\n"
  )
  assert status == 0
  assert "1 binding is never used:\n  run.gin, line 13:  utils.Restore" in output


def test_a_problem_at_several_lines_is_reported_once_with_all_lines(check, write):
  write("more.gin", "import no_such_module\n")
  status, output = check(
    RUN + "include 'more.gin'\nimport no_such_module\ntoy.Modell.a = 1\ntoy.Modell.b = 1\n"
  )
  assert status == 2
  assert "error: 2 problems" in output
  assert output.count("there is no module 'no_such_module'") == 1
  for place in ("more.gin, line 1:  import no", "run.gin, line 11:  import no"):
    assert place in output
  assert output.count("toy has no 'Modell'") == 1
  assert "run.gin, line 12:  toy.Modell.a = 1\n     run.gin, line 13:  toy.Modell.b = 1" in output


def test_bindings_of_functions_passed_on_uncalled_count_as_used(check):
  text = RUN + "train_script.train.dataset_cfg = @eval/toy.DatasetConfig\n"
  output = check(text + "eval/toy.DatasetConfig.batch_size = 4\ntoy.DatasetConfig.lengths = 1\n")[1]
  assert "never used" not in output


def test_an_argument_that_cannot_be_built_is_reported_with_its_line(check, write, monkeypatch):
  write("strict.py", "def Model(width):\n  raise ValueError('width 8 is odd')\n")
  monkeypatch.syspath_prepend(".")
  text = RUN.replace("import toy", "import strict\nimport toy").replace("toy.Model", "strict.Model")
  status, output = check(text)
  assert status == 2
  assert (
    "model cannot be built: width 8 is odd\n  run.gin, line 6:  model = @strict.Model()" in output
  )


def test_one_mistake_in_several_arguments_is_one_problem(check, write, monkeypatch):
  write("reading.py", "def Model(width):\n  raise ValueError(\"there is no file 'pears'\")\n")
  monkeypatch.syspath_prepend(".")
  text = RUN.replace("import toy", "import reading\nimport toy").replace(
    "toy.Model", "reading.Model"
  )
  more = "FILES = 'pears'\ntrain_script.train.dataset_cfg = @reading.Model()\n"
  status, output = check(f"{text}{more}reading.Model.width = %FILES\n")
  assert status == 2
  assert "problems" not in output
  assert "model cannot be built: there is no file 'pears'" in output
  assert output.count("FILES = 'pears'") == 1


def test_the_resolved_run_is_described(check):
  seen = []

  def describe(resolved):
    seen.append(resolved)
    return [("steps", str(resolved.arguments["total_steps"])), ("dir", "run")]

  status, output = check(RUN, "--gin.STEPS=5", "--devices=64", describe=describe)
  assert status == 0
  assert output == "steps  5\ndir    run\n\nThe configuration is valid.\n"
  (resolved,) = seen
  assert (resolved.function_name, resolved.devices) == ("train", 64)
  assert resolved.arguments["model"].width == 8
  assert resolved.arguments["dataset_cfg"] is None
  assert str(resolved.source_of("model_dir")) == "run.gin, line 6:  model_dir = 'run'"


def test_functions_passed_on_uncalled_are_described_by_their_settings(check):
  seen = []
  text = RUN.replace("model = @toy.Model()", "model = @toy.Model")
  check(text, describe=lambda resolved: seen.append(resolved) or [])
  assert seen[0].settings["model"] == {"width": 8, "optimizer": None, "dropout_rate": 0.1}


def test_values_of_an_argument_whose_annotation_is_not_a_type_are_not_checked(check, monkeypatch):
  import toy

  monkeypatch.setitem(toy.Model.__init__.__annotations__, "dropout_rate", [0.1, 0.2])
  assert check(RUN + "toy.Model.dropout_rate = 'high'\n")[0] == 0


def test_all_values_of_a_wrong_type_are_reported_at_once(check):
  text = RUN.replace("STEPS = 3", "STEPS = '3'") + "toy.Model.dropout_rate = 'high'\n"
  status, output = check(text)
  assert status == 2
  assert (
    "1. STEPS must be an integer, got '3': write 3\n     run.gin, line 8:  STEPS = '3'\n"
    "     read as train.total_steps\n"
    "2. Model.dropout_rate must be a number, got 'high'\n"
    "     run.gin, line 10:  toy.Model.dropout_rate = 'high'\n"
  ) in output


@pytest.mark.parametrize("value", ["1", "0.5", "None"])
def test_integers_are_numbers_and_a_default_is_always_accepted(check, value):
  argument = "optimizer" if value == "None" else "dropout_rate"
  assert check(RUN + f"toy.Model.{argument} = {value}\n") == (0, "The configuration is valid.\n")
