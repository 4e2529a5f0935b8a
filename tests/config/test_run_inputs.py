"""MODEL_DIR can be opened elsewhere: it has copies of vocabularies, and the places of data."""

from __future__ import annotations

import json
import os
import pathlib
import shutil

import gin
import pytest

from rosetta_t5.config import ConfigError
from rosetta_t5.config.configuration import configure
from rosetta_t5.config.language.binding import temporary_run_function
from rosetta_t5.config.language.statements import read_program
from rosetta_t5.config.model_file import NAME, ModelFile, read_model_file, write_model_file
from rosetta_t5.config.saved_config import get_gin_config_str
from rosetta_t5.data import local_copies, quickstart_data
from rosetta_t5.data.tensorflow_import import import_seqio
from rosetta_t5.data.vocabularies.sentencepiece_models import train_sentencepiece
from rosetta_t5.files import CHECKSUMS_NAME
from rosetta_t5.trained_model import read_run, train

RUN = """
include 't5x/examples/t5/t5_1_1/tiny.gin'
include 't5x/configs/runs/pretrain.gin'
from __gin__ import dynamic_registration
import seqio
from rosetta_t5 import data
from rosetta_t5.data.tasks import stdlib_docs
MIXTURE_OR_TASK_NAME = @data.file_task()
data.file_task:
  files = ['rows.txt']
  vocabulary = %VOCABULARY
TASK_FEATURE_LENGTHS = {'inputs': 16, 'targets': 8}
DROPOUT_RATE = 0.0
TRAIN_STEPS = 100
MODEL_DIR = 'run'
"""
OWN = "VOCABULARY = @seqio.SentencePieceVocabulary()\nseqio.SentencePieceVocabulary.sentencepiece_model_file = '{}'\n"
GS = local_copies.T5_VOCABULARY


@pytest.fixture(scope="module")
def spiece() -> bytes:
  return train_sentencepiece([f"the number {n} is not {n * n}" for n in range(300)], 120)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch, spiece):
  """Returns a function that writes a run's folder and moves it away from the run's other files."""
  monkeypatch.setattr("rosetta_t5.trained_model.join_run", lambda *_: None)
  monkeypatch.setattr("rosetta_t5.config.launch.join_run", lambda *_: None)
  for variable in (
    local_copies.ASSETS_VARIABLE,
    local_copies.DATA_VARIABLE,
    quickstart_data.FOLDER_VARIABLE,
  ):
    monkeypatch.setenv(variable, "")  # so that it is restored
    monkeypatch.delenv(variable)
  here, there = tmp_path / "here", tmp_path / "there"
  (here / "run").mkdir(parents=True)
  (there / "empty").mkdir(parents=True)
  monkeypatch.chdir(here)
  (here / "spiece.model").write_bytes(spiece)
  (here / "rows.txt").write_text("a text\n" * 20)
  monkeypatch.setenv(local_copies.ASSETS_VARIABLE, f"{GS}={here / 'spiece.model'}")

  def write_run(text: str) -> pathlib.Path:
    recipe = here / "run.gin"
    recipe.write_text(RUN + text)
    with temporary_run_function(train):
      configure(read_program([str(recipe)], []), train)()
      write_model_file(here / "run")
      (here / "run/config.gin").write_text(get_gin_config_str())
    gin.clear_config()
    shutil.move(here / "run", there / "run")
    (here / "spiece.model").unlink()
    monkeypatch.delenv(local_copies.ASSETS_VARIABLE)
    monkeypatch.chdir(there / "empty")
    return there / "run"

  yield write_run
  gin.clear_config()


@pytest.mark.parametrize("path", ["spiece.model", GS])
def test_a_moved_folder_has_the_vocabulary_of_its_model_and_task(elsewhere, path, tmp_path):
  folder = elsewhere(OWN.format(path))
  run, _ = read_run(pathlib.Path("..", folder.name))  # from there/empty
  vocabulary = run["model"].output_vocabulary
  assert vocabulary.vocab_size == (220 if path == GS else 120)  # with the sentinels of the path
  assert vocabulary.decode(vocabulary.encode("the number 7")) == "the number 7"
  assert pathlib.Path(vocabulary.sentencepiece_model_file).resolve().is_relative_to(folder)
  described = run.content["train_dataset_cfg"]["mixture_or_task_name"]
  assert described["files"] == [str(tmp_path / "here/rows.txt")]
  # Tasks and config.gin, which name the original, find the copy too.
  assert local_copies.local_path(path) == vocabulary.sentencepiece_model_file


def test_a_moved_run_on_the_quickstarts_text_writes_nothing_where_it_is_opened(elsewhere, spiece):
  data = pathlib.Path("quickstart/data").absolute()
  data.mkdir(parents=True)
  (data / quickstart_data.VOCABULARY_FILE).write_bytes(spiece)
  (data / "manifest.json").write_text("{}")
  folder = elsewhere("VOCABULARY = @stdlib_docs.vocabulary()")
  run, _ = read_run(folder)
  assert run["model"].input_vocabulary.vocab_size == 220
  assert os.environ[quickstart_data.FOLDER_VARIABLE] == str(data)
  assert os.listdir() == []


def test_the_folder_of_data_is_recorded_and_the_users_own_comes_first(elsewhere, tmp_path):
  import_seqio().set_tfds_data_dir_override(None)  # An earlier test may have set it.
  os.environ[local_copies.DATA_VARIABLE] = os.path.relpath(tmp_path)
  described = read_model_file(elsewhere(OWN.format("spiece.model")) / NAME)
  assert described.content["surroundings"]["data_folder"] == str(tmp_path)
  os.environ[local_copies.DATA_VARIABLE] = "mine"
  described.use_data_folders()
  assert os.environ[local_copies.DATA_VARIABLE] == "mine"
  del os.environ[local_copies.DATA_VARIABLE]
  described.use_data_folders()
  assert os.environ[local_copies.DATA_VARIABLE] == str(tmp_path)
  hostile = ModelFile(described.file, {"surroundings": {"LD_LIBRARY_PATH": "/"}})
  hostile.use_data_folders()
  assert os.environ.get("LD_LIBRARY_PATH") != "/"


def test_a_model_file_opens_only_files_of_its_own_folder(elsewhere):
  folder = elsewhere(OWN.format("spiece.model"))
  content = json.loads((folder / NAME).read_text())
  (folder / CHECKSUMS_NAME).unlink()
  content["model"]["input_vocabulary"]["sentencepiece_model_file"]["@file"] = "../../x.model"
  (folder / NAME).write_text(json.dumps(content))
  with pytest.raises(ConfigError, match="is not a file in the folder of the run"):
    read_model_file(folder / NAME)
