"""Gin files and model files that somebody else wrote run no code: `check`, `--model_dir`, model.json."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Any

import gin
import pytest

from rosetta_t5 import cli
from rosetta_t5.config import ConfigError, run_from_command_line
from rosetta_t5.config.configuration import configure
from rosetta_t5.config.language.allow_list import CALLED, NAMED, find_public, limited_to_list
from rosetta_t5.config.language.binding import temporary_run_function
from rosetta_t5.config.language.statements import read_program
from rosetta_t5.config.model_file import NAME, read_model_file, write_model_file
from rosetta_t5.data import DatasetConfig, find_task_or_mixture
from rosetta_t5.data.tensorflow_import import import_seqio
from rosetta_t5.files import CHECKSUMS_NAME, DamagedFileError
from rosetta_t5.trained_model import read_run, train

HEAD = "from __gin__ import dynamic_registration\nimport __main__ as train_script\n"
RUN = """
include 't5x/examples/t5/t5_1_1/tiny.gin'
include 't5x/configs/runs/pretrain.gin'
from __gin__ import dynamic_registration
import seqio
from t5x import decoding
from t5x import models
MIXTURE_OR_TASK_NAME = 'none'
TASK_FEATURE_LENGTHS = {'inputs': 16, 'targets': 8}
DROPOUT_RATE = 0.0
TRAIN_STEPS = 100
VOCABULARY = @seqio.ByteVocabulary()
MODEL_DIR = 'run'
models.EncoderDecoderModel.decode_fn = @decoding.beam_search
decoding.beam_search.alpha = 0.25
"""


@pytest.fixture
def hostile(write, monkeypatch):
  """A working directory with a module that notes its import and calls. Returns the note."""
  note = pathlib.Path("note").absolute
  write("evil.py", "open('note', 'w').close()\ndef call(*_, **__):\n  open('note', 'w').close()\n")
  monkeypatch.delenv("ROSETTA_T5_DEBUG", raising=False)
  yield note()
  sys.modules.pop("evil", None)


def check(text: str, write, capsys, trust: bool = False) -> str:
  """Returns the errors of a check."""
  import toy

  argv = ["check", f"--gin_file={write('sent.gin', HEAD + text)}", "--dry_run"]
  with pytest.raises(SystemExit) as ended, limited_to_list(not trust):
    run_from_command_line(toy.train, argv)
  assert ended.value.code == 2
  return capsys.readouterr().err


@pytest.mark.parametrize(
  ("text", "refused"),
  [
    ("import evil", "the module 'evil' is not imported"),
    ("import evil as seqio", "the module 'evil' is not imported"),
    ("import rosetta_t5.cli.__main__", "the module 'rosetta_t5.cli.__main__' is not imported"),
    ("import os\nX = @os.system()", "the module 'os' is not imported"),
    ("from t5x import utils\nX = @utils.import_module()", "import_module is not on the list"),
    ("from t5x import utils\nX = [{'a': @utils.run_main}]", "utils.run_main is not on the list"),
    (
      "from t5x import gin_utils\nX = @gin_utils.parse_gin_flags()",
      "parse_gin_flags is not on the list",
    ),
    ("import seqio\nX = @seqio.utils.os.system()", "os.system is not on the list"),
    ("import seqio\nseqio.utils.os.system.command = 'touch note'", "os.system is not on the list"),
    ("import jax\nX = @jax.numpy.load()", "load is not on the list"),
    ("X = @train_script.train()", "train is not on the list"),
    ("from t5x import trainer\nX = @trainer.Trainer()", "trainer.Trainer is not on the list"),
    ("import seqio\nX = @seqio.SentencePieceVocabulary.decode()", "decode is not on the list"),
  ],
)
def test_what_is_not_listed_is_refused_with_its_line(text, refused, hostile, write, capsys):
  errors = check(text, write, capsys)
  assert refused in errors
  assert f"sent.gin, line {len((HEAD + text).splitlines())}:  " in errors or "import" in text
  assert "--trust" in errors
  assert not hostile.exists()


def test_a_check_calls_nothing_of_a_file_that_names_what_is_not_listed(hostile, write, capsys):
  file = write(
    "sent.gin", f"{HEAD}import os\nos.system.command = 'touch note'\nMODEL = @os.system()\n"
  )
  with pytest.raises(SystemExit):
    cli.main(["check", file])
  errors = capsys.readouterr().err
  assert "the module 'os' is not imported: this file may be from elsewhere" in errors
  assert not hostile.exists()


def test_what_is_only_passed_on_cannot_be_called_by_what_is_called(hostile, write, capsys):
  errors = check(
    "from t5x import export_lib\n"
    "train_script.train.model = @gin.singleton()\n"
    "gin.singleton.constructor = @export_lib.write_warmup_examples\n"
    "export_lib.write_warmup_examples.output_dir = 'note'\n"
    "train_script.train:\n  model_dir = 'run'\n  total_steps = 3\n",
    write,
    capsys,
  )
  assert "write_warmup_examples is not on the list of what may be called" in errors


def test_a_function_that_imports_what_its_argument_names_is_not_called(
  hostile, write, capsys, monkeypatch
):
  monkeypatch.syspath_prepend(hostile.parent)  # as `python -m` does
  text = """
from t5x import utils
utils.get_vocabulary.cfg = @utils.DatasetConfig()
train_script.train:
  model = @utils.get_vocabulary()
  model_dir = 'run'
  total_steps = 3
utils.DatasetConfig:
  module = 'evil'
  mixture_or_task_name = 'none'
  task_feature_lengths = None
  split = 'train'
  batch_size = 8
  shuffle = False
  seed = 0
"""
  assert "get_vocabulary is not on the list" in check(text, write, capsys)
  assert not hostile.exists()
  check(text, write, capsys, trust=True)
  assert hostile.exists()


def test_a_module_that_a_file_names_is_not_imported_after_the_file_is_read(hostile, monkeypatch):
  monkeypatch.syspath_prepend(hostile.parent)
  with limited_to_list():
    cfg = DatasetConfig("none", None, "train", 8, False, 0, module="evil")
  with pytest.raises(ValueError, match=r"module 'evil' .* is not imported, .* --trust"):
    find_task_or_mixture(dataclasses.replace(cfg, split="test"))
  assert not hostile.exists()


def test_a_trusted_file_is_run(hostile, write, monkeypatch):
  import toy

  monkeypatch.syspath_prepend(hostile.parent)
  bound = "train_script.train:\n  model = @evil.call()\n  model_dir = 'x'\n  total_steps = 3\n"
  file = write("sent.gin", f"{HEAD}import evil\n{bound}")
  argv = ["check", f"--gin_file={file}", "--dry_run"]
  with limited_to_list(False):
    run_from_command_line(toy.train, argv)
  assert hostile.exists()


@pytest.mark.parametrize(
  "verb", ["check sent.gin", "infer --model_dir . --input sent.gin", "report ."]
)
def test_no_module_is_imported_from_the_folder_that_was_sent(verb, hostile, write, monkeypatch):
  monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
  write("sent.gin", HEAD + "import evil\n")
  write("config.gin", HEAD + "import evil\n")
  with pytest.raises(SystemExit):
    cli.main(verb.split())
  assert str(hostile.parent) not in sys.path
  assert not hostile.exists()


@pytest.mark.parametrize("verb", ["eval", "infer"])
def test_t5x_runs_the_code_of_gin_files_but_not_that_of_folders(verb, hostile, write, monkeypatch):
  monkeypatch.setattr("rosetta_t5.cli.command.begin", lambda name: None)
  monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
  sent = write("config.gin", HEAD + "import evil\n")
  for argument, is_run in ("--model_dir=.", False), (f"--gin_file={sent}", True):
    monkeypatch.setattr(sys, "argv", [f"t5x.{verb}", argument])
    with pytest.raises(SystemExit):
      cli.main([verb, argument])
    assert not hostile.exists()
    with pytest.raises(SystemExit):
      cli.run_module(verb)
    assert hostile.exists() == is_run


@pytest.mark.parametrize("table", [CALLED, NAMED])
def test_every_listed_name_exists(table):
  import_seqio()
  for module, names in table.items():
    __import__(module)
    examples = {"optax": "adamw cosine_decay_schedule", "optax.contrib": "prodigy"}
    for name in examples.get(module, names).split():
      assert hasattr(sys.modules[module], name), f"{module}.{name}"
      if table is CALLED:
        assert callable(find_public(f"{module}.{name}"))


def write_files(write, folder: pathlib.Path, text: str, *bindings: str) -> dict[str, Any]:
  """Returns the arguments that gin gives to train, and writes the model file that train writes."""
  with temporary_run_function(train):
    arguments = configure(read_program([write("run.gin", text)], bindings), train)()
    write_model_file(folder)
  return arguments


@pytest.fixture
def model_file(write, tmp_path):
  return write_files(write, tmp_path, RUN), tmp_path / NAME


def test_a_model_file_describes_what_gin_configures(model_file):
  arguments, file = model_file
  read = read_model_file(file)
  gin.clear_config()
  model, expected = read["model"], arguments["model"]
  assert model.module.config == expected.module.config
  assert model.input_vocabulary == expected.input_vocabulary
  assert model.decode_fn.keywords == {"alpha": 0.25}
  assert read["train_dataset_cfg"] == arguments["train_dataset_cfg"]
  assert read["task_feature_lengths"] == {"inputs": 16, "targets": 8}
  assert {"seqio", "t5x.models"} <= set(read.content["modules"])
  assert read["partitioner"].mesh.shape == arguments["partitioner"].mesh.shape
  assert read.get("trainer_cls") is None


def test_a_folder_is_opened_from_its_model_file(model_file, hostile, monkeypatch):
  monkeypatch.setattr("rosetta_t5.trained_model.join_run", lambda *_: None)
  folder = model_file[1].parent
  (folder / "config.gin").write_text("import evil\n")
  run, restore_cfg = read_run(folder)
  assert run["model"].module.config.emb_dim == 8
  assert (restore_cfg.path, restore_cfg.mode) == (str(folder), "latest")
  with pytest.raises(SystemExit):
    read_run(folder, ["--gin.TRAIN_STEPS=3"])  # config.gin is read too
  assert not hostile.exists()


def test_a_module_that_a_model_file_names_is_not_imported(model_file, hostile, monkeypatch):
  monkeypatch.syspath_prepend(hostile.parent)
  file = model_file[1]
  (file.parent / CHECKSUMS_NAME).unlink()
  sizes = {"mixture_or_task_name": "x", "task_feature_lengths": {}, "split": "train"}
  data = {"@call": "t5x.utils.DatasetConfig", **sizes, "batch_size": 1, "shuffle": False}
  content = json.loads(file.read_text())
  content["train_dataset_cfg"] = {**data, "seed": 0, "module": "evil"}
  file.write_text(json.dumps(content))
  with pytest.raises(ValueError, match="'evil'"):
    find_task_or_mixture(read_model_file(file)["train_dataset_cfg"])
  assert not hostile.exists()


def test_a_run_with_a_class_of_its_own_is_described_by_config_gin_alone(write, tmp_path):
  text = (
    RUN
    + "import toy\nfrom t5x import utils\ntrain/utils.DatasetConfig.mixture_or_task_name = @toy.Model()\n"
  )
  write_files(write, tmp_path, text, "toy.Model.width = 8")
  assert '"@other": "toy.Model"' in (tmp_path / NAME).read_text()
  assert not read_model_file(tmp_path / NAME).is_complete


@pytest.mark.parametrize(
  ("where", "value", "error"),
  [
    ("version", 7, "must have the version 1 of a model file, got 7"),
    ("model.@call", "os.system", "'os.system' is not a function or class that this file may name"),
    ("model.@call", "t5x.utils.import_module", "is not a function or class that this file may"),
    ("model.@call", "t5x.utils.DatasetConfig", "model: t5x.utils.DatasetConfig cannot be built: "),
    ("model", {"@import": "os"}, "{'@import': 'os'} is not a value of a model file"),
    (
      "model.module.config.dtype",
      "float16",
      "T5Config cannot be built: T5Config.dtype = 'float16'",
    ),
    ("model.module.config.size", 3, "got an unexpected keyword argument 'size'"),
    ("partitioner.logical_axis_rules.activation_partitioning_dims", 7, "rules cannot be built"),
  ],
)
def test_a_wrong_model_file_is_refused_with_the_name_of_the_value(model_file, where, value, error):
  file = model_file[1]
  content = json.loads(file.read_text())
  (file.parent / CHECKSUMS_NAME).unlink()
  *folders, last = where.split(".")
  inner = content
  for name in folders:
    inner = inner[name]
  inner[last] = value
  file.write_text(json.dumps(content))
  with pytest.raises(ConfigError, match=NAME) as raised:
    read_model_file(file)[where.split(".")[0]]
  assert error in str(raised.value)


def test_a_model_file_with_another_number_is_refused_unless_its_checksums_were_removed(model_file):
  text = model_file[1].read_text()
  changed = text.replace('"emb_dim": 8,', '"emb_dim": 9,')
  assert changed != text
  model_file[1].write_text(changed)
  with pytest.raises(DamagedFileError, match=r"changed it, remove .*checksums\.json"):
    read_model_file(model_file[1])
  (model_file[1].parent / CHECKSUMS_NAME).unlink()
  assert read_model_file(model_file[1])["model"].module.config.emb_dim == 9


@pytest.mark.parametrize("modules", [["evil"], [3], [["seqio"]], "evil", True])
def test_a_model_file_imports_only_listed_modules(model_file, hostile, modules):
  file = model_file[1]
  content = json.loads(file.read_text()) | {"modules": modules}
  (file.parent / CHECKSUMS_NAME).unlink()
  file.write_text(json.dumps(content))
  with pytest.raises(ConfigError, match="is not a module that this file may name"):
    read_model_file(file).import_modules()


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, "\ud800", "9" * 10_000])
def test_a_file_that_is_not_a_model_file_is_refused(tmp_path, text):
  (tmp_path / NAME).write_bytes(text.encode("utf-8", "surrogatepass"))
  with pytest.raises(ConfigError, match=NAME):
    read_model_file(tmp_path / NAME)


def test_a_value_that_is_nested_too_deeply_is_refused(tmp_path):
  deep = (
    '{"version": 1, "partitioner": 1, "task_feature_lengths": 1, "model": '
    + "[" * 990
    + "]" * 990
    + "}"
  )
  (tmp_path / NAME).write_text(deep)
  with pytest.raises(ConfigError, match=NAME):
    read_model_file(tmp_path / NAME)["model"]
