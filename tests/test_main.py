"""`t5x.main` starts every run, selected by --run_mode or by the gin files."""

from __future__ import annotations

import enum
import sys

import gin
import pytest

from rosetta_t5.config.language.statements import read_program
from rosetta_t5.config.launch import runs_bound_by
from rosetta_t5.config.t5x_surface import RUN_MODES, find_run_function
from t5x.main import RunMode, main

TINY = "--gin_file=t5x/examples/t5/t5_1_1/tiny.gin"


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
  monkeypatch.delenv("ROSETTA_T5_DEBUG", raising=False)
  monkeypatch.chdir(tmp_path)
  yield
  gin.clear_config()


def _error_text(capsys, *arguments: str) -> str:
  with pytest.raises(SystemExit) as ended:
    main(["main", *arguments])
  assert ended.value.code == 2
  return capsys.readouterr().err


def test_run_modes_include_those_of_t5x():
  assert issubclass(RunMode, enum.Enum)
  assert {"train", "eval", "infer", "precompile"} <= {mode.value for mode in RunMode}
  assert {mode.value for mode in RunMode} >= set(RUN_MODES)


def test_gin_files_determine_the_run():
  named = {
    file: runs_bound_by(read_program([f"t5x/configs/runs/{file}.gin"]))
    for file in (
      "pretrain",
      "finetune",
      "eval",
      "infer",
      "infer_from_tfexample_file",
      "precompile",
      "export",
    )
  }
  assert named == {
    "pretrain": ["train"],
    "finetune": ["train"],
    "eval": ["evaluate"],
    "infer": ["infer"],
    "infer_from_tfexample_file": ["infer"],
    "precompile": ["precompile"],
    "export": ["save"],
  }
  assert runs_bound_by(read_program([], ["train.gc_period = 1"])) == ["train"]


def test_run_functions_are_found_by_name(monkeypatch):
  from rosetta_t5.eval import evaluate
  from rosetta_t5.export.saved_model import save
  from rosetta_t5.infer import infer
  from rosetta_t5.inference.result_files import write_inferences_to_file
  from rosetta_t5.precompile import precompile
  from rosetta_t5.train import train

  for name in ("train", "evaluate", "infer", "precompile", "save", "write_inferences_to_file"):
    # A run of another test may have set its own function there.
    monkeypatch.delattr(sys.modules["__main__"], name, raising=False)
  assert find_run_function("train") is train
  assert (find_run_function("evaluate"), find_run_function("infer")) == (evaluate, infer)
  assert (find_run_function("precompile"), find_run_function("save")) == (precompile, save)
  # T5X's names of `t5x.infer`, as docs/inference.md binds them.
  assert find_run_function("write_inferences_to_file") is write_inferences_to_file


def test_error_of_an_unknown_mode_lists_the_modes(capsys):
  assert "should be one of <train|eval|infer|" in _error_text(capsys, "--run_mode=trian", TINY)


def test_gin_files_without_a_run_need_a_run_mode(capsys):
  said = _error_text(capsys, TINY, "--gin.DROPOUT_RATE=0.0")
  assert "the gin files bind no run. Set --run_mode=train|eval|infer" in said


def test_gin_files_of_two_runs_need_a_run_mode(capsys):
  both = ["--gin_file=t5x/configs/runs/pretrain.gin", "--gin_file=t5x/configs/runs/eval.gin"]
  said = _error_text(capsys, *both)
  assert "bind several runs (train, evaluate). Set --run_mode=train|eval" in said


def test_run_mode_selects_the_run_that_is_checked(capsys):
  said = _error_text(
    capsys, "--run_mode=eval", "--gin_file=t5x/configs/runs/eval.gin", TINY, "--dry_run"
  )
  assert "CHECKPOINT_PATH, needed at t5x/configs/runs/eval.gin" in said
