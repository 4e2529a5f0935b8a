"""What `--dry_run` and `rosetta-t5 check` say: every problem at once, with file and line."""

from __future__ import annotations

import sys

import gin
import pytest

from rosetta_t5.config import run_from_command_line
from rosetta_t5.config.language.unimported import NeedsImport, StandIn, is_slow

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
  """Returns (exit status, what was said) of a dry run of toy.train."""
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


def test_a_run_that_is_well_is_not_run(check, monkeypatch):
  import toy

  def train(*, model, model_dir, total_steps):
    raise AssertionError("it ran")

  monkeypatch.setattr(toy, "train", train)
  status, said = check(RUN)
  assert (status, said) == (0, "Nothing is wrong.\n")


def test_every_problem_is_told_at_once_with_its_place(check):
  status, said = check(
    RUN.replace("model_dir", "modle_dir")
    + "include 'not_there.gin'\nimport no_such_module\nno_such_module.f.x = 1\n"
    + "toy.Modell.width = 2\nMISSING = %gin.REQUIRED\n",
    "--gin.toy.Model.widht=9",
  )
  assert status == 2
  assert "error: 6 problems" in said
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
    assert part in said, said
  # What follows from the failed import is not told again.
  assert "no_such_module.f" not in said


def test_unused_bindings_are_told_and_are_no_problem(check):
  status, said = check(
    RUN + "other/toy.Model.width = 3\ntoy.DatasetConfig.batch_size = 4\nDROPOUT = 0.1\n"
  )
  assert status == 0
  assert "3 bindings are used by nothing:" in said
  assert "  run.gin, line 10:  other/toy.Model.width = 3" in said
  assert "  run.gin, line 11:  toy.DatasetConfig.batch_size = 4" in said
  assert "  run.gin, line 12:  DROPOUT = 0.1" in said
  assert "line 9" not in said


def test_bindings_of_methods_are_used_if_the_class_is(check):
  status, said = check(RUN + "toy.Model.predict.num_decodes = 4\n")
  assert status == 0
  assert "used by nothing" not in said
  said = check(RUN.replace("@toy.Model()", "None") + "toy.Model.predict.num_decodes = 4\n")[1]
  assert "run.gin, line 10:  toy.Model.predict.num_decodes = 4" in said


def test_arguments_that_t5x_has_dropped_are_told_as_unused(check):
  text = RUN.replace("import toy", "import toy\nfrom t5x import utils")
  status, said = check(
    text
    + "train_script.train.dataset_cfg = @utils.RestoreCheckpointConfig()\n"
    + "utils.RestoreCheckpointConfig.path = 'x'\nutils.RestoreCheckpointConfig.use_gda = False\n"
  )
  assert status == 0
  assert "1 binding is used by nothing:\n  run.gin, line 13:  utils.Restore" in said


def test_the_same_in_several_places_is_told_once_with_all_of_them(check, write):
  write("more.gin", "import no_such_module\n")
  status, said = check(RUN + "include 'more.gin'\nimport no_such_module\ntoy.Modell.a = 1\n"
                       "toy.Modell.b = 1\n")  # fmt: skip
  assert status == 2
  assert "error: 2 problems" in said
  assert said.count("there is no module 'no_such_module'") == 1
  for place in ("more.gin, line 1:  import no", "run.gin, line 11:  import no"):
    assert place in said
  assert said.count("toy has no 'Modell'") == 1
  assert "run.gin, line 12:  toy.Modell.a = 1\n     run.gin, line 13:  toy.Modell.b = 1" in said


def test_bindings_of_what_a_reference_hands_on_are_used(check):
  text = RUN + "train_script.train.dataset_cfg = @eval/toy.DatasetConfig\n"
  said = check(text + "eval/toy.DatasetConfig.batch_size = 4\ntoy.DatasetConfig.lengths = 1\n")[1]
  assert "used by nothing" not in said


def test_what_cannot_be_built_names_the_argument_and_its_line(check, write, monkeypatch):
  write("strict.py", "def Model(width):\n  raise ValueError('width 8 is odd')\n")
  monkeypatch.syspath_prepend(".")
  text = RUN.replace("import toy", "import strict\nimport toy").replace("toy.Model", "strict.Model")
  status, said = check(text)
  assert status == 2
  assert "model cannot be made: width 8 is odd\n  run.gin, line 6:  model = @strict.Model()" in said


def test_the_resolved_run_is_described(check):
  seen = []

  def describe(resolved):
    seen.append(resolved)
    return [("steps", str(resolved.arguments["total_steps"])), ("dir", "run")]

  status, said = check(RUN, "--gin.STEPS=5", "--devices=64", describe=describe)
  assert status == 0
  assert said == "steps  5\ndir    run\n\nNothing is wrong.\n"
  (resolved,) = seen
  assert (resolved.run, resolved.devices) == ("train", 64)
  assert resolved.arguments["model"].width == 8
  assert resolved.arguments["dataset_cfg"] is None
  assert str(resolved.place("model_dir")) == "run.gin, line 6:  model_dir = 'run'"


def test_what_is_called_later_is_described_by_its_settings(check):
  seen = []
  text = RUN.replace("model = @toy.Model()", "model = @toy.Model")
  check(text, describe=lambda resolved: seen.append(resolved) or [])
  assert seen[0].settings["model"] == {"width": 8, "optimizer": None, "dropout_rate": 0.1}


@pytest.fixture
def no_seqio_yet(monkeypatch):
  """Puts aside what the tests before have imported of SeqIO, and gin's knowledge of it."""
  for name in [name for name in sys.modules if name.split(".")[0] == "seqio"]:
    monkeypatch.delitem(sys.modules, name)
  known = [(s, c) for s, c in gin.config._REGISTRY.items() if s.startswith("seqio.")]
  for selector, _ in known:
    gin.config._REGISTRY.pop(selector)
  yield
  for selector, configurable in known:
    gin.config._REGISTRY[selector] = configurable


@pytest.mark.usefixtures("no_seqio_yet")
def test_slow_modules_are_read_and_not_imported(check):
  text = RUN.replace("import toy", "import seqio\nimport toy")
  text += "toy.Model.optimizer = @seqio.SentencePieceVocabulary()\n"
  text += "seqio.SentencePieceVocabulary.sentencepiece_model_file = 'x'\n"
  seen = []
  status, _ = check(text, describe=lambda resolved: seen.append(resolved) or [])
  assert status == 0
  assert "seqio" not in sys.modules
  made = seen[0].arguments["model"].optimizer
  assert made.arguments == {"sentencepiece_model_file": "x"}
  with pytest.raises(NeedsImport):
    made.vocab_size  # noqa: B018
  status, said = check(text + "seqio.SentencePieceVocabulary.extra_id = 100\n")
  assert status == 2
  assert "has no argument 'extra_id'. Did you mean extra_ids" in said
  said = check(text.replace("@seqio.SentencePieceVocabulary", "@seqio.SentencPieceVocabulary"))[1]
  assert "seqio has no 'SentencPieceVocabulary'. Did you mean SentencePieceVocabulary" in said


def test_modules_of_slow_packages_are_read_too(check, write, monkeypatch):
  monkeypatch.setattr("rosetta_t5.config.language.unimported.SLOW", frozenset({"slow_pack"}))
  for file in ("__init__", "data/__init__", "data/mixtures"):
    write(f"slow_pack/{file}.py", "def make(size): assert False\nassert False, 'imported'\n")
  monkeypatch.syspath_prepend(".")
  for line in ("from slow_pack.data import mixtures", "import slow_pack.data.mixtures as mixtures"):
    text = RUN.replace("import toy", f"{line}\nimport toy")
    status, said = check(text + "toy.Model.optimizer = @mixtures.make()\nmixtures.make.size = 1\n")
    assert (status, said) == (0, "Nothing is wrong.\n"), line
    status, said = check(text.replace("mixtures", "mixturs"))
    assert "there is no module 'slow_pack.data.mixturs'" in said
  assert not [name for name in sys.modules if name.startswith("slow_pack")]


def test_what_must_be_imported_after_all_is_imported(check, write, monkeypatch):
  monkeypatch.setattr("rosetta_t5.config.language.unimported.SLOW", frozenset({"slow_vocabulary"}))
  write("slow_vocabulary.py", "class V:\n  vocab_size = 5\ndef make(): return V()\n")
  monkeypatch.syspath_prepend(".")
  seen = []

  def describe(resolved):
    seen.append(resolved.arguments["model"].optimizer.vocab_size)
    return []

  text = RUN.replace("import toy", "import slow_vocabulary\nimport toy")
  status, said = check(text + "toy.Model.optimizer = @slow_vocabulary.make()\n", describe=describe)
  assert (status, seen) == (0, [5]), said


def test_modules_are_found_slow_by_what_they_import(monkeypatch):
  for name in ("seqio", "rosetta_t5.data.tasks.stdlib_docs"):
    monkeypatch.delitem(sys.modules, name, raising=False)
  assert is_slow("seqio")
  assert is_slow("rosetta_t5.data.tasks.stdlib_docs")
  assert not is_slow("rosetta_t5.models")
  assert not is_slow("json")


def test_stand_ins_have_the_names_and_arguments_of_the_source():
  module = StandIn("rosetta_t5.data.tasks.stdlib_docs")
  assert "vocabulary" in dir(module)
  assert list(module.vocabulary.__signature__.parameters) == ["folder"]
  assert repr(module.vocabulary()) == "rosetta_t5.data.tasks.stdlib_docs.vocabulary()"
  with pytest.raises(AttributeError, match="has no 'vocabluary'"):
    module.vocabluary  # noqa: B018
  with pytest.raises(ModuleNotFoundError):
    StandIn("rosetta_t5.data.tasks.no_such")
