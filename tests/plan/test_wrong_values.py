"""A check refuses the values with which a run would fail, and names macro, file and line."""

from __future__ import annotations

import pathlib

import gin
import pytest

from rosetta_t5 import train
from t5x.main import main

WRONG = [
  ("BATCH_SIZE=[8]", "BATCH_SIZE must be an integer of at least 1, got [8]: write 8"),
  ("BATCH_SIZE=True", "BATCH_SIZE must be an integer of at least 1, got True"),
  ("BATCH_SIZE=16.0", "BATCH_SIZE must be an integer of at least 1, got 16.0: write 16"),
  ("BATCH_SIZE='16'", "BATCH_SIZE must be an integer of at least 1, got '16': write 16"),
  ("BATCH_SIZE=None", "BATCH_SIZE must be an integer of at least 1, got None"),
  ("network.T5Config.emb_dim=32.5", "T5Config.emb_dim must be an integer of at least 1, got 32.5"),
  ("network.T5Config.dtype='float23'", "T5Config.dtype must be the name of a floating-point type"),
  ("network.T5Config.attention_kernel='cudn'", "got 'cudn'. Did you mean cudnn?"),
  ("network.T5Config.mlp_activations='relu'", "must be a list, got 'relu': write ['relu']"),
  ("TRAIN_STEPS=-5", "TRAIN_STEPS must be an integer of at least 0 and less than 2^31, got -5"),
  ("TRAIN_STEPS=%NOPE", "1 value is missing:\n  NOPE, needed at the command line"),
  ("DROPOUT_RATE=1.5", "DROPOUT_RATE must be a number of at least 0 and less than 1, got 1.5"),
  ("LABEL_SMOOTHING='0.1'", "and less than 1, got '0.1': write 0.1"),
  ("USE_CACHED_TASKS='false'", "USE_CACHED_TASKS must be True or False, got 'false': write False"),
  ("TASK_FEATURE_LENGTHS={'inputs': '64', 'targets': 8}", "LENGTHS['inputs'] must be an integer"),
  ("TASK_FEATURE_LENGTHS=[64, 8]", "TASK_FEATURE_LENGTHS must be a dict or None, got [64, 8]"),
  ("utils.SaveCheckpointConfig.period=-1", "period must be an integer of at least 0 or None, got"),
  ("utils.SaveCheckpointConfig.dtype='float64'", "must be one of 'float32', 'bfloat16', 'float16'"),
  ("utils.CheckpointConfig.save=True", "must be an object of the class SaveCheckpointConfig or"),
  (
    "utils.create_learning_rate_scheduler.base_learning_rate=-0.1",
    "must be a number of at least 0",
  ),
  ("trainer.Trainer.learning_rate_fn=0.1", "must be a function or class, got 0.1"),
  (
    "train.partitioner=@partitioning.PjitPartitioner",
    "PjitPartitioner: write @t5x.partitioning.Pj",
  ),
  ("MODEL_DIR=''", "which only a shell replaces, got ''"),
  ("MODEL_DIR='~/run'", "MODEL_DIR must be a string that is not empty and does not begin with ~, "),
  ("OPTIMIZER=None", "optimizer_def must be an optimizer, got None: set OPTIMIZER"),
]


@pytest.mark.one_quick_variant
@pytest.mark.parametrize(("binding", "text"), WRONG)
def test_a_value_that_its_argument_does_not_accept_is_refused(check, binding, text):
  status, _, output = check(f"--gin.{binding}")
  assert status == 2
  assert text in output
  assert "problems" not in output


def test_a_wrong_value_is_reported_with_its_macro_and_line_and_every_reader(check):
  output = check("--gin.BATCH_SIZE=0")[2]
  place = "\n  the command line:  BATCH_SIZE = 0\n  read as DatasetConfig.batch_size\n"
  assert output.count(place) == 1


def test_a_run_refuses_what_a_check_refuses_with_the_same_text(check, capsys, monkeypatch):
  def errors(text):
    return [line for line in text.splitlines() if "DROPOUT_RATE" in line]

  checked = check("--gin.DROPOUT_RATE=1.5")[2]
  with pytest.raises(SystemExit) as ended:
    main(["train", "--gin_file=run.gin", "--gin.DROPOUT_RATE=1.5"])
  gin.clear_config()
  assert ended.value.code == 2
  assert errors(capsys.readouterr().err) == errors(checked) != []


@pytest.mark.slow
@pytest.mark.parametrize(
  ("binding", "text"),
  [
    ("USE_CACHED_TASKS=True", "has no offline cache, but USE_CACHED_TASKS = True"),
    ("train/utils.DatasetConfig.split='trian'", "has no split 'trian'; it has 'train'"),
    ("TASK_FEATURE_LENGTHS={'inputs': 8}", "must have the features"),
    ("network.T5Config.vocab_size=100", "embedding table has only 100 rows"),
  ],
)
def test_data_that_a_run_would_refuse_is_refused(check, binding, text):
  status, _, output = check(f"--gin.{binding}")
  assert status == 2
  assert text in output


def test_the_line_that_sets_a_missing_file_is_shown(check):
  pathlib.Path("files.gin").write_text(
    "from __gin__ import dynamic_registration\nfrom rosetta_t5 import data\n"
    "MIXTURE_OR_TASK_NAME = @data.file_task()\nFILES = ['nothing/*.txt']\n"
    "data.file_task.files = %FILES\n"
  )
  status, _, output = check("--gin_file=files.gin")
  assert status == 2
  assert "There is no file 'nothing/*.txt'" in output
  assert "files.gin, line 4:  FILES = ['nothing/*.txt']" in output


def test_what_is_not_on_this_machine_is_listed_as_not_checked(check):
  status, _, output = check(
    "--gin.VOCABULARY=@seqio.SentencePieceVocabulary()",
    "--gin.seqio.SentencePieceVocabulary.sentencepiece_model_file='gs://nowhere/x.model'",
  )
  assert status == 0
  assert "1 value is not checked:\n  the vocabulary gs://nowhere/x.model (it is not on" in output
  assert output.endswith("The configuration is valid as far as it was checked.\n")


def test_a_run_without_a_gin_file_lists_the_arguments_that_it_needs(capsys, monkeypatch):
  monkeypatch.delenv("ROSETTA_T5_DEBUG", raising=False)
  with pytest.raises(SystemExit) as ended:
    train.main(["train", "--gin.TRAIN_STEPS=3"])
  gin.clear_config()
  assert ended.value.code == 2
  assert "train_script.train needs model, train_dataset_cfg, " in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_recipe_replaces_is_not_reported_as_never_used(check):
  status, _, output = check("--gin_file=gin/models/t5_1_1/adamw_opt.gin")
  assert status == 0, output
  assert "never used" not in output


@pytest.mark.slow
def test_a_check_reads_the_first_rows_of_files(check, isolated_registries):
  pathlib.Path("rows.csv").write_text("question,answer\n" + "How many?,seven\n" * 400)
  pathlib.Path("rows.gin").write_text(
    "from __gin__ import dynamic_registration\nfrom rosetta_t5 import data\n"
    "MIXTURE_OR_TASK_NAME = @data.file_task()\n"
    "data.file_task:\n  files = 'rows.csv'\n  vocabulary = %VOCABULARY\n  objective = 'seq2seq'\n"
    "  inputs = 'question'\n  targets = 'answer'\n  validation_percent = 0.0\n"
  )
  status, rows, _ = check("--gin_file=rows.gin")
  assert status == 0
  truncated = "truncated: 0.0% of the inputs, 0.0% of the targets, of the first 256"
  assert rows["examples"].startswith(f"400 in all; {truncated}; 100 steps are about")
  status, _, output = check("--gin_file=rows.gin", "--gin.data.file_task.targets='Answer'")
  assert status == 2
  assert "rows.csv, line 2: no column 'Answer' (did you mean 'answer'?) among" in output
  lengths = "{'inputs': 16, 'targets': 4}"
  status, _, output = check("--gin_file=rows.gin", f"--gin.TASK_FEATURE_LENGTHS={lengths}")
  assert status == 2
  assert "100% of the first 256 targets" in output
